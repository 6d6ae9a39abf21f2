//! Figures 11 to 15: time of the reads.

use std::time::Duration;

use kv_swarm::{Cache, CacheConfig, ClusterId, Clusters, Placement, Read, retrieve};

use serde::Deserialize;

use super::{
    COUNT, DRIVES, ENTRY_BYTES, LAW, Law, Layer, Parameters, RADIUS, Results, drive, means, select,
    time,
};
use crate::{
    shown::results,
    swarm::{Route, Step, blocks, k_means, lru, medoid_only, no_replicas, singles},
};

/// Steps that are served.
const STEPS: usize = 64;

/// Ways to organize entries.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) enum Way {
    #[serde(rename = "no clusters")]
    Singles,
    #[serde(rename = "InfLLM")]
    Blocks,
    #[serde(rename = "PQCache")]
    KMeans,
    #[serde(rename = "medoid only")]
    MedoidOnly,
    #[serde(rename = "no replicas")]
    NoReplicas,
    #[serde(rename = "Swarm")]
    Clusters,
}

/// Reads of the entries of clusters, from drives. The results are means over the steps: of as many
/// entries as are activated (`budget`), and of as many as it takes to have 90 % of the activated
/// ones (`enough`).
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(in crate::scenario) struct Reading {
    pub(super) way: Way,
    pub(super) radius: f64,
    pub(super) drives: usize,
    /// A simpler retrieval than the crate's.
    pub(super) route: Option<Route>,
}

impl Default for Reading {
    fn default() -> Self {
        Self { way: Way::Clusters, radius: RADIUS, drives: COUNT, route: None }
    }
}

impl Reading {
    pub(in crate::scenario) fn run(&self, parameters: &Parameters) -> Results {
        means(|seed| self.of(parameters, &Layer::new(LAW, seed, STEPS)))
    }

    pub(super) fn of(&self, parameters: &Parameters, layer: &Layer) -> Results {
        let (few, clusters) = self.clusters(layer);
        let placement = Placement::new(&clusters, self.drives);
        let reads = |wanted: &[ClusterId]| match self.route {
            Some(route) => route.reads(&clusters, &placement, wanted),
            None => retrieve(&clusters, &placement, wanted, |_| false),
        };
        let copies: usize = clusters.iter().map(|(_, cluster)| cluster.members.len()).sum();
        let count = clusters.iter().count();
        let mut found = results([("clusters", count as f64), ("copies", copies as f64)]);
        found.extend(per_step(parameters, layer, "budget", |step| {
            reads(&layer.budgeted(&clusters, few, step))
        }));
        found.extend(per_step(parameters, layer, "enough", |step| {
            let is_enough = |_, active| active * 10 >= step.active.len() * 9;
            reads(&select(&clusters, few, step, is_enough))
        }));
        found
    }

    /// Returns the clusters, and how many members of each represent it.
    fn clusters(&self, layer: &Layer) -> (usize, Clusters) {
        let (profile, entries) = (&layer.profile, layer.law.entries);
        let ours = || Clusters::build(profile, entries, self.radius);
        match self.way {
            Way::Singles => (1, singles(entries)),
            Way::Blocks => (4, blocks(profile, entries, 128)),
            // As many as Swarm's. The score of a centroid is the mean of its members'.
            Way::KMeans => {
                (usize::MAX, k_means(layer.activations.keys(), layer.clusters.iter().count()))
            }
            Way::MedoidOnly => (1, medoid_only(profile, entries, self.radius)),
            Way::NoReplicas => (1, no_replicas(&ours())),
            Way::Clusters => (1, ours()),
        }
    }
}

/// Returns means over the steps: entries, the percentage of the activated ones, entries of the
/// busiest drive by the mean of all, and times in us by kind of drive; `merged` with a command for
/// neighbouring slots.
fn per_step(
    parameters: &Parameters,
    layer: &Layer,
    what: &str,
    batches: impl Fn(&Step) -> Vec<Vec<Read>>,
) -> Results {
    let drives = DRIVES.map(|name| drive(parameters, name));
    let part = (layer.steps.len() as f64).recip();
    let mut sums = [0.0; 7];
    for step in &layer.steps {
        let batches = batches(step);
        let entries = batches.iter().map(Vec::len).sum::<usize>() as f64;
        let most = batches.iter().map(Vec::len).max().unwrap_or(0) as f64;
        let active = batches.iter().flatten().filter(|it| step.is_active(it.entry)).count();
        let recall = active as f64 / step.active.len() as f64 * 100.0;
        let [one, other] = drives.map(|it| [false, true].map(|merged| time(&it, &batches, merged)));
        let balance = most * batches.len() as f64 / entries;
        let found = [entries, recall, balance, one[0], one[1], other[0], other[1]];
        sums.iter_mut().zip(found).for_each(|(sum, it)| *sum += it * part);
    }
    let names = ["entries", "recall", "balance", "PM9A3", "PM9A3, merged", "900P", "900P, merged"];
    let named = names.into_iter().zip(sums);
    named.map(|(name, mean)| (format!("{what}|{name}"), mean)).collect()
}

/// Steps before those that count, and all.
pub(super) const WARM_UP: usize = 64;
pub(super) const CACHED: usize = 512;

/// Returns the percentage of activated clusters that are in memory, and the time of the reads of
/// the others in us: with LRU, with the crate's cache, and with the best of the profile forever.
pub(super) fn cached(parameters: &Parameters, layer: &Layer, ratio: f64) -> [[f64; 2]; 3] {
    let clusters = &layer.clusters;
    let drive = drive(parameters, DRIVES[0]);
    let entries = (f64::from(layer.law.entries) * ratio) as usize;
    let transfer = drive.object.max(Duration::from_secs_f64(ENTRY_BYTES as f64 / drive.read));
    let config = CacheConfig { entries, latency: drive.latency, transfer };
    let activations = clusters.iter().map(|(_, it)| layer.profile.activations(it.medoid));
    let mut cache = Cache::new(config, clusters, activations.collect());
    let count = clusters.iter().count();
    let in_memory = |ids: &mut dyn Iterator<Item = ClusterId>| {
        let mut is_in_memory = vec![false; count];
        ids.for_each(|id| is_in_memory[id.0 as usize] = true);
        is_in_memory
    };
    let (mut recent, profiled) = (Vec::new(), in_memory(&mut cache.iter()));
    let placement = Placement::new(clusters, COUNT);
    let (mut asked, mut hits, mut times) = (0, [0; 3], [0.0; 3]);
    for (at, step) in layer.steps.iter().enumerate() {
        let wanted = layer.budgeted(clusters, 1, step);
        let recently = in_memory(&mut recent.iter().copied());
        let memories = [recently, in_memory(&mut cache.iter()), profiled.clone()];
        lru(&mut recent, entries, clusters, &wanted);
        cache.step(clusters, &wanted);
        if at < WARM_UP {
            continue;
        }
        asked += wanted.len();
        for (at, memory) in memories.iter().enumerate() {
            let is_hit = |id: ClusterId| memory[id.0 as usize];
            let is_resident = |entry| clusters.of(entry).iter().any(|(id, _)| is_hit(*id));
            let batches = retrieve(clusters, &placement, &wanted, is_resident);
            hits[at] += wanted.iter().filter(|id| is_hit(**id)).count();
            times[at] += time(&drive, &batches, false);
        }
    }
    let steps = (layer.steps.len() - WARM_UP) as f64;
    [0, 1, 2].map(|at| [hits[at] as f64 / f64::from(asked as u32) * 100.0, times[at] / steps])
}

/// Clusters in host memory.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct Memories {
    /// Probability that a group stays active.
    stays: f64,
    /// Percentage of the entries that are in memory.
    memories: Vec<f64>,
}

impl Memories {
    pub(in crate::scenario) fn run(&self, parameters: &Parameters) -> Results {
        const CACHES: [&str; 3] = ["LRU", "Swarm", "profile"];
        means(|seed| {
            let layer = Layer::new(Law { stays: self.stays, ..LAW }, seed, CACHED);
            let of = |percent: &f64| {
                let all = cached(parameters, &layer, percent / 100.0);
                let all = CACHES.into_iter().zip(all);
                all.flat_map(|(cache, [hits, time])| {
                    [("hits", hits), ("us", time)]
                        .map(|(name, value)| (format!("{percent} %|{cache}|{name}"), value))
                })
                .collect::<Vec<_>>()
            };
            self.memories.iter().flat_map(of).collect()
        })
    }
}
