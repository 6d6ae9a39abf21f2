//! Figure 5 and table 5: overlap, and clusters that grow.

use kv_swarm::{ClusterId, Clusters, Entry, Placement, Profile, Window};

use serde::Deserialize;

use super::{COUNT, LAW, Layer, Parameters, RADIUS, Results, means};
use crate::{shown::results, swarm::dot};

/// Steps after the last new entry, which distances are taken of.
const AFTER: usize = 4096;
/// Numbers of entries that left the window: of 4,096 as many as the paper's first row implies.
const GROWN: [usize; 6] = [20, 40, 80, 160, 320, 640];
/// Policies for a new entry that leaves memory.
const POLICIES: [&str; 3] = ["smallest cluster", "most similar medoid", "Swarm"];

/// Returns the mean distance of all members from their medoids.
fn spread(profile: &Profile, clusters: &Clusters) -> f64 {
    let pairs = clusters.iter().flat_map(|(_, it)| it.members.iter().map(|m| (it.medoid, *m)));
    let distances: Vec<f64> = pairs
        .filter(|(medoid, member)| medoid != member)
        .map(|(medoid, member)| profile.distance(medoid, member))
        .collect();
    distances.iter().sum::<f64>() / distances.len() as f64
}

/// Returns the cluster of the fewest entries.
fn smallest(clusters: &Clusters) -> Option<ClusterId> {
    clusters.iter().min_by_key(|(_, cluster)| cluster.members.len()).map(|(id, _)| id)
}

/// Returns the cluster with the medoid of the most similar key.
fn similar(clusters: &Clusters, keys: &[Vec<f32>], entry: Entry) -> Option<ClusterId> {
    let key = |entry: Entry| &keys[entry.0 as usize];
    let cosine = |other: &Vec<f32>| dot(key(entry), other) / dot(other, other).sqrt();
    let all = clusters.iter().map(|(id, cluster)| (cosine(key(cluster.medoid)), id));
    all.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, id)| id)
}

/// Returns the mean distances of the three policies by number of new entries, in units of the first
/// one; and that one, with the percentage of new entries that found no cluster.
pub(super) fn grown(mut layer: Layer) -> Vec<Vec<f64>> {
    let mut all: [Clusters; 3] = std::array::from_fn(|_| layer.clusters.clone());
    let mut placement = Placement::new(&layer.clusters, COUNT);
    let mut window = Window::new(256);
    let (mut then, mut left) = (Vec::new(), 0);
    while then.len() < GROWN.len() {
        let new = layer.activations.append();
        let active = layer.activations.step().active;
        let joined = window.step(&active, new, RADIUS, &mut all[2], &mut placement);
        let Some(joined) = joined else { continue };
        let keys = layer.activations.keys();
        let found = [smallest(&all[0]), similar(&all[1], keys, joined.entry)];
        for (clusters, id) in all.iter_mut().zip(found) {
            clusters.join(id.expect("there are clusters"), joined.entry);
        }
        left += 1;
        if GROWN.contains(&left) {
            then.push(all.clone());
        }
    }
    let mut profile = Profile::new(AFTER);
    (0..AFTER).for_each(|_| profile.record(&layer.activations.step().active));
    let first = spread(&profile, &layer.clusters);
    let row = |which: usize| then.iter().map(|it| spread(&profile, &it[which]) / first).collect();
    let alone = all[2].iter().count() - layer.clusters.iter().count();
    vec![row(0), row(1), row(2), vec![first, alone as f64 / left as f64 * 100.0]]
}

/// Overlap of groups and clusters, and distances in clusters that grow.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::scenario) struct Growth {}

impl Growth {
    pub(in crate::scenario) fn run(&self, _: &Parameters) -> Results {
        means(|seed| {
            let layer = Layer::new(LAW, seed, 0);
            let mut found = overlaps(&layer);
            let rows = grown(layer);
            for (policy, row) in POLICIES.into_iter().zip(&rows) {
                let all = GROWN.iter().zip(row);
                found.extend(all.map(|(new, spread)| (format!("{policy}|{new}"), *spread)));
            }
            found.extend(results([("first", rows[3][0]), ("alone, %", rows[3][1])]));
            found
        })
    }
}

/// Returns the numbers of entries in more than so many groups, and in more clusters than that.
fn overlaps(layer: &Layer) -> Results {
    let of = |entry| layer.clusters.of(Entry(entry)).len();
    let both: [(&str, Vec<usize>); 2] = [
        ("groups", layer.activations.overlaps().collect()),
        ("clusters", (0..LAW.entries).map(of).collect()),
    ];
    let mut found = Results::new();
    for (name, all) in both {
        for than in [1, 2, 5, 10, 20] {
            let more = all.iter().filter(|it| **it > than).count();
            found.push((format!("> {than}|{name}"), more as f64));
        }
        let most = all.iter().copied().max().unwrap_or(0);
        found.push((format!("the most of an entry|{name}"), most as f64));
    }
    found
}
