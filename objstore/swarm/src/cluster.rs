//! Clusters of entries that are activated together.

use std::cmp::Reverse;

use crate::profile::{Entry, Profile};

/// Index of a cluster, in order of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(pub u32);

/// A cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// Its medoid, which represents it in the index.
    pub medoid: Entry,
    /// All of its entries, each once. Their order is that of their places.
    pub members: Vec<Entry>,
}

/// All clusters of a layer. An entry can be in several.
#[derive(Debug, Clone, Default)]
pub struct Clusters {
    all: Vec<Cluster>,
    /// Clusters and positions of each entry.
    of: Vec<Vec<(ClusterId, usize)>>,
}

impl Clusters {
    /// Builds the clusters of the first `entries` entries.
    ///
    /// Medoids are taken from a queue by density, the number of neighbours closer than `radius`. An
    /// entry that is in a cluster already becomes no medoid, or nearly every entry would be one.
    #[must_use]
    pub fn build(profile: &Profile, entries: u32, radius: f64) -> Self {
        let density = |entry| profile.neighbours(entry, radius).len();
        let mut queue: Vec<_> = (0..entries).map(Entry).map(|it| (density(it), it)).collect();
        queue.sort_unstable_by_key(|(density, entry)| (Reverse(*density), *entry));
        let mut clusters = Self::default();
        for (_, medoid) in queue {
            if clusters.of(medoid).is_empty() {
                clusters.open(expand(profile, medoid, entries, radius));
            }
        }
        clusters
    }

    /// Adds a cluster.
    ///
    /// # Panics
    /// Panics if its medoid is no member.
    pub fn open(&mut self, cluster: Cluster) -> ClusterId {
        assert!(cluster.members.contains(&cluster.medoid), "{cluster:?} lacks its medoid");
        let id = ClusterId(self.all.len() as u32);
        for (at, member) in cluster.members.iter().enumerate() {
            self.of_mut(*member).push((id, at));
        }
        self.all.push(cluster);
        id
    }

    /// Adds an entry to a cluster that does not have it yet.
    pub fn join(&mut self, id: ClusterId, entry: Entry) {
        let members = &mut self.all[id.0 as usize].members;
        members.push(entry);
        let at = members.len() - 1;
        self.of_mut(entry).push((id, at));
    }

    /// Returns a cluster.
    #[must_use]
    pub fn get(&self, id: ClusterId) -> &Cluster {
        &self.all[id.0 as usize]
    }

    /// Returns all clusters, in order of creation.
    pub fn iter(&self) -> impl Iterator<Item = (ClusterId, &Cluster)> {
        (0..).map(ClusterId).zip(&self.all)
    }

    /// Returns the clusters that have an entry, and its position in each.
    #[must_use]
    pub fn of(&self, entry: Entry) -> &[(ClusterId, usize)] {
        self.of.get(entry.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Selects clusters, the best `score` first, until `is_enough`, which is asked after each. A
    /// score compares a query with the medoid alone: no other entry has to be in memory for it.
    #[must_use]
    pub fn select(
        &self,
        score: impl Fn(&Cluster) -> f32,
        mut is_enough: impl FnMut(&Cluster) -> bool,
    ) -> Vec<ClusterId> {
        let mut queue: Vec<_> = self.iter().map(|(id, cluster)| (score(cluster), id)).collect();
        queue.sort_unstable_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
        let mut selected = Vec::new();
        for (_, id) in queue {
            selected.push(id);
            if is_enough(self.get(id)) {
                break;
            }
        }
        selected
    }

    fn of_mut(&mut self, entry: Entry) -> &mut Vec<(ClusterId, usize)> {
        let at = entry.0 as usize;
        self.of.resize_with(self.of.len().max(at + 1), Vec::new);
        &mut self.of[at]
    }
}

/// Returns the cluster of a medoid: its neighbours, the nearest first, whose mean distance to those
/// that it has is below the radius (equation 5). Of equally near ones the rarest comes first: the
/// others are in other clusters, too, and far from each other.
fn expand(profile: &Profile, medoid: Entry, entries: u32, radius: f64) -> Cluster {
    let mut queue = profile.neighbours(medoid, radius);
    queue.retain(|(_, entry)| entry.0 < entries);
    queue.sort_by(|one, other| {
        let activations = [one, other].map(|(_, entry)| profile.activations(*entry));
        one.0.total_cmp(&other.0).then(activations[0].cmp(&activations[1]))
    });
    let mut members = vec![medoid];
    for (_, entry) in queue {
        let most = radius * members.len() as f64;
        let mut sum = 0.0;
        let is_close = members.iter().all(|member| {
            sum += profile.distance(entry, *member).min(profile.distance(*member, entry));
            sum < most
        });
        if is_close {
            members.push(entry);
        }
    }
    Cluster { medoid, members }
}
