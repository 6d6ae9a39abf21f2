//! Clusters of engines, by number, router and link.

use std::time::Duration;

use serde_json::json;

use crate::{
    engine::{Cluster, Router, serve_cluster},
    lane::GBPS,
    machine::Machine,
    outcome::{Outcome, size, time},
    parallel::each,
    shown::{Numbers, tables},
    summary::{Counted, Summary},
};

/// Clusters to compare, each of them with all routers, without links and with each one.
#[derive(Debug, Clone, PartialEq)]
pub struct Clusters {
    /// Numbers of engines, up to [`Self::ENGINES_MAX`].
    pub engines: Vec<u32>,
    /// Links between machines, in Gbps.
    pub links: Vec<f64>,
    /// Time until the directory knows what an engine stored or dropped.
    pub delay: Duration,
}

const ROUTERS: [(&str, Router); 3] = [
    ("round robin", Router::RoundRobin),
    ("least loaded", Router::LeastLoaded),
    ("prefix-aware", Router::Prefix),
];

impl Clusters {
    /// Greatest number of engines.
    pub const ENGINES_MAX: u32 = 64;

    /// Returns the number of routers and of numbers of engines to simulate.
    pub fn runs(&self) -> usize {
        self.engines.len() * ROUTERS.len()
    }
}

/// Serves the workload with each cluster. Calls `next` with a name before the links of each number
/// of engines and router.
/// Panics if one of the requests does not fit into the GPUs' memory (see [`Machine::too_long`]), or
/// if a cluster has no engines or too many.
pub fn cluster(
    machine: &Machine<'_>,
    clusters: &Clusters,
    workload: &Counted,
    mut next: impl FnMut(&str),
) -> Outcome {
    let (setup, policy) = (machine.setup(), machine.policy());
    let links: Vec<Option<f64>> =
        std::iter::once(None).chain(clusters.links.iter().copied().map(Some)).collect();
    let mut rows = Vec::new();
    for count in &clusters.engines {
        assert!((1..=Clusters::ENGINES_MAX).contains(count), "{count} engines");
        for (name, router) in ROUTERS {
            let what = format!("{count} engine{}, {name}", if *count == 1 { "" } else { "s" });
            next(&what);
            let row = |gbps: &Option<f64>| {
                let link = gbps.map(|gbps| machine.parameters.net(gbps * GBPS));
                let (engines, delay) = (*count as usize, clusters.delay);
                let cluster = Cluster { engines, router, link, delay };
                let found = serve_cluster(&setup, &policy, &workload.requests, &cluster);
                let link = gbps.map_or_else(|| "no link".to_owned(), |it| format!("{it} Gbps"));
                let numbers = json!({
                    "summary": Summary::of(&policy, workload, &found.report),
                    "report": found.report,
                    "sends": found.sends(),
                    "balance": found.balance(),
                    "late": found.peers.late,
                    "computed": found.peers.computed,
                });
                (format!("{what}, {link}"), [numbers])
            };
            rows.extend(each(&links, row));
        }
    }
    let setting = machine.setting().into_iter().chain(setting(machine, clusters.delay));
    let mut outcome = Outcome { setting: setting.collect(), ..Outcome::default() };
    let rows: Vec<_> = rows.iter().map(|(name, found)| (name.clone(), &found[..])).collect();
    outcome.tables = tables("cluster", &rows, Numbers::new());
    outcome
}

fn setting(machine: &Machine<'_>, delay: Duration) -> Vec<String> {
    let net = machine.parameters.net(GBPS);
    let mut lines = vec![
        format!(
            "each engine has such a machine, with {} of host memory and {} drives; the rate is \
             that of the cluster",
            size(machine.dram_bytes),
            machine.drives
        ),
        format!(
            "links: a message has 256 tokens and takes {} and its bytes (LMCache, table 1), {} \
             away; no faster than drives. Fetches of an engine queue; those from one do not",
            time(net.set_up),
            time(net.latency)
        ),
        format!(
            "the directory knows {} later what an engine stored or dropped; blocks that are \
             asked for and gone are late, and computed",
            time(delay)
        ),
    ];
    lines.extend(machine.parameters.replaced());
    lines
}
