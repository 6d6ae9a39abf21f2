//! The proof of a path, before a store reports it.
//!
//! Each device writes a known pattern out of the memory that it must reach and reads one into it,
//! at both ends of the registered range ([`nvme_driver::platform::p2p::round_trip`]), through its
//! driver's own queue: nothing is granted yet. For a staged pool that memory is the staging memory,
//! and the store's own stream must move objects to the pool and back, which copies verify.
//!
//! Then the I/O kernel itself reads an LBA of each device through a granted queue
//! ([`kernel_read`]): a store depends on the kernel's doorbells and queues, not on those of the
//! driver.
//!
//! The memory's contents are restored. On the device, a scratch region is overwritten.

use nvme_driver::{
    DmaSlice,
    platform::{buffer::Buffer, p2p},
};

use kv_catalog::Region;

use super::{devices::Device, transport::Transport};
use crate::{
    config::StoreGpu,
    error::StoreError,
    registration::{KvPool, PAGE},
};

mod device_only;
mod kernel_read;
mod scatter_gather;

pub(super) use device_only::DeviceOnlyMemory;
pub use kernel_read::kernel_read;
pub(super) use scatter_gather::{Proof, prove_scatter_gather};

/// Bytes of one proof if there is room: more than two pages, so that data pointers beyond the
/// first ones are used, too.
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
                // Transfers still in flight may overwrite it; nothing better can be done.
                let _ = kept.put_back(&part, pool, gpu);
                return Err(wrong(format!("{why}\n{report}")));
            }
            kept.put_back(&part, pool, gpu).map_err(wrong)?;
        }
    }
    Ok(())
}

/// Proves that the I/O kernel reaches every device: through one of its queues it reads an LBA
/// of the scratch region into the pool, or its staging memory, and the data must match what the
/// driver reads there.
pub(super) fn prove_kernel(
    transport: &mut Transport,
    scratch: &[Region],
    pool: &KvPool,
    gpu: Option<&StoreGpu>,
) -> Result<(), StoreError> {
    let path = pool.path();
    for (at, scratch) in (0..).zip(scratch) {
        let mut expected = vec![0; 1 << scratch.lba_shift];
        let (id, held) = {
            let device = &transport.devices.all[at as usize];
            let mut controller = device.controller.lock();
            let held = controller.read(device.nsid, scratch.first, &mut expected);
            (controller.id().to_owned(), held)
        };
        let wrong = |why: String| StoreError::Route { path, why: format!("{id}: {why}") };
        held.map_err(|error| wrong(error.to_string()))?;
        let lba_bytes = expected.len() as u64;
        let part = part(pool, pool.used().start, lba_bytes, lba_bytes).map_err(wrong)?;
        let kept = Kept::new(&part, pool, gpu).map_err(wrong)?;
        let opposite = Kept(expected.iter().map(|byte| !byte).collect());
        opposite.put_back(&part, pool, gpu).map_err(wrong)?;
        let read = kernel_read(transport.ring()?, at, scratch.first, &part);
        let found = Kept::new(&part, pool, gpu);
        kept.put_back(&part, pool, gpu).map_err(wrong)?;
        read.map_err(wrong)?;
        let Kept(found) = found.map_err(wrong)?;
        if let Some(at) = expected.iter().zip(&found).position(|(a, b)| a != b) {
            return Err(wrong(format!(
                "the I/O kernel's read was completed, and byte {at} of it is {:#04x} instead of \
                 {:#04x}",
                found[at], expected[at]
            )));
        }
    }
    Ok(())
}

/// Returns both ends of the registered memory, in whole LBAs of up to `bytes` bytes: one part for
/// a small pool.
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

/// Returns whole LBAs at byte `at`, an end of the used range, of up to `bytes` bytes. They lie
/// inside that range: a mapping consists of whole pages, whose other bytes may have other owners.
/// They surround the byte if less than an LBA is used.
fn part(pool: &KvPool, at: u64, lba_bytes: u64, bytes: u64) -> Result<DmaSlice, String> {
    let memory = pool.memory();
    let used = pool.used();
    let mut first = 0;
    for range in memory.segments() {
        let end = first + range.len;
        if at >= end {
            first = end;
            continue;
        }
        // PRP entries are dword aligned.
        let inside = used.start.max(first).next_multiple_of(4)..used.end.min(end) & !3;
        let room = inside.end.saturating_sub(inside.start).min(bytes);
        if room >= lba_bytes {
            let len = room - room % lba_bytes;
            let from = if at == used.start { inside.start } else { inside.end - len };
            let slice = DmaSlice::new(memory.clone(), from as usize, len as usize);
            return slice.map_err(|error| error.to_string());
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

/// Saved contents of memory.
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

#[cfg(test)]
mod tests {
    use kv_catalog::KvShape;
    use nvme_driver::DmaSpace as _;
    use nvme_emu::EmuDomain;

    use super::*;
    use crate::pool_layout::PoolLayout;

    fn layout(row: u64, block_stride: u64, blocks: u32) -> PoolLayout {
        PoolLayout { rows: vec![row], block_stride, blocks }
    }

    #[test]
    fn the_proof_stays_inside_the_pool() {
        let shape = KvShape { layers: 1, segments: 1, object_bytes: 5000, block_tokens: 1 };
        let memory = EmuDomain::new("test").alloc(1 << 20).unwrap();
        for (blocks, lens) in [(1, &[4096, 4096]), (2, &[8192, 8192]), (9, &[16384, 16384])] {
            let pool = KvPool::new(memory.clone(), &shape, layout(10_001, 5000, blocks)).unwrap();
            let parts = parts(&pool, 4096, PROOF_BYTES).unwrap();
            let found: Vec<usize> = parts.iter().map(DmaSlice::len).collect();
            assert_eq!(found, lens);
            for part in parts {
                let (from, end) = (part.offset(), part.offset() + part.len());
                assert!(10_001 <= from && end <= 10_001 + 5000 * blocks as usize, "{from}..{end}");
                assert!(from.is_multiple_of(4));
            }
        }
        let small = KvShape { object_bytes: 512, ..shape };
        let pool = KvPool::new(memory, &small, layout(0, 512, 1));
        assert_eq!(parts(&pool.unwrap(), 4096, PROOF_BYTES).unwrap().len(), 1);
    }
}
