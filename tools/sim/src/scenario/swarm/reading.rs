//! Figures 11 to 15: time of the reads.

use std::time::Duration;

use kv_swarm::{Cache, CacheConfig, ClusterId, Clusters, Placement, Read, retrieve};

use serde::Deserialize;

use super::{
    COUNT, DRIVES, ENTRY_BYTES, LAW, Law, Layer, Parameters, Results, drive, means, select, time,
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

    /// Names the times, and some other results, of what is read this way.
    fn results<const N: usize>(&self, way: &str, others: [(&str, f64); N]) -> Results {
        let times = DRIVES.into_iter().enumerate().flat_map(|(at, drive)| {
            [(drive.to_owned(), self.time[at]), (format!("{drive}, merged"), self.merged[at])]
        });
        let others = others.map(|(name, value)| (name.to_owned(), value));
        let all = others.into_iter().chain(times);
        all.map(|(name, value)| (format!("{way}|{name}"), value)).collect()
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

    fn results(&self, way: &str) -> Results {
        let others = [
            ("clusters", self.clusters.iter().count() as f64),
            ("copies", self.copies() as f64),
            ("recall", self.budget.recall),
            ("entries", self.enough.entries),
        ];
        self.enough.results(way, others)
    }
}

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

/// Ways to organize entries.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct Organizations {}

impl Organizations {
    pub(in crate::scenario) fn run(&self, parameters: &Parameters) -> Results {
        const WAYS: [&str; 4] = ["no clusters", "InfLLM", "PQCache", "Swarm"];
        means(|seed| {
            let all = organized(parameters, &Layer::new(LAW, seed, STEPS));
            WAYS.iter().zip(&all).flat_map(|(way, it)| it.results(way)).collect()
        })
    }
}

/// Returns clusters of all entries within a radius, clusters without replicas, and the crate's.
pub(super) fn parts(parameters: &Parameters, layer: &Layer, radius: f64) -> [Organized; 3] {
    let clusters = Clusters::build(&layer.profile, layer.law.entries, radius);
    [medoid_only(&layer.profile, layer.law.entries, radius), no_replicas(&clusters), clusters]
        .map(|clusters| Organized::new(parameters, layer, 1, clusters))
}

/// Clusters without their parts.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct Radius {
    radii: Vec<f64>,
}

impl Radius {
    pub(in crate::scenario) fn run(&self, parameters: &Parameters) -> Results {
        const WAYS: [&str; 3] = ["medoid only", "no replicas", "Swarm"];
        means(|seed| {
            let layer = Layer::new(LAW, seed, STEPS);
            let of = |radius: &f64| {
                let all = WAYS.into_iter().zip(parts(parameters, &layer, *radius));
                all.flat_map(|(way, it)| it.results(&format!("{radius}|{way}"))).collect::<Vec<_>>()
            };
            self.radii.iter().flat_map(of).collect()
        })
    }
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

/// Retrieval from several drives.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct Routes {
    drives: Vec<usize>,
}

impl Routes {
    pub(in crate::scenario) fn run(&self, parameters: &Parameters) -> Results {
        const WAYS: [&str; 4] = ["static", "no balance", "no deduplication", "Swarm"];
        means(|seed| {
            let layer = Layer::new(LAW, seed, STEPS);
            let of = |drives: &usize| {
                let all = WAYS.into_iter().zip(routed(parameters, &layer, *drives));
                all.flat_map(|(way, it)| {
                    let others = [("entries", it.entries), ("balance", it.balance)];
                    it.results(&format!("{drives}|{way}"), others)
                })
                .collect::<Vec<_>>()
            };
            self.drives.iter().flat_map(of).collect()
        })
    }
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
