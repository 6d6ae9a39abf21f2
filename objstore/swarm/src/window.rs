//! New entries, until their clusters are known.

use std::collections::VecDeque;

use crate::{
    cluster::{Cluster, ClusterId, Clusters},
    placement::{Place, Placement},
    profile::{Entry, Profile},
};

/// An entry that left the window, and the places that it is to be written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joined {
    /// The entry.
    pub entry: Entry,
    /// Its clusters, and its place in each.
    pub places: Vec<(ClusterId, Place)>,
}

/// The newest entries, which stay in host memory, and the activations of the last steps.
#[derive(Debug, Clone)]
pub struct Window {
    steps: usize,
    newest: VecDeque<Entry>,
    profile: Profile,
}

impl Window {
    /// Makes a window of `steps` steps, and as many new entries; the paper's has 256.
    ///
    /// # Panics
    /// Panics if `steps` is 0.
    #[must_use]
    pub fn new(steps: usize) -> Self {
        Self { steps, newest: VecDeque::new(), profile: Profile::new(steps) }
    }

    /// Records a step: the entries that it activates, and the one that it adds. Returns the entry
    /// that leaves the window, if it is full.
    ///
    /// That entry joins all clusters whose medoid was closer than `radius` within the window
    /// (equation 9). If there is none, it is a cluster of its own: every entry has to be found.
    pub fn step(
        &mut self,
        active: &[Entry],
        new: Entry,
        radius: f64,
        clusters: &mut Clusters,
        placement: &mut Placement,
    ) -> Option<Joined> {
        self.profile.record(active);
        self.newest.push_back(new);
        if self.newest.len() <= self.steps {
            return None;
        }
        let entry = self.newest.pop_front()?;
        let is_close = |(id, cluster): (ClusterId, &Cluster)| {
            (self.profile.distance(cluster.medoid, entry) < radius).then_some(id)
        };
        let mut found: Vec<ClusterId> = clusters.iter().filter_map(is_close).collect();
        found.iter().for_each(|id| clusters.join(*id, entry));
        if found.is_empty() {
            found.push(clusters.open(Cluster { medoid: entry, members: vec![entry] }));
        }
        let place = |id: ClusterId| {
            placement.extend(clusters, id);
            (id, placement.of(id)[placement.of(id).len() - 1])
        };
        Some(Joined { entry, places: found.into_iter().map(place).collect() })
    }
}
