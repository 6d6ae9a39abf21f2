//! A region of a namespace as a catalog's medium: the driver's blocking calls on its host queue.

use std::collections::BTreeMap;

use kv_catalog::{BlockAction, BlockError, BlockIo, NotDurable, Region, Seal};
use nvme_spec::ids::{Lba, Nsid};

use crate::device::SharedController;

/// A region of a namespace.
#[derive(Debug, Clone)]
pub(super) struct BlockDevice {
    controller: SharedController,
    name: String,
    nsid: Nsid,
    region: Region,
    /// Reset count of the controller before the first write that no flush has covered.
    unflushed: Option<u64>,
    seal: Seal,
}

impl BlockDevice {
    /// Once `seal` is broken, nothing is flushed.
    pub(super) fn new(
        controller: SharedController,
        nsid: Nsid,
        region: Region,
        seal: Seal,
    ) -> Self {
        let name = controller.lock().id().to_owned();
        Self { controller, name, nsid, region, unflushed: None, seal }
    }

    fn lba(&self, offset: u64) -> Lba {
        Lba(self.region.first.0 + (offset >> self.region.lba_shift))
    }

    fn error(
        &self,
        action: BlockAction,
        offset: u64,
        bytes: usize,
    ) -> impl FnOnce(nvme_driver::Error) -> BlockError {
        let device = self.name.clone();
        let bytes = bytes as u64;
        move |error| BlockError { device, action, offset, bytes, reason: error.to_string() }
    }

    /// Refuses accesses outside the region, where other data may be.
    fn check(&self, action: BlockAction, offset: u64, bytes: usize) -> Result<(), BlockError> {
        let inside = offset.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes());
        let unit = u64::from(self.lba_bytes());
        if inside && offset.is_multiple_of(unit) && (bytes as u64).is_multiple_of(unit) {
            return Ok(());
        }
        let all = self.bytes();
        let reason = format!("the region has {all} bytes, in logical blocks of {unit} bytes");
        let (device, bytes) = (self.name.clone(), bytes as u64);
        Err(BlockError { device, action, offset, bytes, reason })
    }
}

impl BlockIo for BlockDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn lba_bytes(&self) -> u32 {
        1 << self.region.lba_shift
    }

    fn bytes(&self) -> u64 {
        self.region.bytes()
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        let action = BlockAction::Read;
        self.check(action, offset, into.len())?;
        let bytes = into.len();
        let read = self.controller.lock().read(self.nsid, self.lba(offset), into);
        read.map_err(self.error(action, offset, bytes))
    }

    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        let action = BlockAction::Write;
        self.check(action, offset, from.len())?;
        if !fua {
            self.unflushed.get_or_insert(self.controller.resets());
        }
        let written = self.controller.lock().write(self.nsid, self.lba(offset), from, fua);
        written.map_err(self.error(action, offset, from.len()))
    }

    /// Fails also if the controller was reset since the first unflushed write: after a loss of
    /// power the device flushes only what is left.
    fn flush(&mut self) -> Result<(), BlockError> {
        let failed = |reason| BlockError {
            device: self.name.clone(),
            action: BlockAction::Flush,
            offset: 0,
            bytes: 0,
            reason,
        };
        let flushed = self.controller.flush(self.nsid, &self.seal);
        flushed.map_err(|NotDurable { cause }| failed(cause))?;
        let resets = self.controller.resets();
        match self.unflushed.take() {
            Some(before) if before != resets => {
                let why =
                    "the controller was reset before, and may have forgotten what was written";
                Err(failed(why.to_owned()))
            }
            _ => Ok(()),
        }
    }
}

/// A region that is not written to: what would be is kept in memory.
#[derive(Debug)]
pub(super) struct Unwritten {
    device: BlockDevice,
    /// Logical blocks by offset.
    written: BTreeMap<u64, Vec<u8>>,
}

impl Unwritten {
    pub(super) fn new(device: BlockDevice) -> Self {
        Self { device, written: BTreeMap::new() }
    }
}

impl BlockIo for Unwritten {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn lba_bytes(&self) -> u32 {
        self.device.lba_bytes()
    }

    fn bytes(&self) -> u64 {
        self.device.bytes()
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        self.device.read(offset, into)?;
        for (at, block) in self.written.range(offset..offset + into.len() as u64) {
            into[(at - offset) as usize..][..block.len()].copy_from_slice(block);
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8], _fua: bool) -> Result<(), BlockError> {
        self.device.check(BlockAction::Write, offset, from.len())?;
        let each = self.lba_bytes() as usize;
        let blocks = (offset..).step_by(each).zip(from.chunks(each));
        self.written.extend(blocks.map(|(at, block)| (at, block.to_vec())));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        Ok(())
    }
}
