//! Swarm: clusters of entries over several drives.

pub(super) mod growth;
pub(super) mod reading;

use std::time::Duration;

use kv_schedule::{Direction, OpId};
use kv_swarm::{Cluster, ClusterId, Clusters, Profile, Read};

use crate::{
    lane::{Lane, LaneModel},
    parallel::each,
    parameters::Parameters,
    shown::Results,
    swarm::{Activations, LAW, Law, Step},
};

/// Steps of the profile.
const PROFILE: usize = 1024;
/// Radius of clusters, the best one in `swarm-12`. The paper gives none.
const RADIUS: f64 = 0.4;
/// Bytes of an entry: keys and values of eight heads of 128 dimensions, 2 bytes each.
const ENTRY_BYTES: u64 = 2 * 8 * 128 * 2;
/// The paper's drives, four of each.
const DRIVES: [&str; 2] = ["PM9A3", "900P"];
const COUNT: usize = 4;

/// A layer's entries, after their profile.
struct Layer {
    law: Law,
    activations: Activations,
    profile: Profile,
    clusters: Clusters,
    /// The steps that follow.
    steps: Vec<Step>,
}

impl Layer {
    fn new(law: Law, seed: u64, steps: usize) -> Self {
        let mut activations = Activations::new(law, seed);
        let mut profile = Profile::new(PROFILE);
        (0..PROFILE).for_each(|_| profile.record(&activations.step().active));
        let clusters = Clusters::build(&profile, law.entries, RADIUS);
        let steps = (0..steps).map(|_| activations.step()).collect();
        Self { law, activations, profile, clusters, steps }
    }

    /// Returns the best clusters that have as many entries as a step activates.
    fn budgeted(&self, clusters: &Clusters, few: usize, step: &Step) -> Vec<ClusterId> {
        let budget = (f64::from(self.law.entries) * self.law.active) as usize;
        select(clusters, few, step, |entries, _| entries >= budget)
    }
}

/// Returns the clusters with the best scores, the means of those of the first `few` members, until
/// enough of their entries, and of the activated ones, are there.
fn select(
    clusters: &Clusters,
    few: usize,
    step: &Step,
    is_enough: impl Fn(usize, usize) -> bool,
) -> Vec<ClusterId> {
    let score = |cluster: &Cluster| {
        let some = &cluster.members[..few.min(cluster.members.len())];
        let sum: f32 = some.iter().map(|it| step.scores[it.0 as usize]).sum();
        sum / some.len() as f32
    };
    let mut is_new = vec![true; step.scores.len()];
    let (mut entries, mut active) = (0, 0);
    clusters.select(score, |cluster| {
        for member in &cluster.members {
            let is_new = std::mem::take(&mut is_new[member.0 as usize]);
            entries += usize::from(is_new);
            active += usize::from(is_new && step.is_active(*member));
        }
        is_enough(entries, active)
    })
}

/// Returns a drive of the paper. Nothing is written.
fn drive(parameters: &Parameters, name: &str) -> LaneModel {
    let of = |what: &str| parameters.value(&format!("swarm.{name}.{what}"));
    LaneModel {
        read: of("read"),
        write: of("read"),
        latency: Duration::from_secs_f64(of("latency") * 1e-6),
        object: Duration::from_secs_f64(of("iops").recip()),
        set_up: Duration::ZERO,
        mixed: 1.0,
        window: usize::MAX,
    }
}

/// Returns the time in us until the last of several equal drives has read its batch, with a command
/// for each entry, or for all in neighbouring slots.
fn time(drive: &LaneModel, batches: &[Vec<Read>], is_merged: bool) -> f64 {
    let mut last = Duration::ZERO;
    for batch in batches.iter().filter(|batch| !batch.is_empty()) {
        let is_next = |pair: &&[Read]| pair[1].place.slot == pair[0].place.slot + 1;
        let merged = if is_merged { batch.windows(2).filter(is_next).count() } else { 0 };
        let (bytes, commands) = (batch.len() as u64 * ENTRY_BYTES, (batch.len() - merged) as u64);
        let mut lane = Lane::new(*drive);
        lane.push(Duration::ZERO, OpId(0), Direction::Read, bytes, commands);
        last = last.max(lane.ends());
    }
    last.as_secs_f64() * 1e6
}

/// Returns the means over seeds 1 to 5, number by number.
fn means(run: impl Fn(u64) -> Results + Send + Sync) -> Results {
    let found = each(&[1, 2, 3, 4, 5], |seed| run(*seed));
    let mean = |at: usize| found.iter().map(|all| all[at].1).sum::<f64>() / found.len() as f64;
    found[0].iter().enumerate().map(|(at, (name, _))| (name.clone(), mean(at))).collect()
}

#[cfg(test)]
mod tests;
