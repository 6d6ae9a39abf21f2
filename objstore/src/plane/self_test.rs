//! The start-up self-test: a pattern through every layer and segment, to the devices and back.
//!
//! The proof of the path (`route.rs`) shows that devices reach both ends of the memory. This test
//! shows that every object is at the engine's address: with a wrong stride, a wrong row or two
//! swapped layers, storing and retrieving would succeed, but move other bytes.

use kv_catalog::{BlockId, FileId, KvShape, Layer, Row};
use nvme_driver::{DmaSlice, platform::buffer::Buffer};
use nvme_spec::nvm::Direction;

use super::{
    Plane, copier::Copies, job::next_id, mover::Mover, route::DeviceOnlyMemory, wait::wait_for,
};
use crate::{
    config::StoreGpu,
    error::StoreError,
    ids::{Move, Ticket},
    order::Order,
    registration::KvPool,
};

/// Access to an engine's KV blocks through its own tensors.
pub trait KvView {
    /// Reads the bytes of one object.
    ///
    /// # Errors
    /// Returns a message if the object cannot be read.
    fn read(&mut self, block: BlockId, row: Row, into: &mut [u8]) -> Result<(), String>;

    /// Overwrites one object.
    ///
    /// # Errors
    /// Returns a message if the object cannot be written.
    fn write(&mut self, block: BlockId, row: Row, from: &[u8]) -> Result<(), String>;
}

/// The objects at the registered addresses.
struct PoolView<'a> {
    pool: &'a KvPool,
    gpu: Option<&'a StoreGpu>,
}

impl PoolView<'_> {
    fn host(&self, block: BlockId, row: Row) -> Result<Option<Buffer>, String> {
        if self.pool.is_device_only() {
            return Ok(None);
        }
        let offset = self.pool.offset(block, row).ok_or("no such object")?;
        let bytes = self.pool.object_bytes() as usize;
        let slice = DmaSlice::new(self.pool.memory().clone(), offset as usize, bytes);
        Ok(Buffer::new(slice.map_err(|error| error.to_string())?))
    }

    fn device(&self) -> Result<DeviceOnlyMemory<'_>, String> {
        DeviceOnlyMemory::new(self.gpu, self.pool, self.pool.object_bytes() as usize)
    }
}

impl KvView for PoolView<'_> {
    fn read(&mut self, block: BlockId, row: Row, into: &mut [u8]) -> Result<(), String> {
        match self.host(block, row)? {
            Some(buffer) => buffer.read(0, into).map_err(|error| error.to_string()),
            None => self.device()?.read(self.pool.device(block, row), into),
        }
    }

    fn write(&mut self, block: BlockId, row: Row, from: &[u8]) -> Result<(), String> {
        match self.host(block, row)? {
            Some(mut buffer) => buffer.write(0, from).map_err(|error| error.to_string()),
            None => self.device()?.write(self.pool.device(block, row), from),
        }
    }
}

impl Plane {
    /// Stores a pattern from the pool's first block in the last file, which is reserved for this,
    /// and retrieves it into the last block. Both blocks are restored. `view` is the engine's view
    /// of its blocks; `None`: the registered addresses. Other callers wait meanwhile.
    ///
    /// # Errors
    /// Returns [`StoreError::SelfTest`] with layer, segment and offset of the first wrong byte, or
    /// [`StoreError::Transfer`] and other errors of a job.
    pub fn self_test(&self, view: Option<&mut (dyn KvView + '_)>) -> Result<(), StoreError> {
        self.with(|mover| {
            let pool = mover.pool.clone();
            let gpu = mover.transport.streams.as_ref().map(|streams| streams.gpu().clone());
            let mut own = PoolView { pool: &pool, gpu: gpu.as_ref() };
            match view {
                Some(view) => test_and_restore(mover, view),
                None => test_and_restore(mover, &mut own),
            }
        })
    }
}

fn test_and_restore(mover: &mut Mover, view: &mut dyn KvView) -> Result<(), StoreError> {
    let (shape, bytes) = (mover.setup.shape, mover.pool.object_bytes() as usize);
    let blocks = mover.pool.blocks();
    let blocks = [BlockId(0), BlockId(blocks - 1)];
    let mut kept = Vec::new();
    for block in blocks {
        for row in rows(mover) {
            let mut object = vec![0; bytes];
            view.read(block, row, &mut object).map_err(wrong(shape, row, "read"))?;
            kept.push((block, row, object));
        }
    }
    // Only the engine's transfers are counted.
    let (tally, codec) = (mover.tally, mover.copier.codec_stats());
    let tested = test(mover, blocks, view);
    mover.tally = tally;
    if let Some(coder) = &mut mover.copier.coder {
        coder.counts = codec;
    }
    for (block, row, bytes) in kept {
        let restored = view.write(block, row, &bytes).map_err(wrong(shape, row, "put back"));
        // An earlier error takes precedence.
        if tested.is_ok() {
            restored?;
        }
    }
    tested
}

fn test(
    mover: &mut Mover,
    [first, last]: [BlockId; 2],
    view: &mut dyn KvView,
) -> Result<(), StoreError> {
    let (shape, is_coded) = (mover.setup.shape, mover.copier.coder.is_some());
    let bytes = shape.object_bytes as usize;
    for row in rows(mover) {
        view.write(first, row, &pattern(row, bytes, is_coded))
            .map_err(wrong(shape, row, "write"))?;
    }
    round(mover, Direction::Write, first)?;
    for row in rows(mover) {
        let inverse: Vec<u8> = pattern(row, bytes, is_coded).iter().map(|byte| !byte).collect();
        view.write(last, row, &inverse).map_err(wrong(shape, row, "write"))?;
    }
    round(mover, Direction::Read, last)?;
    let mut found = vec![0; bytes];
    for row in rows(mover) {
        view.read(last, row, &mut found).map_err(wrong(shape, row, "read"))?;
        let expected = pattern(row, bytes, is_coded);
        if let Some(at) = (0..bytes).find(|at| found[*at] != expected[*at]) {
            let why = format!("{:#04x} came back instead of {:#04x}", found[at], expected[at]);
            return Err(failed(&shape, row, at as u64, why));
        }
    }
    Ok(())
}

fn rows(mover: &Mover) -> impl Iterator<Item = Row> + use<> {
    (0..mover.setup.shape.rows()).map(Row)
}

/// Moves all layers of one block of the pool, one after the other.
fn round(mover: &mut Mover, direction: Direction, block: BlockId) -> Result<(), StoreError> {
    let file = FileId(mover.setup.files - 1);
    let moves = vec![Move { file, block, position: 0 }];
    mover.sync()?;
    mover.check_owner()?;
    mover.check_writable()?;
    // It must reach the devices: past the DRAM cache, and with bounce buffers as the blocks.
    let job = mover.begin_job(next_id(), direction, moves, Copies::default(), &[])?;
    let (clock, timeout) = (mover.clock.clone(), mover.setup.options.wait_timeout);
    for layer in (0..mover.setup.shape.layers).map(Layer) {
        let ticket = Ticket { job, layer };
        mover.start(ticket, Order::Unordered)?;
        wait_for(&*clock, timeout, |step| mover.step(ticket, step))?;
    }
    mover.end(job).map(|_| ())
}

/// Returns a row's test object: no two rows are the same, nor two offsets of one within 256. One
/// that is encoded has scalars of two exponents, and the same is true of their low bytes.
fn pattern(row: Row, bytes: usize, is_coded: bool) -> Vec<u8> {
    let seed = row.0.wrapping_mul(0x9E37_79B9) | 1;
    let byte = |at: u32| (at ^ (at >> 8).wrapping_mul(seed) ^ (seed >> 16)) as u8;
    let fits = |at: u32| if is_coded && at % 2 == 1 { 0x3F } else { byte(at) };
    (0..bytes as u32).map(fits).collect()
}

fn wrong(shape: KvShape, row: Row, verb: &'static str) -> impl FnOnce(String) -> StoreError {
    move |why| {
        let why = format!("the engine's memory cannot be {verb}: {why}");
        failed(&shape, row, 0, why)
    }
}

fn failed(shape: &KvShape, row: Row, offset: u64, why: String) -> StoreError {
    StoreError::SelfTest {
        layer: shape.layer_of(row),
        segment: row.0 % shape.segments,
        offset,
        why,
    }
}
