//! Clusters in host memory.

use std::{cmp::Reverse, collections::BTreeSet, time::Duration};

use crate::cluster::{ClusterId, Clusters};

/// Size of a cache, and costs of a read that it saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheConfig {
    /// Capacity in entries.
    pub entries: usize,
    /// Latency of a read.
    pub latency: Duration,
    /// Transfer of an entry.
    pub transfer: Duration,
}

/// The most cost-effective clusters: the time that they save a step, by the memory they take.
#[derive(Debug, Clone)]
pub struct Cache {
    config: CacheConfig,
    /// Activations of each cluster: one more with each, one less with each step without, while the
    /// cluster is cached.
    frequencies: Vec<u32>,
    cached: BTreeSet<ClusterId>,
}

impl Cache {
    /// Makes a cache with the clusters of the highest scores, given the activations of each cluster
    /// in a profile.
    ///
    /// # Panics
    /// Panics if there are not as many frequencies as clusters.
    #[must_use]
    pub fn new(config: CacheConfig, clusters: &Clusters, frequencies: Vec<u32>) -> Self {
        let cached: BTreeSet<ClusterId> = clusters.iter().map(|(id, _)| id).collect();
        assert_eq!(frequencies.len(), cached.len(), "a frequency for each cluster");
        let mut cache = Self { config, frequencies, cached };
        cache.keep_best(clusters);
        cache
    }

    /// Returns the clusters in memory.
    pub fn iter(&self) -> impl Iterator<Item = ClusterId> {
        self.cached.iter().copied()
    }

    /// Counts a step's activated clusters, which are in memory now, and keeps the most
    /// cost-effective ones: of the activated ones, and of those that it had.
    pub fn step(&mut self, clusters: &Clusters, activated: &[ClusterId]) {
        self.frequencies.resize(clusters.iter().count(), 0);
        let activated: BTreeSet<ClusterId> = activated.iter().copied().collect();
        for id in &self.cached {
            let frequency = &mut self.frequencies[id.0 as usize];
            *frequency = frequency.saturating_sub(u32::from(!activated.contains(id)));
        }
        activated.iter().for_each(|id| self.frequencies[id.0 as usize] += 1);
        self.cached.extend(activated);
        self.keep_best(clusters);
    }

    /// Returns the score of equation 6: activations, by the time to read the cluster, by its size.
    fn score(&self, clusters: &Clusters, id: ClusterId) -> f64 {
        let entries = clusters.get(id).members.len() as f64;
        let time = self.config.latency.as_secs_f64() + entries * self.config.transfer.as_secs_f64();
        f64::from(self.frequencies[id.0 as usize]) * time / entries
    }

    /// Keeps as many clusters as fit, the best first.
    fn keep_best(&mut self, clusters: &Clusters) {
        let key = |id: ClusterId| (Reverse(self.score(clusters, id).to_bits()), id);
        // Scores are not negative, so that their bits have the same order.
        let mut queue: Vec<_> = self.cached.iter().map(|id| key(*id)).collect();
        queue.sort_unstable();
        let mut left = self.config.entries;
        let fits = |id: &ClusterId| {
            let rest = left.checked_sub(clusters.get(*id).members.len());
            left = rest.unwrap_or(left);
            rest.is_some()
        };
        self.cached = queue.into_iter().map(|(_, id)| id).filter(fits).collect();
    }
}
