//! Retrieve bandwidth against a plain copy of the same objects in the same order.

use anyhow::{Result, ensure};
use nvme_driver::{DmaSlice, DmaSpace as _};
use nvme_emu::EmuDomain;
use objstore::{BlockId, Format, KvShape, Layer, StoreOptions};
use rand::{SeedableRng as _, rngs::StdRng, seq::SliceRandom as _};

use super::stack::Stack;
use crate::sample::{Samples, process_cpu, timed};

const LAYERS: u32 = 4;
/// Bytes of one layer's objects: far more than a cache holds.
const LAYER_BYTES: u32 = 64 << 20;
const SEED: u64 = 1;

/// What was measured.
pub struct Found {
    /// Bandwidth of the store, GiB/s.
    pub retrieve: Samples,
    /// Bandwidth of the copy, GiB/s.
    pub memcpy: Samples,
    /// Their ratio, round by round.
    pub ratio: Samples,
    /// Commands a submission doorbell, over all retrieves.
    pub commands_per_doorbell: f64,
}

/// The same from a store with checksums and from one without.
#[derive(Default)]
pub struct Checksums {
    /// With, and without: GiB/s.
    pub gib_s: [Samples; 2],
    /// CPU time of all threads, ms.
    pub cpu_ms: [Samples; 2],
}

/// Retrieves the same objects with and without checksums, in turns.
pub fn checksums(object_bytes: u32, rounds: u32) -> Result<Checksums> {
    let (blocks, shape) = load(object_bytes);
    let scattered: Vec<BlockId> = scattered(blocks).into_iter().map(BlockId).collect();
    let format = |checksums| Format { checksums, ..ripieno_testkit::format(shape) };
    let stack = |checksums| Stack::in_memory(StoreOptions::default(), &format(checksums), blocks);
    let mut stacks = [stack(true)?, stack(false)?];
    let mut found = Checksums::default();
    for round in 0..=rounds {
        for (side, stack) in stacks.iter_mut().enumerate() {
            let before = process_cpu();
            let gib_s = retrieve(stack, &scattered)?;
            if round > 0 {
                found.gib_s[side].push(gib_s);
                found.cpu_ms[side].push((process_cpu() - before).as_secs_f64() * 1e3);
            }
        }
    }
    Ok(found)
}

/// The same from a store that has all of it in host memory, too, and from one that has not.
#[derive(Default)]
pub struct Dram {
    /// With, and without: GiB/s of retrieving.
    pub hits: [Samples; 2],
    /// GiB/s of storing.
    pub storing: [Samples; 2],
}

/// Stores and retrieves the same objects with and without host memory, in turns.
pub fn dram(object_bytes: u32, rounds: u32) -> Result<Dram> {
    let (blocks, shape) = load(object_bytes);
    let scattered: Vec<BlockId> = scattered(blocks).into_iter().map(BlockId).collect();
    let all = shape.block_bytes() * u64::from(blocks);
    let stack = |dram_bytes| {
        // Files keep their pages.
        let options = StoreOptions { dram_bytes, deallocate: false, ..StoreOptions::default() };
        Stack::in_memory(options, &ripieno_testkit::format(shape), blocks)
    };
    let mut stacks = [stack(all)?, stack(0)?];
    let mut found = Dram::default();
    for round in 0..=rounds {
        for (side, stack) in stacks.iter_mut().enumerate() {
            let hits = retrieve(stack, &scattered)?;
            stack.store.clear()?;
            let (bytes, time) = timed(|| stack.fill());
            if round > 0 {
                found.hits[side].push(hits);
                found.storing[side].push(gib_s(bytes?, time));
            }
        }
    }
    let read = stacks[0].store.stats()?.retrieved_bytes;
    ensure!(read == 0, "{read} bytes were read from the media");
    Ok(found)
}

/// How many blocks, and of what.
fn load(object_bytes: u32) -> (u32, KvShape) {
    let shape = KvShape { layers: LAYERS, segments: 1, object_bytes, block_tokens: 64 };
    (LAYER_BYTES / object_bytes, shape)
}

fn scattered(blocks: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..blocks).collect();
    order.shuffle(&mut StdRng::seed_from_u64(SEED));
    order
}

/// Retrieves objects of `object_bytes` into scattered blocks, and copies as much.
pub fn measure(object_bytes: u32, rounds: u32) -> Result<Found> {
    let (blocks, shape) = load(object_bytes);
    let mut stack = Stack::filled(shape, blocks)?;
    let order = scattered(blocks);
    let scattered: Vec<BlockId> = order.iter().copied().map(BlockId).collect();
    let mut copy = Copy::new(object_bytes as usize, order)?;
    let before = stack.store.stats()?;
    let mut found = Found {
        retrieve: Samples::default(),
        memcpy: Samples::default(),
        ratio: Samples::default(),
        commands_per_doorbell: 0.0,
    };
    // The first round warms both sides up.
    for round in 0..=rounds {
        let ours = retrieve(&mut stack, &scattered)?;
        let theirs = copy.run();
        if round > 0 {
            found.retrieve.push(ours);
            found.memcpy.push(theirs);
            found.ratio.push(ours / theirs);
        }
    }
    let after = stack.store.stats()?;
    let doorbells = after.sq_doorbells - before.sq_doorbells;
    found.commands_per_doorbell = (after.commands - before.commands) as f64 / doorbells as f64;
    Ok(found)
}

/// All layers of all blocks once; GiB/s.
fn retrieve(stack: &mut Stack, blocks: &[BlockId]) -> Result<f64> {
    let prefix = stack.store.lookup(&stack.keys)?;
    ensure!(prefix.len() == blocks.len(), "only {} blocks were found", prefix.len());
    let transfer = stack.store.retrieve(&prefix, blocks)?;
    let (bytes, time) = timed(|| -> Result<u64> {
        let mut tickets = Vec::with_capacity(LAYERS as usize);
        for layer in 0..LAYERS {
            tickets.push(stack.store.retrieve_layer(&transfer, Layer(layer))?);
        }
        let mut bytes = 0;
        for ticket in tickets {
            bytes += stack.store.wait(ticket)?.bytes;
        }
        Ok(bytes)
    });
    Ok(gib_s(bytes?, time))
}

fn gib_s(bytes: u64, time: std::time::Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / f64::from(1 << 30)
}

/// The same bytes, copied object by object by one thread, between memory of the same kind as the
/// KV pool (large pages where the system has them).
struct Copy {
    from: DmaSlice,
    to: DmaSlice,
    order: Vec<u32>,
    object: usize,
}

impl Copy {
    fn new(object: usize, order: Vec<u32>) -> Result<Self> {
        let domain = EmuDomain::new("copy");
        let bytes = object * order.len() * LAYERS as usize;
        let (from, to) = (domain.alloc(bytes)?, domain.alloc(bytes)?);
        let (from, to) = (DmaSlice::whole(from)?, DmaSlice::whole(to)?);
        // Written once, so that no page is missing or the shared zero page.
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
                    let (from, to) = (start + index * object, start + *block as usize * object);
                    copy(&self.from, from, &self.to, to, object);
                }
            }
            layer * LAYERS as usize
        });
        gib_s(bytes as u64, time)
    }
}

/// `memcpy` of `len` bytes between two mappings.
#[allow(unsafe_code, reason = "a plain copy between memories that have no Rust owner")]
fn copy(from: &DmaSlice, at: usize, to: &DmaSlice, to_at: usize, len: usize) {
    assert!(at + len <= from.len() && to_at + len <= to.len());
    let (Some(source), Some(target)) = (from.host(), to.host()) else {
        unreachable!("the software domain is host memory");
    };
    // SAFETY: both ranges were checked; the slices keep their different mappings alive, and
    // nothing else uses them.
    unsafe { source.add(at).copy_to_nonoverlapping(target.add(to_at), len) };
}
