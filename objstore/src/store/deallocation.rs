//! Deallocates groups that hold nothing (Dataset Management), so that garbage collection of the
//! drives does not move their data.
//!
//! A group is out of reach while its drives deallocate it: it was free, the journal has made that
//! permanent, and the catalog does not allocate its files meanwhile. Nothing depends on the
//! outcome. A drive that refuses gets no more hints.

use kv_catalog::{FileId, Geometry, Region, Slot};
use nvme_driver::LbaRange;
use nvme_spec::{
    identify::Oncs,
    ids::{Lba, Nsid},
};

use super::Inner;
use crate::device::SharedController;

/// Maximum number of groups in a batch: a committing thread waits for it.
const GROUPS_MAX: usize = 64;

/// A device that supports Dataset Management, and its counts.
#[derive(Debug)]
pub(super) struct Drive {
    controller: SharedController,
    nsid: Nsid,
    data: Region,
    /// NPDG and NPDA, in LBAs.
    units: [u64; 2],
    pub(super) bytes: u64,
    pub(super) failed: u64,
}

impl Drive {
    /// Returns `None` if the device has no Dataset Management.
    pub(super) fn new(shared: &SharedController, nsid: Nsid, data: Region) -> Option<Self> {
        let controller = shared.lock();
        let has_it = controller.info().nvm_commands.contains(Oncs::DATASET_MANAGEMENT);
        let space = controller.namespace(nsid).ok().filter(|_| has_it)?;
        Some(Self {
            controller: shared.clone(),
            nsid,
            data,
            units: [space.deallocate_granularity_lbas, space.deallocate_alignment_lbas]
                .map(u64::from),
            bytes: 0,
            failed: 0,
        })
    }

    fn deallocate(&mut self, geometry: &Geometry, groups: &[FileId]) {
        if self.failed > 0 {
            return;
        }
        let ranges = ranges(geometry, &self.data, self.units, groups);
        if ranges.is_empty() {
            return;
        }
        let told = self.controller.lock().deallocate(self.nsid, &ranges);
        match told {
            Ok(()) => {
                let lbas: u64 = ranges.iter().map(|range| range.lbas).sum();
                self.bytes += lbas << self.data.lba_shift;
            }
            Err(error) => {
                tracing::warn!(%error, "deallocating nothing on this device any more");
                self.failed += 1;
            }
        }
    }
}

/// Returns the LBA ranges of `groups`, which are in order: neighbours in one range, cut to
/// multiples of `granularity` LBAs at multiples of `alignment`, which is what a drive can use.
fn ranges(
    geometry: &Geometry,
    data: &Region,
    [granularity, alignment]: [u64; 2],
    groups: &[FileId],
) -> Vec<LbaRange> {
    let slots = u64::from(geometry.rows) * u64::from(geometry.width());
    let neighbours = groups.chunk_by(|a, b| a.0 + geometry.group == b.0);
    let range = |run: &[FileId]| {
        let first = u64::from(run[0].0 / geometry.group);
        let lba = |group: u64| geometry.lba(data, Slot(group * slots)).0;
        let start = lba(first).next_multiple_of(alignment);
        let lbas = lba(first + run.len() as u64).saturating_sub(start);
        LbaRange { lba: Lba(start), lbas: lbas - lbas % granularity }
    };
    neighbours.map(range).filter(|range| range.lbas > 0).collect()
}

impl Inner {
    /// Deallocates some groups that hold nothing. Called without any lock, by a thread that waits
    /// for no transfer.
    pub(super) fn deallocate(&self) {
        // Another thread that is deallocating does this one's part as well.
        let Ok(mut drives) = self.drives.try_lock() else { return };
        if drives.iter().all(|drive| drive.failed > 0) {
            return;
        }
        // Groups that this catalog takes for unused may be another owner's by now.
        if self.plane.with(|plane| plane.check_owner()).is_err() {
            return;
        }
        let mut groups = self.catalog.with(|catalog| catalog.unused_groups(GROUPS_MAX));
        if groups.is_empty() {
            return;
        }
        groups.sort_unstable();
        for drive in drives.iter_mut() {
            drive.deallocate(&self.geometry, &groups);
        }
        self.catalog.with(|catalog| catalog.deallocated(&groups));
    }
}

#[cfg(test)]
mod tests {
    use kv_catalog::KvShape;

    use super::*;

    #[test]
    fn neighbours_are_one_range_and_edges_that_help_no_drive_are_left_out() {
        let shape = KvShape { layers: 3, segments: 1, object_bytes: 4096, block_tokens: 16 };
        let geometry = Geometry::new(&shape, 2, 8, 4096).unwrap();
        // 3 rows of 4 slots: 12 LBAs a group on each device.
        let data = Region { first: Lba(100), lbas: 1000, lba_shift: 12 };
        let found = |limits, groups: &[u32]| {
            let groups: Vec<FileId> = groups.iter().map(|group| FileId(group * 8)).collect();
            let found = ranges(&geometry, &data, limits, &groups);
            found.iter().map(|range| (range.lba.0, range.lbas)).collect::<Vec<_>>()
        };
        assert_eq!(found([1, 1], &[0, 1, 3]), [(100, 24), (136, 12)]);
        assert_eq!(found([8, 8], &[0, 1, 3]), [(104, 16), (136, 8)]);
        assert_eq!(found([16, 1], &[0, 1, 3]), [(100, 16)], "the other one is too short");
        assert_eq!(found([1, 200], &[0]), [], "it begins behind the end");
    }
}
