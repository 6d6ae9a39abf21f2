//! Other ways to organize entries, to read them, and to cache them.

use std::cmp::Reverse;

use kv_swarm::{Cluster, ClusterId, Clusters, Entry, Placement, Profile, Read};
use serde::Deserialize;

/// Returns no clusters: each entry is one.
pub(crate) fn singles(entries: u32) -> Clusters {
    from((0..entries).map(|entry| vec![Entry(entry)]))
}

/// Returns blocks of consecutive entries (InfLLM), represented by the one that was activated most.
pub(crate) fn blocks(profile: &Profile, entries: u32, size: u32) -> Clusters {
    let block = |first: u32| {
        let mut members: Vec<_> = (first..entries.min(first + size)).map(Entry).collect();
        members.sort_by_key(|entry| Reverse(profile.activations(*entry)));
        members
    };
    from((0..entries).step_by(size as usize).map(block))
}

/// Returns clusters of near keys (PQCache, ClusterKV), by Lloyd's iteration.
pub(crate) fn k_means(keys: &[Vec<f32>], count: usize) -> Clusters {
    const ITERATIONS: usize = 6;
    // Tokens at even distances: neighbours in the text are alike.
    let mut centroids: Vec<Vec<f32>> =
        (0..count).map(|at| keys[at * keys.len() / count].clone()).collect();
    let mut nearest = Vec::new();
    for _ in 0..ITERATIONS {
        // Half of the squared length, less the product, orders like the distance.
        let halves: Vec<f32> = centroids.iter().map(|it| dot(it, it) / 2.0).collect();
        let of = |key: &Vec<f32>| {
            let distance = |at: usize| halves[at] - dot(key, &centroids[at]);
            let all = (0..count).map(|at| (distance(at), at));
            all.min_by(|one, other| one.0.total_cmp(&other.0)).map_or(0, |(_, at)| at)
        };
        nearest = keys.iter().map(of).collect::<Vec<usize>>();
        for (at, centroid) in centroids.iter_mut().enumerate() {
            let members = keys.iter().zip(&nearest).filter(|(_, it)| **it == at);
            let members: Vec<&Vec<f32>> = members.map(|(key, _)| key).collect();
            if members.is_empty() {
                continue;
            }
            for (dimension, mean) in centroid.iter_mut().enumerate() {
                let sum: f32 = members.iter().map(|key| key[dimension]).sum();
                *mean = sum / members.len() as f32;
            }
        }
    }
    let mut members = vec![Vec::new(); count];
    (0..).map(Entry).zip(nearest).for_each(|(entry, at)| members[at].push(entry));
    from(members.into_iter().filter(|members| !members.is_empty()))
}

/// Returns clusters of all entries within the radius of a medoid, however far they are from each
/// other.
pub(crate) fn medoid_only(profile: &Profile, entries: u32, radius: f64) -> Clusters {
    let near = |entry| {
        let all = profile.neighbours(entry, radius).into_iter().map(|(_, entry)| entry);
        all.filter(|other| other.0 < entries).collect::<Vec<_>>()
    };
    let mut queue: Vec<_> = (0..entries).map(Entry).map(|it| (near(it), it)).collect();
    queue.sort_by_key(|(near, _)| Reverse(near.len()));
    let mut clusters = Clusters::default();
    for (near, medoid) in queue {
        if clusters.of(medoid).is_empty() {
            let members = [medoid].into_iter().chain(near).collect();
            clusters.open(Cluster { medoid, members });
        }
    }
    clusters
}

/// Returns the same clusters with each entry in the first of its clusters only.
pub(crate) fn no_replicas(clusters: &Clusters) -> Clusters {
    let members = clusters.iter().map(|(id, cluster)| {
        let is_first = |entry: &Entry| clusters.of(*entry)[0].0 == id;
        cluster.members.iter().copied().filter(is_first).collect()
    });
    from(members.filter(|members: &Vec<Entry>| !members.is_empty()))
}

/// Returns clusters of these members, of which the first one is the medoid.
fn from(all: impl Iterator<Item = Vec<Entry>>) -> Clusters {
    let mut clusters = Clusters::default();
    all.for_each(|members| _ = clusters.open(Cluster { medoid: members[0], members }));
    clusters
}

/// A simpler retrieval: each part of the store's can be left out.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Route {
    /// Entries of several wanted clusters are read once.
    pub is_distinct: bool,
    /// Entries are read from the shortest queue, in order of entries, and not from the first copy.
    pub is_balanced: bool,
}

impl Route {
    /// Returns the reads of the wanted clusters.
    pub(crate) fn reads(
        self,
        clusters: &Clusters,
        placement: &Placement,
        wanted: &[ClusterId],
    ) -> Vec<Vec<Read>> {
        let members = wanted.iter().flat_map(|id| &clusters.get(*id).members);
        let mut entries: Vec<Entry> = members.copied().collect();
        if self.is_distinct {
            entries.sort_unstable();
            entries.dedup();
        }
        let mut batches: Vec<Vec<Read>> = vec![Vec::new(); placement.drives()];
        for entry in entries {
            let mut copies = placement.copies(clusters, entry);
            let place = match self.is_balanced {
                true => copies.min_by_key(|place| (batches[place.drive.0].len(), *place)),
                false => copies.next(),
            };
            let place = place.expect("a member has a place");
            batches[place.drive.0].push(Read { place, entry });
        }
        batches.iter_mut().for_each(|batch| batch.sort_unstable());
        batches
    }
}

/// Takes the activated clusters into memory, from which the least recently used ones go: the first.
pub(crate) fn lru(
    cached: &mut Vec<ClusterId>,
    entries: usize,
    clusters: &Clusters,
    active: &[ClusterId],
) {
    cached.retain(|id| !active.contains(id));
    cached.extend(active);
    let mut left = entries;
    let fits = |id: &&ClusterId| {
        left.checked_sub(clusters.get(**id).members.len()).inspect(|rest| left = *rest).is_some()
    };
    let keep = cached.iter().rev().take_while(fits).count();
    cached.drain(..cached.len() - keep);
}

/// Returns the inner product of two keys.
pub(crate) fn dot(one: &[f32], other: &[f32]) -> f32 {
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}
