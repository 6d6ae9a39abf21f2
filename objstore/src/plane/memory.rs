//! Blocks in memory of this process, beside the devices: what is there is copied, and not read.
//!
//! The devices have all of it, so that nothing is lost with the process (write-through). A block is
//! known by its file. A file gets other bytes only by being written, and whoever begins that,
//! begins by forgetting what was here.

use std::time::Duration;

use kv_catalog::{FileId, KvShape, Layer, Row};
use kv_tier::{Admission, Block, HostBlock, Tier, TierConfig};
use nvme_driver::{DmaSlice, platform::buffer::Buffer};
use nvme_spec::nvm::Direction;

use super::{Move, Plane, job::Job};
use crate::{config::StoreOptions, error::StoreError, registration::KvPool, stats::Path};

/// How long any block takes to get again: they are all on the same devices.
const AGAIN: Duration = Duration::from_millis(1);

/// The memory, and what is in it.
#[derive(Debug)]
pub(super) struct HostMemory {
    tier: Tier<FileId>,
    /// `[row][object]` of each block; empty before it is used.
    blocks: Vec<Vec<u8>>,
    shape: KvShape,
    pool: KvPool,
    /// The engine's memory.
    engine: Buffer,
}

impl HostMemory {
    /// As much as the options say; `None` if that is nothing.
    pub(super) fn new(
        shape: &KvShape,
        pool: &KvPool,
        has_gpu: bool,
        options: &StoreOptions,
    ) -> Result<Option<Self>, StoreError> {
        if options.dram_bytes == 0 {
            return Ok(None);
        }
        let wrong = |problem| StoreError::Config { field: "dram_bytes", problem };
        let block_bytes = shape.block_bytes();
        let blocks = u32::try_from(options.dram_bytes / block_bytes).unwrap_or(u32::MAX - 1);
        if blocks == 0 {
            let bytes = options.dram_bytes;
            return Err(wrong(format!(
                "{bytes} bytes have no room for a block of {block_bytes}; give more, or 0"
            )));
        }
        let whole = DmaSlice::whole(pool.memory().clone()).ok().and_then(Buffer::new);
        let engine = whole.filter(|_| pool.path() == Path::Host && !has_gpu).ok_or_else(|| {
            wrong("it needs a pool in memory of this process, and no GPU; leave it 0".to_owned())
        })?;
        let tier = Tier::new(TierConfig { blocks, block_bytes, policy: options.policy });
        let blocks = vec![Vec::new(); blocks as usize];
        Ok(Some(Self { tier, blocks, shape: *shape, pool: pool.clone(), engine }))
    }

    pub(super) fn blocks_and_evictions(&self) -> (u32, u64) {
        (self.tier.used(), self.tier.counts().evictions)
    }

    /// Objects of a layer of so many blocks, and their bytes.
    pub(super) fn size(&self, blocks: usize) -> (u64, u64) {
        let objects = blocks as u64 * u64::from(self.shape.segments);
        (objects, objects * u64::from(self.shape.object_bytes))
    }

    /// Takes memory for what a job moves, the tail first, so that it goes before what it follows;
    /// of what has no room, the tail is left out.
    fn take(&mut self, moves: &[Move]) -> Vec<(Move, HostBlock)> {
        let mut taken = Vec::new();
        for entry in moves.iter().take(self.blocks.len()).rev() {
            let block = Block { key: entry.file, again: AGAIN, is_dirty: false, by: None };
            let Admission::Fill(at) = self.tier.admit(block) else { continue };
            let bytes = self.shape.block_bytes() as usize;
            let memory = &mut self.blocks[at.0 as usize];
            if memory.is_empty() && memory.try_reserve_exact(bytes).is_err() {
                self.tier.filled(at, false);
                continue;
            }
            memory.resize(bytes, 0);
            taken.push((*entry, at));
        }
        taken
    }

    /// Copies a layer of blocks that are here to the engine.
    pub(super) fn serve(&mut self, hits: &[(Move, HostBlock)], layer: Layer) {
        for (entry, at) in hits {
            for row in self.shape.layer_rows(layer) {
                let (object, offset) = self.object(entry, row);
                let bytes = &self.blocks[at.0 as usize][object];
                self.engine.write(offset, bytes).expect("the pool was checked");
            }
        }
    }

    /// Copies a layer that was moved here.
    pub(super) fn fill(&mut self, job: &Job, layer: Layer) {
        for (entry, at) in &job.fills {
            for row in self.shape.layer_rows(layer) {
                let (object, offset) = self.object(entry, row);
                let bytes = &mut self.blocks[at.0 as usize][object];
                self.engine.read(offset, bytes).expect("the pool was checked");
            }
        }
    }

    /// Where an object is in a block here, and in the engine's memory.
    fn object(&self, entry: &Move, row: u32) -> (std::ops::Range<usize>, usize) {
        let bytes = self.shape.object_bytes as usize;
        let first = row as usize * bytes;
        let offset = self.pool.offset(entry.block, Row(row)).expect("it was checked");
        (first..first + bytes, offset as usize)
    }
}

impl Plane {
    /// Takes out of a job's moves what is in memory, and takes memory for the rest. The checksums
    /// of the rest, if those are others.
    pub(super) fn divide(&mut self, job: &mut Job, expected: &[u32]) -> Option<Vec<u32>> {
        let memory = self.memory.as_mut()?;
        // The self-test is about the devices.
        if job.moves.iter().any(|entry| entry.file.0 + 1 == self.files) {
            return None;
        }
        let mut rest = Vec::new();
        if job.direction == Direction::Write {
            job.moves.iter().for_each(|entry| memory.tier.remove(entry.file));
        } else {
            let mut words = expected.chunks_exact(self.shape.rows() as usize);
            let hits = &mut job.hits;
            job.moves.retain(|entry| {
                let words = words.next();
                let found = memory.tier.get(entry.file);
                match found {
                    Some(at) => hits.push((*entry, at)),
                    None => rest.extend(words.into_iter().flatten()),
                }
                found.is_none()
            });
        }
        job.fills = memory.take(&job.moves);
        (job.direction == Direction::Read).then_some(rest)
    }

    /// A job has ended: what it took from memory may go, and what it brought there is found if all
    /// of it was moved.
    pub(super) fn let_go(&mut self, job: &Job) {
        let Some(memory) = &mut self.memory else { return };
        job.hits.iter().for_each(|(_, at)| memory.tier.release(*at));
        let is_whole = job.map.is_some() && job.verdict().is_none();
        job.fills.iter().for_each(|(_, at)| memory.tier.filled(*at, is_whole));
    }
}
