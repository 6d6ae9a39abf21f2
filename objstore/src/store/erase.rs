//! Erases files that hold nothing: blocks that were cleared, removed or evicted stay on the devices
//! until other blocks are stored over them.
//!
//! Files are out of reach while they are erased, as groups are while drives deallocate them.

use std::ops::Range;

use kv_catalog::{Catalog, DeviceIndex, FileId, Geometry, Region, Row, Slot};
use nvme_driver::{Controller, Error, LbaRange};
use nvme_spec::ids::{Lba, Nsid};

use super::{Inner, lock};
use crate::error::StoreError;

/// Bytes of a write to a device without Write Zeroes.
const ZEROES: usize = 1 << 20;

/// Result of [`Store::erase`](super::Store::erase).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Erased {
    /// The file to go on with; `None`: there are no more.
    pub next: Option<FileId>,
    /// Bytes erased.
    pub bytes: u64,
}

impl Inner {
    /// Does what [`Store::erase`](super::Store::erase) does.
    pub(super) fn erase(&self, first: FileId, bytes_max: u64) -> Result<Erased, StoreError> {
        self.plane.check_writable()?;
        // A group that another thread deallocates is not free meanwhile.
        let _drives = lock(&self.drives);
        if first.0 == 0 {
            while !self.catalog.with(Catalog::sweep_all) {}
        }
        self.catalog.sync()?;
        self.plane.with(|plane| plane.check_owner())?;
        let file_bytes = self.geometry.file_bytes();
        let most = u32::try_from(bytes_max / file_bytes).unwrap_or(u32::MAX).max(1);
        let Some(files) = self.catalog.with(|catalog| catalog.take_free(first, most)) else {
            return Ok(Erased { next: None, bytes: 0 });
        };
        let erased = self.erase_files(files.clone());
        self.catalog.with(|catalog| catalog.put_back(files.clone()));
        erased?;
        let bytes = u64::from(files.end - files.start) * file_bytes;
        Ok(Erased { next: Some(FileId(files.end)), bytes })
    }

    fn erase_files(&self, files: Range<u32>) -> Result<(), StoreError> {
        let (plane, geometry) = (&self.plane, &self.geometry);
        let devices = plane.with(|plane| Ok(plane.data_regions()))?;
        let resets = || devices.iter().map(|(controller, ..)| controller.resets()).sum::<u64>();
        let before = resets();
        let devices_slots = (0..).map(DeviceIndex).zip(slots(geometry, files));
        for ((controller, nsid, region), (device, slots)) in devices.iter().zip(devices_slots) {
            for slots in slots {
                // Others take the lock in between.
                let erased = zero(&mut controller.lock(), *nsid, range(geometry, region, slots));
                erased.map_err(|source| StoreError::Driver { device, source })?;
            }
        }
        plane.flush()?;
        plane.check_writable()?;
        match resets() == before {
            true => Ok(()),
            false => Err(StoreError::Forgotten),
        }
    }
}

/// Returns the slots of files on each device: neighbours as one range.
fn slots(geometry: &Geometry, files: Range<u32>) -> Vec<Vec<Range<u64>>> {
    let mut devices = vec![Vec::new(); geometry.devices as usize];
    for file in files.map(FileId) {
        for row in (0..geometry.rows).map(Row) {
            let place = geometry.object(file, row);
            devices[place.device.0 as usize].push(place.slot.0);
        }
    }
    let neighbours = |mut slots: Vec<u64>| {
        slots.sort_unstable();
        let runs = slots.chunk_by(|a, b| a + 1 == *b);
        runs.map(|run| run[0]..run[0] + run.len() as u64).collect()
    };
    devices.into_iter().map(neighbours).collect()
}

fn range(geometry: &Geometry, region: &Region, slots: Range<u64>) -> LbaRange {
    let [lba, end] = [slots.start, slots.end].map(|slot| geometry.lba(region, Slot(slot)));
    LbaRange { lba, lbas: end.0 - lba.0 }
}

fn zero(controller: &mut Controller, nsid: Nsid, range: LbaRange) -> Result<(), Error> {
    match controller.write_zeroes(nsid, range, true) {
        Err(Error::Unsupported { .. }) => {}
        done => return done,
    }
    let shift = controller.namespace(nsid)?.lba_shift;
    let (most, mut at, end) = ((ZEROES >> shift) as u64, range.lba.0, range.lba.0 + range.lbas);
    let zeroes = vec![0; ZEROES];
    while at < end {
        let lbas = most.min(end - at);
        controller.write(nsid, Lba(at), &zeroes[..(lbas << shift) as usize], false)?;
        at += lbas;
    }
    Ok(())
}
