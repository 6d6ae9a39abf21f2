//! Retrieve bandwidth against a plain copy of the same objects in the same order.

use anyhow::{Result, ensure};
use nvme_driver::{DmaSlice, DmaSpace as _};
use nvme_emu::EmuDomain;
use objstore::{BlockId, Format, KvShape, StoreOptions};

use crate::{
    sample::{Sides, gib_s, process_cpu, timed},
    stack::{Stack, scattered},
};

const LAYERS: u32 = 4;
/// Bytes of one layer's objects: far larger than a cache.
const LAYER_BYTES: u32 = 64 << 20;

/// Retrieves the same objects with and without checksums, alternately. Returns GiB/s, and the CPU
/// time of all threads in ms.
pub fn checksums(object_bytes: u32, rounds: u32) -> Result<[Sides; 2]> {
    let (blocks, shape) = load(object_bytes);
    let scattered = scattered(blocks);
    let format = |checksums| Format { checksums, ..ripieno_testkit::format(shape) };
    let stack = |checksums| Stack::in_memory(&StoreOptions::default(), &format(checksums), blocks);
    let stacks = [stack(true)?, stack(false)?];
    alternate(&stacks, rounds, |stack| {
        let before = process_cpu();
        let gib_s = retrieve(stack, &scattered)?;
        Ok([gib_s, (process_cpu() - before).as_secs_f64() * 1e3])
    })
}

/// Stores and retrieves the same objects with and without a host memory cache that holds
/// everything, alternately. Returns GiB/s of retrieves, and of stores.
pub fn dram(object_bytes: u32, rounds: u32) -> Result<[Sides; 2]> {
    let (blocks, shape) = load(object_bytes);
    let scattered = scattered(blocks);
    let in_order: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let all = shape.block_bytes() * u64::from(blocks);
    let stack = |dram| {
        // Files keep their pages.
        let options = StoreOptions { dram, deallocate: false, ..StoreOptions::default() };
        Stack::in_memory(&options, &ripieno_testkit::format(shape), blocks)
    };
    let stacks = [stack(all)?, stack(0)?];
    let found = alternate(&stacks, rounds, |stack| {
        let hits = retrieve(stack, &scattered)?;
        // Not `clear`: the cache would keep blocks until their files are needed.
        stack.store.remove(&stack.keys)?;
        let (bytes, time) = timed(|| stack.fill(&in_order));
        Ok([hits, gib_s(bytes?, time)])
    })?;
    let read = stacks[0].store.stats()?.plane.retrieved_bytes;
    ensure!(read == 0, "{read} bytes were read from the media");
    Ok(found)
}

/// Measures two quantities of both stacks in each round.
fn alternate(
    stacks: &[Stack; 2],
    rounds: u32,
    measure: impl Fn(&Stack) -> Result<[f64; 2]>,
) -> Result<[Sides; 2]> {
    let mut found = <[Sides; 2]>::default();
    for round in 0..=rounds {
        let [ours, theirs] = [measure(&stacks[0])?, measure(&stacks[1])?];
        for (sides, (ours, theirs)) in found.iter_mut().zip(ours.into_iter().zip(theirs)) {
            sides.push(round, (ours, theirs));
        }
    }
    Ok(found)
}

/// Returns the number of blocks, and their shape.
fn load(object_bytes: u32) -> (u32, KvShape) {
    let shape = KvShape { layers: LAYERS, segments: 1, object_bytes, block_tokens: 64 };
    (LAYER_BYTES / object_bytes, shape)
}

/// Retrieves objects of `object_bytes` into scattered blocks, and copies the same amount. Returns
/// GiB/s, and the commands per submission doorbell.
pub fn measure(object_bytes: u32, rounds: u32) -> Result<(Sides, f64)> {
    let (blocks, shape) = load(object_bytes);
    let format = ripieno_testkit::format(shape);
    let stack = Stack::in_memory(&StoreOptions::default(), &format, blocks)?;
    let scattered = scattered(blocks);
    let mut copy = Copy::new(object_bytes as usize, scattered.clone())?;
    let before = stack.store.stats()?.plane.ring.total;
    let gib_s = Sides::measure(rounds, |_| -> Result<_> {
        Ok((retrieve(&stack, &scattered)?, copy.run()))
    })?;
    let after = stack.store.stats()?.plane.ring.total;
    let doorbells = after.sq_doorbells - before.sq_doorbells;
    Ok((gib_s, (after.commands - before.commands) as f64 / doorbells as f64))
}

/// Retrieves all layers of all blocks once. Returns GiB/s.
fn retrieve(stack: &Stack, blocks: &[BlockId]) -> Result<f64> {
    let load = stack.store.retrieve(&stack.prefix()?, blocks)?;
    let (bytes, time) = timed(|| stack.store.move_all(&load));
    Ok(gib_s(bytes?, time))
}

/// Copies the same bytes object by object in one thread, between memory of the same kind as the KV
/// pool (huge pages if available).
struct Copy {
    from: DmaSlice,
    to: DmaSlice,
    order: Vec<BlockId>,
    object: usize,
}

impl Copy {
    fn new(object: usize, order: Vec<BlockId>) -> Result<Self> {
        let domain = EmuDomain::new("copy");
        let bytes = object * order.len() * LAYERS as usize;
        let (from, to) = (domain.alloc(bytes)?, domain.alloc(bytes)?);
        let (from, to) = (DmaSlice::whole(from)?, DmaSlice::whole(to)?);
        // Written once, so that all pages are present and none is the shared zero page.
        for slice in [&from, &to] {
            domain.access().fill(slice.iova(), 0x5A, bytes)?;
        }
        Ok(Self { from, to, order, object })
    }

    fn run(&mut self) -> f64 {
        let (object, layer) = (self.object, self.object * self.order.len());
        let (bytes, time) = timed(|| {
            for start in (0..layer * LAYERS as usize).step_by(layer) {
                for (index, block) in self.order.iter().enumerate() {
                    let (from, to) = (start + index * object, start + block.0 as usize * object);
                    copy(&self.from, from, &self.to, to, object);
                }
            }
            layer * LAYERS as usize
        });
        gib_s(bytes as u64, time)
    }
}

/// Copies `len` bytes between two mappings.
#[allow(unsafe_code, reason = "a plain copy between memories that have no Rust owner")]
fn copy(from: &DmaSlice, at: usize, to: &DmaSlice, to_at: usize, len: usize) {
    assert!(at + len <= from.len() && to_at + len <= to.len());
    let (Some(source), Some(target)) = (from.host(), to.host()) else {
        unreachable!("the software domain is host memory");
    };
    // SAFETY: both ranges were checked; the slices keep their distinct mappings alive, and nothing
    // else uses them.
    unsafe { source.add(at).copy_to_nonoverlapping(target.add(to_at), len) };
}
