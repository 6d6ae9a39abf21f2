//! The proof of a path, before a store reports it.
//!
//! Each device writes a known pattern out of the memory that it is to reach and reads one into it,
//! at both ends of what is registered ([`nvme_driver::platform::p2p::round_trip`]), through its
//! driver's own queue: nothing is granted yet. For a staged pool that memory is the staging memory,
//! and the store's own stream has to move objects to the pool and back, which copies verify.
//!
//! What the memory held before is put back. On the device, a scratch region is overwritten.

use nvme_driver::{
    DmaSlice,
    platform::{buffer::Buffer, p2p},
};

use kv_catalog::Region;

use super::Device;
use crate::{
    config::StoreGpu,
    error::StoreError,
    registration::{KvPool, PAGE},
};

mod device_only;
mod scatter_gather;

pub(super) use device_only::DeviceOnlyMemory;
pub(super) use scatter_gather::{Proof, prove_scatter_gather};

/// Bytes of one proof where there is room for them: more than two pages, so that addresses behind
/// the first ones are used, too.
const PROOF_BYTES: u64 = 16 << 10;
/// Proves that every device reaches the pool, or its staging memory.
pub(super) fn prove(
    devices: &[Device],
    scratch: &[Region],
    pool: &KvPool,
    gpu: Option<&StoreGpu>,
) -> Result<(), StoreError> {
    let path = pool.path();
    let copies = gpu.map(|gpu| &*gpu.copies);
    for (device, scratch) in devices.iter().zip(scratch) {
        let lba_bytes = 1 << scratch.lba_shift;
        let mut controller = device.controller.lock();
        let id = controller.id().to_owned();
        let wrong = |why: String| StoreError::Route { path, why: format!("{id}: {why}") };
        let bytes = PROOF_BYTES.max(lba_bytes).min(scratch.bytes());
        for part in parts(pool, lba_bytes, bytes).map_err(wrong)? {
            let kept = Kept::new(&part, pool, gpu).map_err(wrong)?;
            let nsid = device.nsid;
            let trip = p2p::round_trip(&mut controller, nsid, scratch.first, &part, copies);
            let report = trip.map_err(|error| wrong(error.to_string()))?;
            if let Some(why) = report.why() {
                // What is still on its way may overwrite it; there is nothing better to do.
                let _ = kept.put_back(&part, pool, gpu);
                return Err(wrong(format!("{why}\n{report}")));
            }
            kept.put_back(&part, pool, gpu).map_err(wrong)?;
        }
    }
    Ok(())
}

/// Both ends of the registered memory, in whole LBAs of up to `bytes` bytes: the same for a small
/// pool.
fn parts(pool: &KvPool, lba_bytes: u64, bytes: u64) -> Result<Vec<DmaSlice>, String> {
    let used = pool.used();
    let mut parts: Vec<DmaSlice> = Vec::new();
    for at in [used.start, used.end - 1] {
        let part = part(pool, at, lba_bytes, bytes)?;
        if parts.first().is_none_or(|first| first.offset() != part.offset()) {
            parts.push(part);
        }
    }
    Ok(parts)
}

/// Whole LBAs around byte `at`, of up to `bytes` bytes.
fn part(pool: &KvPool, at: u64, lba_bytes: u64, bytes: u64) -> Result<DmaSlice, String> {
    let memory = pool.memory();
    let mut first = 0;
    for range in memory.segments() {
        let end = first + range.len;
        if at >= end {
            first = end;
            continue;
        }
        let from = (at & !(PAGE - 1)).max(first);
        let mut len = (end - from).min(bytes);
        len -= len % lba_bytes;
        // At the end of a range, its last LBA.
        let (from, len) = match len {
            0 => (end.max(lba_bytes) - lba_bytes, lba_bytes),
            len => (from, len),
        };
        if from < first {
            break;
        }
        let slice = DmaSlice::new(memory.clone(), from as usize, len as usize);
        return slice.map_err(|error| error.to_string());
    }
    Err(format!("no whole LBA of {lba_bytes} bytes is in one range around byte {at} of the memory"))
}

/// What memory held.
struct Kept(Vec<u8>);

impl Kept {
    fn new(part: &DmaSlice, pool: &KvPool, gpu: Option<&StoreGpu>) -> Result<Self, String> {
        let mut bytes = vec![0; part.len()];
        match Buffer::new(part.clone()) {
            Some(buffer) => buffer.read(0, &mut bytes).map_err(|error| error.to_string())?,
            None => {
                DeviceOnlyMemory::new(gpu, pool, part.len())?.read(part.device(), &mut bytes)?
            }
        }
        Ok(Self(bytes))
    }

    fn put_back(
        self,
        part: &DmaSlice,
        pool: &KvPool,
        gpu: Option<&StoreGpu>,
    ) -> Result<(), String> {
        match Buffer::new(part.clone()) {
            Some(mut buffer) => buffer.write(0, &self.0).map_err(|error| error.to_string()),
            None => DeviceOnlyMemory::new(gpu, pool, part.len())?.write(part.device(), &self.0),
        }
    }
}
