//! Figures 11 to 15: time of the reads.

use std::time::Duration;

use kv_swarm::{Cache, CacheConfig, ClusterId, Clusters, Placement, Read, retrieve};

use super::{
    COUNT, DRIVES, ENTRY_BYTES, LAW, Law, Layer, Outcome, Parameters, drive, means, outcome,
    predicted, select, table, time,
};
use crate::swarm::{Route, Step, blocks, k_means, lru, medoid_only, no_replicas, singles};

/// Steps that are served.
const STEPS: usize = 64;

/// Means over the steps.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reads {
    /// Entries.
    pub entries: f64,
    /// Percentage of the activated ones.
    pub recall: f64,
    /// Entries of the busiest drive, by the mean of all.
    pub balance: f64,
    /// Time in us, by drive.
    pub time: [f64; 2],
    /// The same with a command for neighbouring slots.
    pub merged: [f64; 2],
}

impl Reads {
    fn new(
        parameters: &Parameters,
        layer: &Layer,
        batches: impl Fn(&Step) -> Vec<Vec<Read>>,
    ) -> Self {
        let drives = DRIVES.map(|name| drive(parameters, name));
        let part = (layer.steps.len() as f64).recip();
        let mut all = Self::default();
        for step in &layer.steps {
            let batches = batches(step);
            let entries = batches.iter().map(Vec::len).sum::<usize>() as f64;
            let most = batches.iter().map(Vec::len).max().unwrap_or(0) as f64;
            let active = batches.iter().flatten().filter(|it| step.is_active(it.entry)).count();
            all.entries += entries * part;
            all.recall += active as f64 / step.active.len() as f64 * 100.0 * part;
            all.balance += most * batches.len() as f64 / entries * part;
            for (at, drive) in drives.iter().enumerate() {
                all.time[at] += time(drive, &batches, false) * part;
                all.merged[at] += time(drive, &batches, true) * part;
            }
        }
        all
    }

    fn times(&self) -> [f64; 4] {
        [self.time[0], self.merged[0], self.time[1], self.merged[1]]
    }
}

/// Clusters, with the reads of as many entries as are activated, and of as many as it takes to have
/// 90 % of the activated ones.
pub(super) struct Organized {
    clusters: Clusters,
    pub budget: Reads,
    pub enough: Reads,
}

impl Organized {
    /// `few` members of a cluster represent it.
    fn new(parameters: &Parameters, layer: &Layer, few: usize, clusters: Clusters) -> Self {
        let placement = Placement::new(&clusters, COUNT);
        let reads = |wanted: &dyn Fn(&Step) -> Vec<ClusterId>| {
            let batches = |step: &Step| retrieve(&clusters, &placement, &wanted(step), |_| false);
            Reads::new(parameters, layer, batches)
        };
        let budget = reads(&|step| layer.budgeted(&clusters, few, step));
        let enough = reads(&|step| {
            select(&clusters, few, step, |_, active| active * 10 >= step.active.len() * 9)
        });
        Self { clusters, budget, enough }
    }

    /// Returns the number of copies of entries.
    pub(super) fn copies(&self) -> usize {
        self.clusters.iter().map(|(_, cluster)| cluster.members.len()).sum()
    }

    fn row(&self) -> Vec<f64> {
        let count = self.clusters.iter().count() as f64;
        let numbers = [count, self.copies() as f64, self.budget.recall, self.enough.entries];
        numbers.into_iter().chain(self.enough.times()).collect()
    }
}

const ORGANIZED: [&str; 9] = [
    "",
    "clusters",
    "copies",
    "recall at 10 %, %",
    "entries for 90 %",
    "PM9A3, us",
    "merged",
    "900P, us",
    "merged",
];

/// Returns entries without clusters, InfLLM's blocks, PQCache's k-means, and clusters.
pub(super) fn organized(parameters: &Parameters, layer: &Layer) -> [Organized; 4] {
    let entries = layer.law.entries;
    let centroids = layer.clusters.iter().count();
    [
        (1, singles(entries)),
        (4, blocks(&layer.profile, entries, 128)),
        // The score of a centroid is the mean of its members'.
        (usize::MAX, k_means(layer.activations.keys(), centroids)),
        (1, layer.clusters.clone()),
    ]
    .map(|(few, clusters)| Organized::new(parameters, layer, few, clusters))
}

pub(in crate::scenario) fn figure_11(parameters: &Parameters) -> Outcome {
    let rows = means(|seed| {
        let layer = Layer::new(LAW, seed, STEPS);
        organized(parameters, &layer).iter().map(Organized::row).collect()
    });
    let mut outcome = outcome(&[
        "Recall: of as many entries as a step activates. Entries and times: until 90 % of the \
         activated ones are there. Merged: neighbouring slots are one command.",
        "No clusters: it is known which entries are activated. Four tokens of a block of 128 \
         represent it (InfLLM), and the centroid of as many clusters as Swarm's (PQCache).",
        "A command of 4 KiB is bound by IOPS on both drives, however long the context is: 4.5 of \
         6.9 GB/s on a PM9A3, 2.25 of 2.5 on a 900P. The paper's change from IOPS to bandwidth at \
         64K and 32K tokens needs commands of more than 6.3 and 4.5 KB.",
    ]);
    let names = ["no clusters", "InfLLM", "PQCache", "Swarm"];
    outcome.tables.push(table("Ways to organize entries", &ORGANIZED, &names, &rows));
    outcome
}

/// Returns clusters of all entries within a radius, clusters without replicas, and the crate's.
pub(super) fn parts(parameters: &Parameters, layer: &Layer, radius: f64) -> [Organized; 3] {
    let clusters = Clusters::build(&layer.profile, layer.law.entries, radius);
    [medoid_only(&layer.profile, layer.law.entries, radius), no_replicas(&clusters), clusters]
        .map(|clusters| Organized::new(parameters, layer, 1, clusters))
}

pub(in crate::scenario) fn figure_12(parameters: &Parameters) -> Outcome {
    const RADII: [f64; 5] = [0.1, 0.2, 0.4, 0.6, 0.8];
    let rows = means(|seed| {
        let layer = Layer::new(LAW, seed, STEPS);
        let parts = RADII.iter().flat_map(|radius| parts(parameters, &layer, *radius));
        parts.map(|it| it.row()).collect()
    });
    let mut outcome = outcome(&[
        "Distances have a direction here, from a medoid to its members. So a medoid is an entry \
         of few groups, all of whose neighbours come with it, and the mean distance only saves \
         copies, until the radius is so large that entries of other groups are within it. By \
         the paper's symmetric distances entries of the most groups would be the first medoids.",
        "A smaller radius leaves entries of several groups out of most of their clusters.",
    ]);
    let names = ["medoid only", "no replicas", "Swarm"];
    for (radius, rows) in RADII.iter().zip(rows.chunks(3)) {
        outcome.tables.push(table(&format!("Radius {radius}"), &ORGANIZED, &names, rows));
    }
    outcome
}

/// Returns the reads of a static route, without balance, without deduplication, and the crate's.
pub(super) fn routed(parameters: &Parameters, layer: &Layer, drives: usize) -> [Reads; 4] {
    let clusters = &layer.clusters;
    let placement = Placement::new(clusters, drives);
    let route = |is_distinct, is_balanced| Some(Route { is_distinct, is_balanced });
    [route(false, false), route(true, false), route(false, true), None].map(|route| {
        Reads::new(parameters, layer, |step| {
            let wanted = layer.budgeted(clusters, 1, step);
            match route {
                Some(route) => route.reads(clusters, &placement, &wanted),
                None => retrieve(clusters, &placement, &wanted, |_| false),
            }
        })
    })
}

pub(in crate::scenario) fn figure_14(parameters: &Parameters) -> Outcome {
    const COUNTS: [usize; 4] = [1, 2, 4, 8];
    let row = |reads: Reads| [reads.entries, reads.balance].into_iter().chain(reads.times());
    let rows = means(|seed| {
        let layer = Layer::new(LAW, seed, STEPS);
        let routed = COUNTS.iter().flat_map(|drives| routed(parameters, &layer, *drives));
        routed.map(|reads| row(reads).collect()).collect()
    });
    let mut outcome = outcome(&[
        "The latency of a batch, 80 us of a PM9A3 and 10 us of a 900P, is in all times, and hides \
         a part of the differences. Of longer contexts it is a smaller part.",
    ]);
    let names = ["static", "no balance", "no deduplication", "Swarm"];
    let columns = ["", "entries", "most by mean", "PM9A3, us", "merged", "900P, us", "merged"];
    for (drives, rows) in COUNTS.iter().zip(rows.chunks(4)) {
        outcome.tables.push(table(&format!("Drives: {drives}"), &columns, &names, rows));
    }
    outcome
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

pub(in crate::scenario) fn figure_15(parameters: &Parameters) -> Outcome {
    const STAYS: [f64; 4] = [0.0, 0.25, 0.5, 0.8];
    const RATIOS: [f64; 5] = [0.025, 0.05, 0.1, 0.2, 0.4];
    const HITS: &str = "hangs on how long groups stay active, and on the memory; the paper's text \
        has neither hit rates nor amounts of memory";
    let mut outcome = outcome(&[
        "Compared are the means over all amounts of memory. The paper's two means agree if LRU \
         hits 15.5 %: then 74 % more are 27 %, and 13.6 % fewer misses. Here that is a memory of \
         half of a step's entries: a cluster is gone before it is used again, and LRU has little.",
        "The paper's counting takes one for each step without an activation, but only from \
         clusters in memory: those that are activated in fewer than half of the steps sink to 0, \
         and others replace them. With much memory and groups that do not stay the profile's \
         clusters, never changed, are better.",
    ]);
    for stays in STAYS {
        let rows = means(|seed| {
            let layer = Layer::new(Law { stays, ..LAW }, seed, CACHED);
            RATIOS.map(|ratio| cached(parameters, &layer, ratio).concat()).to_vec()
        });
        let columns = ["memory", "LRU, %", "us", "Swarm, %", "us", "best of the profile, %", "us"];
        let names = ["2.5 %", "5 %", "10 %", "20 %", "40 %"];
        let title = format!("Hits if groups stay active with the probability {stays}");
        outcome.tables.push(table(&title, &columns, &names, &rows));
        let more = |ours: usize, lru: usize| {
            let quotients = rows.iter().map(|row| row[ours] / row[lru]);
            (quotients.sum::<f64>() / rows.len() as f64 - 1.0) * 100.0
        };
        let name = |what: &str| format!("groups stay with {stays}: {what} than LRU");
        outcome.comparisons.extend([
            predicted(&name("more hits"), "%", 74.0, more(2, 0), HITS),
            predicted(&name("less time"), "%", 13.6, -more(3, 1), ""),
        ]);
    }
    outcome
}
