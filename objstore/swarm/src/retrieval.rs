//! Reads of clusters, as one batch for each drive.

use crate::{
    cluster::{ClusterId, Clusters},
    placement::{Place, Placement},
    profile::Entry,
};

/// A read of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Read {
    /// Place that it is read from.
    pub place: Place,
    /// The entry.
    pub entry: Entry,
}

/// Returns the reads of the wanted clusters, a batch for each drive in order of its slots.
///
/// Entries of several clusters are read once, and resident ones not at all. Entries on the fewest
/// drives choose first, each the drive with the shortest batch, and the first one of equals. A copy
/// in a cluster that is not wanted is as good as any.
pub fn retrieve(
    clusters: &Clusters,
    placement: &Placement,
    wanted: &[ClusterId],
    is_resident: impl Fn(Entry) -> bool,
) -> Vec<Vec<Read>> {
    let members = wanted.iter().flat_map(|id| &clusters.get(*id).members).copied();
    let mut entries: Vec<Entry> = members.filter(|entry| !is_resident(*entry)).collect();
    entries.sort_unstable();
    entries.dedup();
    let drives = |entry| {
        let mut drives: Vec<_> =
            placement.copies(clusters, entry).map(|place| place.drive).collect();
        drives.sort_unstable();
        drives.dedup();
        drives.len()
    };
    let mut queue: Vec<_> = entries.into_iter().map(|entry| (drives(entry), entry)).collect();
    queue.sort_unstable();
    let mut batches: Vec<Vec<Read>> = vec![Vec::new(); placement.drives()];
    for (_, entry) in queue {
        let copies = placement.copies(clusters, entry);
        let shortest = copies.min_by_key(|place| (batches[place.drive.0].len(), *place));
        let place = shortest.expect("a member has a place");
        batches[place.drive.0].push(Read { place, entry });
    }
    batches.iter_mut().for_each(|batch| batch.sort_unstable());
    batches
}
