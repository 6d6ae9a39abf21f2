//! Contents of devices, wherever stores and other formats have metadata.

use std::ops::Range;

use kv_catalog::{CopyFault, FormatError, OnDevice, Superblock, foreign_data};
use objstore::{Medium, Overwrite, Store, StoreDevice, StoreError, StoreId};

use crate::error::StackError;

/// Written to the first LBA of a drive that a replay used: the next replay may overwrite it.
pub(crate) const MARK: &[u8] = b"ripieno replay: scratch data, may be overwritten\n";

/// Contents of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The device, and what it says that it is.
    pub device: String,
    /// See above.
    pub identity: String,
    /// Bytes of the store's region.
    pub bytes: u64,
    /// The contents, in words.
    pub what: String,
    /// Permission that overwriting them takes.
    pub loss: Overwrite,
    /// The store that is there.
    pub store: Option<StoreId>,
}

/// The contents, what has to be allowed, and the store.
type Found = (String, Overwrite, Option<StoreId>);

impl Held {
    /// Looks at attached devices. A drive outside of the store's region, too.
    ///
    /// # Errors
    /// Returns [`StackError::Failed`] if a device does.
    pub fn on(devices: &[StoreDevice]) -> Result<Vec<Self>, StackError> {
        let look = |(mut whole, mut store): (Medium, Medium)| {
            let beside = beside(&mut whole, &store);
            let beside = beside.map_err(|error| StackError::failed("looking at a drive", error))?;
            let (what, loss, id) = beside.unwrap_or_else(|| inside(&mut store));
            let (device, identity) = (store.io.name().to_owned(), store.identity.to_string());
            Ok(Self { device, identity, bytes: store.region.bytes(), what, loss, store: id })
        };
        namespaces(devices)?.into_iter().zip(Store::media(devices)?).map(look).collect()
    }

    /// Returns the value of the option `overwrite` that allows to lose it.
    #[must_use]
    pub fn overwrite(&self) -> &'static str {
        if self.loss == Overwrite::Anything { "anything" } else { "store" }
    }
}

/// Returns the whole namespaces that have the regions of a store.
///
/// # Errors
/// Same as [`Store::media`].
pub fn namespaces(devices: &[StoreDevice]) -> Result<Vec<Medium>, StoreError> {
    let whole = |device: &StoreDevice| StoreDevice {
        controller: device.controller.clone(),
        nsid: device.nsid,
        region: None,
        queue_memory: Vec::new(),
    };
    Store::media(&devices.iter().map(whole).collect::<Vec<_>>())
}

/// Returns the bytes of a namespace before and behind the store's region.
#[must_use]
pub fn edges(whole: &Medium, store: &Medium) -> [Range<u64>; 2] {
    let first = store.region.first.0 << store.region.lba_shift;
    [0..first, first + store.region.bytes()..whole.region.bytes()]
}

/// Clears the signatures of other formats, and of replays, outside of the store's regions.
///
/// # Errors
/// Returns [`StackError::Failed`] if a device does.
pub fn clear_edges(devices: &[StoreDevice]) -> Result<(), StackError> {
    for (mut whole, store) in namespaces(devices)?.into_iter().zip(Store::media(devices)?) {
        for edge in edges(&whole, &store) {
            let zeroes = vec![0; (edge.end - edge.start) as usize];
            let cleared = whole.io.write(edge.start, &zeroes, true);
            cleared.map_err(|error| StackError::failed("clearing a drive's edges", error))?;
        }
    }
    Ok(())
}

/// Returns what is outside of the store's region; `None` if that is nothing of value.
fn beside(whole: &mut Medium, store: &Medium) -> Result<Option<Found>, FormatError> {
    let [first, last] = edges(whole, store);
    if first.is_empty() && last.is_empty() {
        return Ok(None);
    }
    let [mut head, mut tail] =
        [&first, &last].map(|edge| vec![0; (edge.end - edge.start) as usize]);
    whole.io.read(first.start, &mut head)?;
    whole.io.read(last.start, &mut tail)?;
    if head.starts_with(MARK) {
        return Ok(Some(("scratch data of a replay".to_owned(), Overwrite::Nothing, None)));
    }
    // A store of the whole namespace, without edges.
    let copies = Superblock::read_copies(&mut *whole.io)?;
    if copies.iter().any(|copy| !matches!(copy, Err(CopyFault::None))) {
        return Ok(Some(inside(whole)));
    }
    let found = foreign_data(&head, &tail, whole.region.bytes());
    Ok(found.map(|found| (found.what.to_owned(), Overwrite::Anything, None)))
}

/// Returns what is on a medium.
fn inside(medium: &mut Medium) -> Found {
    match Superblock::read(&mut *medium.io) {
        Ok(OnDevice::Blank) => ("nothing".to_owned(), Overwrite::Nothing, None),
        Ok(OnDevice::Ours(found)) => {
            (format!("store {}", found.store), Overwrite::Store, Some(found.store))
        }
        Ok(OnDevice::Foreign(what)) => (what.to_owned(), Overwrite::Anything, None),
        Err(FormatError::Copy { fault, .. }) => {
            (format!("a store whose superblock cannot be used: {fault}"), Overwrite::Store, None)
        }
        Err(error) => (error.to_string(), Overwrite::Anything, None),
    }
}

#[cfg(test)]
mod tests {
    use nvme_driver::ControllerOptions;
    use nvme_emu::{EmuConfig, MemoryMedia};
    use nvme_spec::ids::Lba;

    use super::*;
    use crate::devices::Devices;

    const MIB: u64 = 1 << 20;
    const BYTES: u64 = 16 * MIB;

    #[test]
    fn what_a_drive_holds_is_told_by_all_that_a_store_would_clear() {
        let raid = (BYTES - 1024, &b"Intel Raid ISM Cfg Sig. "[..]);
        let erased = vec![0xff; MIB as usize];
        for (written, wanted) in [
            (vec![], Overwrite::Nothing),
            (vec![(0, &erased[..]), (BYTES - MIB, &erased)], Overwrite::Nothing),
            (vec![(0, MARK)], Overwrite::Nothing),
            // A replay's store that was not kept.
            (vec![(0, MARK), (MIB, b"data")], Overwrite::Nothing),
            (vec![(MIB, b"data")], Overwrite::Anything),
            (vec![(9, b"data")], Overwrite::Anything),
            (vec![(BYTES - MIB + 9, b"data")], Overwrite::Anything),
            (vec![raid], Overwrite::Anything),
        ] {
            let media = MemoryMedia::new(BYTES).unwrap();
            let config = EmuConfig::new("drive").namespace(media.clone(), 512);
            let mut devices = Devices::from(vec![config]);
            devices.attach(&ControllerOptions::default(), None).unwrap();
            let (mut attached, _) = devices.take_attached().unwrap();
            attached[0].region = Some((Lba(MIB >> 9), (BYTES - 2 * MIB) >> 9));
            written.iter().for_each(|(at, bytes)| media.poke(*at, bytes).unwrap());
            assert_eq!(Held::on(&attached).unwrap()[0].loss, wanted, "{written:?}");
        }
    }
}
