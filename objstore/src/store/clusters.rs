//! Clusters of KV entries (Swarm, sections 5.2 and 6.1): each copy of an entry is a file.
//!
//! The objects of a row are on the devices in turn, in the order of their files. So copies that get
//! their files in the order of their places ([`Placement::in_order`]) are in these places: each
//! cluster is spread over all devices, and contiguous on each. Reads of clusters are one job, which
//! is one batch for each device. See docs/adr/0017-clusters.md.

use std::{collections::HashMap, sync::Arc};

use kv_catalog::{BlockId, BlockKey, DeviceIndex, FileId, Geometry, KeyChain, Row};
use kv_swarm::{ClusterId, Clusters, Drive, Entry, Place, Placement, Read, retrieve};

use super::{
    Store,
    handles::{LoadRequest, Prefix},
    request::one_for_each,
    reservation::Reservation,
};
use crate::error::StoreError;

/// All copies of the entries of clusters, in the order in which a store places them.
#[derive(Debug, Clone)]
pub struct ClusterCopies {
    /// The entry of each copy.
    pub entries: Vec<Entry>,
    /// The key of each copy: that of its entry for the first one.
    pub keys: Vec<BlockKey>,
    clusters: Clusters,
    placement: Placement,
}

impl ClusterCopies {
    /// Places the copies of clusters on the devices of a store. `key` names an entry: a digest of
    /// all that it depends on, its layer included.
    #[must_use]
    pub fn new(store: &Store, clusters: Clusters, key: impl Fn(Entry) -> BlockKey) -> Self {
        let placement = Placement::new(&clusters, store.geometry().devices as usize);
        let of = |(id, at): (ClusterId, usize)| clusters.get(id).members[at];
        let entries: Vec<Entry> = placement.in_order().into_iter().map(of).collect();
        let mut numbers: HashMap<Entry, u32> = HashMap::new();
        let keys = entries.iter().map(|entry| {
            let number = numbers.entry(*entry).or_default();
            *number += 1;
            copy_key(key(*entry), *number - 1)
        });
        Self { keys: keys.collect(), entries, clusters, placement }
    }

    /// Allocates files for all copies, or none. They are written with [`Store::fill`], in parts as
    /// large as the pool has room for, and visible with [`Store::commit_reservation`].
    ///
    /// # Errors
    /// Returns [`StoreError::NoRoom`], and the errors of [`Store::reserve`].
    pub fn reserve(&self, store: &Store) -> Result<Arc<Reservation>, StoreError> {
        let reservation = store.reserve(&self.keys)?;
        let (asked, found) = (self.keys.len(), reservation.accepted());
        if found < asked { Err(StoreError::NoRoom { asked, found }) } else { Ok(reservation) }
    }

    /// Finds the copies, which are stored, wherever they are now.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`] if one of them is not stored (any more), and the errors of
    /// [`Store::lookup`].
    pub fn find(self, store: &Store) -> Result<StoredClusters, StoreError> {
        let Self { keys, clusters, placement, .. } = self;
        let prefix = store.lookup(&keys)?;
        one_for_each(prefix.len(), keys.len(), "copies of clusters")?;
        let places = prefix.files().iter().map(|file| place(store.geometry(), *file));
        let places: Vec<Place> = places.collect();
        let positions = places.iter().copied().zip(0..).collect();
        Ok(StoredClusters { placement: placement.moved(places), clusters, positions, prefix })
    }
}

/// Returns the key of a copy. No block of a sequence has that of a later one.
fn copy_key(key: BlockKey, number: u32) -> BlockKey {
    if number == 0 {
        return key;
    }
    let seed = [b"copy".as_slice(), &key.0, &number.to_le_bytes()].concat();
    KeyChain::new(&seed).next(&[])
}

/// Clusters whose copies are all stored. They are not evicted until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it gives the copies back"]
pub struct StoredClusters {
    clusters: Clusters,
    placement: Placement,
    /// By place, the position in the prefix.
    positions: HashMap<Place, usize>,
    prefix: Prefix,
}

impl StoredClusters {
    /// Returns the clusters.
    #[must_use]
    pub fn clusters(&self) -> &Clusters {
        &self.clusters
    }

    /// Returns the places of the copies on the devices: that of a file is its object in row 0.
    /// Those in another row are on the device that many numbers further on.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the reads of the wanted clusters, a batch for each device: see [`retrieve`].
    #[must_use]
    pub fn reads(
        &self,
        wanted: &[ClusterId],
        is_resident: impl Fn(Entry) -> bool,
    ) -> Vec<Vec<Read>> {
        retrieve(&self.clusters, &self.placement, wanted, is_resident)
    }

    /// Prepares to read entries into `blocks`, one for each read of all batches in their order.
    ///
    /// # Errors
    /// Same as [`Store::retrieve_at`]. A copy that is damaged fails when it is read, and is lost.
    ///
    /// # Panics
    /// Panics if a read is not from these clusters.
    pub fn retrieve(
        &self,
        store: &Store,
        reads: &[Vec<Read>],
        blocks: &[BlockId],
    ) -> Result<LoadRequest, StoreError> {
        let at = |read: &Read| self.positions[&read.place];
        let positions: Vec<usize> = reads.iter().flatten().map(at).collect();
        store.retrieve_at(&self.prefix, &positions, blocks)
    }
}

/// Returns the place of a file's object in row 0.
fn place(geometry: &Geometry, file: FileId) -> Place {
    let found = geometry.object(file, Row(0));
    let DeviceIndex(device) = found.device;
    Place { drive: Drive(device as usize), slot: found.slot.0 }
}
