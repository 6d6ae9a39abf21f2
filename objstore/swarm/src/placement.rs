//! Places of clusters on drives.

use crate::{
    cluster::{ClusterId, Clusters},
    profile::Entry,
};

/// Index of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Drive(pub usize);

/// Place of a copy of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Drive.
    pub drive: Drive,
    /// Index on the drive, in entries.
    pub slot: u64,
}

/// Places of all copies, by cluster and position.
///
/// A store has the same ones in its affine layout: docs/adr/0017-clusters.md.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Slots in use, by drive.
    used: Vec<u64>,
    places: Vec<Vec<Place>>,
}

impl Placement {
    /// Places all clusters: each begins on the drive after the end of the previous one.
    ///
    /// # Panics
    /// Panics if there are no drives.
    #[must_use]
    pub fn new(clusters: &Clusters, drives: usize) -> Self {
        assert!(drives > 0, "clusters without drives");
        let mut placement = Self { used: vec![0; drives], places: Vec::new() };
        clusters.iter().for_each(|(id, _)| placement.extend(clusters, id));
        placement
    }

    /// Places the next cluster, or the entries that joined one, each on the next drive.
    pub fn extend(&mut self, clusters: &Clusters, id: ClusterId) {
        let at = id.0 as usize;
        self.places.resize_with(self.places.len().max(at + 1), Vec::new);
        while self.places[at].len() < clusters.get(id).members.len() {
            let next = match self.places[at].last() {
                Some(last) => last.drive.0 + 1,
                None => self.used.iter().sum::<u64>() as usize,
            };
            let drive = Drive(next % self.used.len());
            let slot = self.used[drive.0];
            self.used[drive.0] += 1;
            self.places[at].push(Place { drive, slot });
        }
    }

    /// Returns all copies, by cluster and position, in the order of their slots: the first slots of
    /// all drives, then the second ones. A store that numbers its files in this order has them
    /// where they are placed.
    #[must_use]
    pub fn in_order(&self) -> Vec<(ClusterId, usize)> {
        let of = |(id, places): (u32, &Vec<Place>)| {
            let place = move |(at, place): (usize, &Place)| (place.slot, place.drive, id, at);
            places.iter().enumerate().map(place).collect::<Vec<_>>()
        };
        let mut copies: Vec<_> = (0..).zip(&self.places).flat_map(of).collect();
        copies.sort_unstable();
        copies.into_iter().map(|(.., id, at)| (ClusterId(id), at)).collect()
    }

    /// Replaces the places of all copies, given in the order of [`Placement::in_order`], by those
    /// that a store found for them. Copies that are placed later get slots behind all of these.
    ///
    /// # Panics
    /// Panics if there are fewer places than copies, or one is on another drive than these.
    #[must_use]
    pub fn moved(mut self, places: impl IntoIterator<Item = Place>) -> Self {
        let mut places = places.into_iter();
        for (id, at) in self.in_order() {
            let place = places.next().expect("a place for each copy");
            let used = &mut self.used[place.drive.0];
            *used = (*used).max(place.slot + 1);
            self.places[id.0 as usize][at] = place;
        }
        self
    }

    /// Returns the number of drives.
    #[must_use]
    pub fn drives(&self) -> usize {
        self.used.len()
    }

    /// Returns the places of a cluster's members, in their order.
    #[must_use]
    pub fn of(&self, id: ClusterId) -> &[Place] {
        &self.places[id.0 as usize]
    }

    /// Returns the places of all copies of an entry.
    pub fn copies(&self, clusters: &Clusters, entry: Entry) -> impl Iterator<Item = Place> {
        clusters.of(entry).iter().map(|(id, at)| self.of(*id)[*at])
    }
}
