//! The table of a job's copies between the engine's blocks and other memory.

use std::collections::HashSet;

use gio_uring::{DeviceArray, Uring};
use kv_catalog::{BlockId, FileId, KvShape, Layer};

use crate::{
    error::StoreError,
    ids::{Move, PoolId},
    plane::checksums::JobChecksums,
};

/// Blocks that are copied between the engine's pool and other memory.
#[derive(Debug, Default)]
pub(in crate::plane) struct Pairs {
    /// The engine's block, and the block of the other memory.
    pub(super) blocks: Vec<(Move, BlockId)>,
    /// Checksums, `[block][row]`; empty if there are none.
    pub(in crate::plane) words: Vec<u32>,
    /// The same for kernels on streams, if these copy.
    pub(in crate::plane) uploaded: Option<Uploaded>,
}

/// Blocks that kernels on streams copy, by position.
#[derive(Debug)]
pub(in crate::plane) struct Uploaded {
    pub(super) engine: DeviceArray<u32>,
    /// `None` if the other memory is ordered by position: it is staging memory.
    pub(super) other: Option<DeviceArray<u32>>,
    pub(super) checksums: Option<JobChecksums>,
}

impl Uploaded {
    /// Creates the table of blocks that go through staging memory.
    pub(in crate::plane) fn staged(
        ring: &mut Uring,
        blocks: impl ExactSizeIterator<Item = BlockId>,
    ) -> Result<Self, StoreError> {
        let engine = ring.upload(blocks.map(|block| block.0))?;
        Ok(Self { engine, other: None, checksums: None })
    }
}

impl Pairs {
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the moves and their checksums, which are empty without any.
    pub(super) fn with_words(
        &self,
        rows: usize,
    ) -> impl Iterator<Item = (&(Move, BlockId), &[u32])> {
        let words = self.words.chunks_exact(rows).chain(std::iter::repeat(&[][..]));
        self.blocks.iter().zip(words)
    }

    /// Uploads them, unless there are none.
    pub(super) fn upload(&mut self, ring: &mut Uring, shape: &KvShape) -> Result<(), StoreError> {
        if self.blocks.is_empty() {
            return Ok(());
        }
        let (rows, count) = (shape.rows(), self.blocks.len());
        let checksums = match &self.words[..] {
            [] => None,
            words => Some(JobChecksums::of_copies(ring, rows, count, words)?),
        };
        let engine = ring.upload(self.blocks.iter().map(|(entry, _)| entry.block.0))?;
        let other = Some(ring.upload(self.blocks.iter().map(|(_, at)| at.0))?);
        self.uploaded = Some(Uploaded { engine, other, checksums });
        Ok(())
    }

    /// Returns the block whose copy by a stream did not match its checksums, if there is one.
    pub(super) fn differing(&self) -> Vec<&Move> {
        let checksums = self.uploaded.as_ref().and_then(|uploaded| uploaded.checksums.as_ref());
        let differing = checksums.map(JobChecksums::differing).unwrap_or_default();
        let entry = |at: &u32| self.blocks.get(*at as usize).map(|(entry, _)| entry);
        differing.iter().filter_map(entry).collect()
    }
}

/// The copies of a job. Of a layer that is stored, `through` is copied before the devices write it,
/// and `fills` meanwhile; of one that is read, `hits` when it starts, and the others when the
/// devices are done.
#[derive(Debug, Default)]
pub(in crate::plane) struct Copies {
    /// The pool of the engine's blocks.
    pub(in crate::plane) pool: PoolId,
    /// By layer: the pool in place of it; empty if there is none.
    pub(super) aimed: Vec<PoolId>,
    /// Blocks that go through bounce buffers or staging memory. With a codec, their checksums.
    pub(in crate::plane) through: Pairs,
    /// Blocks that the DRAM cache has, which no device moves.
    pub(super) hits: Pairs,
    /// Blocks for the DRAM cache.
    pub(super) fills: Pairs,
    /// Files whose blocks do not fit the codec.
    pub(super) unfit: HashSet<FileId>,
}

impl Copies {
    /// Creates the copies of a job that reads ahead: its blocks are marked as filled when it ends.
    pub(in crate::plane) fn of_fills(fills: Vec<(Move, BlockId)>) -> Self {
        Self { fills: Pairs { blocks: fills, ..Pairs::default() }, ..Self::default() }
    }

    /// Moves a layer from now on to or from the blocks of another pool.
    pub(in crate::plane) fn aim(&mut self, layer: Layer, layers: u32, pool: PoolId) {
        self.aimed.resize(layers as usize, self.pool);
        self.aimed[layer.0 as usize] = pool;
    }

    /// Returns the pool that a layer is moved to or from.
    pub(in crate::plane) fn pool_of(&self, layer: Layer) -> PoolId {
        self.aimed.get(layer.0 as usize).copied().unwrap_or(self.pool)
    }

    /// Returns the blocks that the DRAM cache has.
    pub(in crate::plane) fn hits(&self) -> &[(Move, BlockId)] {
        &self.hits.blocks
    }

    /// Returns true if streams copy any blocks.
    pub(in crate::plane) fn is_on_streams(&self) -> bool {
        [&self.through, &self.hits, &self.fills].iter().any(|pairs| pairs.uploaded.is_some())
    }
}
