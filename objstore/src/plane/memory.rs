//! Blocks in memory of this process, beside the devices: what is there is copied, and not read.
//!
//! The devices have all of it, so that nothing is lost with the process (write-through). A block is
//! known by its file. A file gets other bytes only by being written, and whoever begins that,
//! begins by forgetting what was here.
//!
//! The devices reach this memory, too: what is read ahead ([`Plane::prefetch`]) gets here without
//! the engine's blocks.

use std::{collections::HashSet, ops::Range, time::Duration};

use gio_uring::{PoolDesc, PoolHandle, Uring};
use kv_catalog::{BlockId, FileId, KvShape, Layer, Region, Row};
use kv_tier::{Admission, Block, HostBlock, Tier, TierConfig, TierCounts};
use nvme_driver::{Bus, DmaSlice, Nanos, platform::buffer::Buffer};
use nvme_spec::nvm::Direction;

use super::{
    Device, Move, Plane,
    job::{Job, JobId, Ticket},
    open, route,
};
use crate::{
    config::StoreOptions,
    error::StoreError,
    registration::KvPool,
    stats::{DramStats, Path},
};

/// How long any block takes to get again: they are all on the same devices.
pub(crate) const AGAIN: Duration = Duration::from_millis(1);
/// Bytes that are copied at a time: they stay in the CPU's first cache.
const COPY_BYTES: usize = 16 << 10;

/// The memory, and what is in it.
#[derive(Debug)]
pub(super) struct HostMemory {
    tier: Tier<FileId>,
    /// Its blocks, and those of the engine.
    pub(super) own: KvPool,
    own_bytes: Buffer,
    engine: KvPool,
    engine_bytes: Buffer,
    /// What the ring calls it.
    target: Option<PoolHandle>,
    shape: KvShape,
    retrieved_bytes: u64,
    pub(super) prefetched_bytes: u64,
}

fn buffer(pool: &KvPool) -> Option<Buffer> {
    DmaSlice::whole(pool.memory().clone()).ok().and_then(Buffer::new)
}

impl HostMemory {
    /// As much as the options say; `None` if that is nothing.
    pub(super) fn new(
        bus: &dyn Bus,
        shape: &KvShape,
        engine: &KvPool,
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
        let here = buffer(engine).filter(|_| engine.path() == Path::Host && !has_gpu);
        let engine_bytes = here.ok_or_else(|| {
            wrong("it needs a pool in memory of this process, and no GPU; leave it 0".to_owned())
        })?;
        let bytes = usize::try_from(u64::from(blocks) * block_bytes).unwrap_or(usize::MAX);
        let memory = bus.dma().alloc_on(bytes, bus.numa_node());
        let memory = memory.map_err(|error| wrong(format!("{error}, or give less")))?;
        let own = KvPool::contiguous(memory, shape, blocks);
        let own = own.map_err(|error| wrong(error.to_string()))?;
        let own_bytes = buffer(&own).ok_or_else(|| wrong("it has no address".to_owned()))?;
        let tier = Tier::new(TierConfig { blocks, block_bytes, policy: options.policy });
        Ok(Some(Self {
            tier,
            own,
            own_bytes,
            engine: engine.clone(),
            engine_bytes,
            target: None,
            shape: *shape,
            retrieved_bytes: 0,
            prefetched_bytes: 0,
        }))
    }

    /// Proves that every device reaches it.
    pub(super) fn prove(&self, devices: &[Device], scratch: &[Region]) -> Result<(), StoreError> {
        route::prove(devices, scratch, &self.own, None)
    }

    /// Makes it known to a ring, so that operations can name it.
    pub(super) fn register(
        &mut self,
        ring: &mut Uring,
        desc: &PoolDesc,
        checksums: bool,
    ) -> Result<(), StoreError> {
        self.target = Some(ring.register_pool(&open::of_pool(desc, &self.own, checksums))?);
        Ok(())
    }

    /// What an operation of the ring names.
    pub(super) fn target(&self) -> &PoolHandle {
        self.target.as_ref().expect("it was registered when the plane was opened")
    }

    pub(super) fn stats(&self) -> DramStats {
        let TierCounts { hits, misses, evictions, wasted_bytes, .. } = self.tier.counts();
        let Self { retrieved_bytes, prefetched_bytes, .. } = *self;
        let blocks = self.tier.used();
        DramStats {
            hits,
            misses,
            retrieved_bytes,
            blocks,
            evictions,
            prefetched_bytes,
            wasted_bytes,
        }
    }

    /// Objects of a layer of so many blocks, and their bytes.
    pub(super) fn size(&self, blocks: usize) -> (u64, u64) {
        let objects = blocks as u64 * u64::from(self.shape.segments);
        (objects, objects * u64::from(self.shape.object_bytes))
    }

    /// Takes memory for a block, if there is any; `by`: when it is wanted.
    fn take(&mut self, entry: &Move, by: Option<Duration>) -> Option<(Move, HostBlock)> {
        let block = Block { key: entry.file, again: AGAIN, by };
        match self.tier.admit(block) {
            Admission::Fill(at) => Some((*entry, at)),
            _ => None,
        }
    }

    /// Copies a layer of blocks that are here to the engine. Where the bytes are not those of the
    /// checksums, says which block that is, and keeps it no longer: the devices may have it right.
    pub(super) fn serve(&mut self, job: &Job, layer: Layer) -> Result<(), Move> {
        let words = job.hit_words.chunks_exact(self.shape.rows() as usize);
        let mut words = words.chain(std::iter::repeat(&[][..]));
        for (entry, host) in &job.hits {
            let words = words.next().unwrap_or_default();
            if !self.give(entry, *host, self.shape.layer_rows(layer), words) {
                return Err(*entry);
            }
        }
        self.retrieved_bytes += self.size(job.hits.len()).1;
        Ok(())
    }

    /// Copies rows of a block to the engine. `words`: its checksums, if there are any. Says whether
    /// the bytes are those.
    fn give(&mut self, to: &Move, host: HostBlock, rows: Range<u32>, words: &[u32]) -> bool {
        for row in rows {
            let own = self.own.offset(BlockId(host.0), Row(row)).expect("a block of its own");
            let offset = self.engine.offset(to.block, Row(row)).expect("it was checked");
            let (from, engine) = (&self.own_bytes, &mut self.engine_bytes);
            let (bytes, expected) = (self.shape.object_bytes as usize, words.get(row as usize));
            let sum = copy(from, own, engine, offset, bytes, expected.is_some());
            if expected.is_some_and(|expected| *expected != sum) {
                self.tier.remove(to.file);
                return false;
            }
        }
        true
    }

    /// Copies a layer that was moved here.
    pub(super) fn fill(&mut self, job: &Job, layer: Layer) {
        for (entry, host) in &job.fills {
            for row in self.shape.layer_rows(layer) {
                let own = self.own.offset(BlockId(host.0), Row(row)).expect("a block of its own");
                let offset = self.engine.offset(entry.block, Row(row)).expect("it was checked");
                let bytes = self.shape.object_bytes as usize;
                copy(&self.engine_bytes, offset, &mut self.own_bytes, own, bytes, false);
            }
        }
    }
}

/// Copies `len` bytes, and says their CRC-32C if asked. By way of a buffer: there is never a
/// reference to what a device may write to.
fn copy(from: &Buffer, at: u64, to: &mut Buffer, offset: u64, len: usize, sum: bool) -> u32 {
    let mut chunk = [0; COPY_BYTES];
    let (mut done, mut crc) = (0, 0);
    while done < len {
        let bytes = &mut chunk[..COPY_BYTES.min(len - done)];
        from.read(at as usize + done, bytes).expect("the pool was checked");
        if sum {
            crc = crc32c::crc32c_append(crc, bytes);
        }
        to.write(offset as usize + done, bytes).expect("the pool was checked");
        done += bytes.len();
    }
    crc
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
        memory.tier.expire(Duration::from_nanos(self.clock.now().0));
        let mut rest = Vec::new();
        if job.direction == Direction::Write {
            job.moves.iter().for_each(|entry| memory.tier.remove(entry.file));
        } else {
            let mut words = expected.chunks_exact(self.shape.rows() as usize);
            let Job { moves, hits, hit_words, .. } = job;
            moves.retain(|entry| {
                let words = words.next().unwrap_or_default();
                let found = memory.tier.get(entry.file);
                match found {
                    Some(at) => {
                        hits.push((*entry, at));
                        hit_words.extend(words);
                    }
                    None => rest.extend(words),
                }
                found.is_none()
            });
        }
        // The tail first, so that it goes before what it follows; of what has no room, the tail is
        // left out.
        let first = job.moves.iter().take(memory.own.blocks() as usize).rev();
        job.fills = first.filter_map(|entry| memory.take(entry, None)).collect();
        (job.direction == Direction::Read).then_some(rest)
    }

    /// A job has ended: what it took from memory may go, and what it brought there is found if all
    /// of it was moved.
    pub(super) fn let_go(&mut self, job: &Job) {
        let Some(memory) = &mut self.memory else { return };
        job.hits.iter().for_each(|(_, at)| memory.tier.release(*at));
        let is_whole = job.map.is_some() && job.verdict().is_none();
        job.fills.iter().for_each(|(_, at)| memory.tier.filled(*at, is_whole));
        if job.direction == Direction::Write && job.fills.len() < job.moves.len() {
            // They may have been read ahead while they were written.
            let filled: HashSet<FileId> = job.fills.iter().map(|(entry, _)| entry.file).collect();
            let others = job.moves.iter().filter(|entry| !filled.contains(&entry.file));
            others.for_each(|entry| memory.tier.remove(entry.file));
        }
    }

    /// Starts reading files into memory of this process ([`StoreOptions::dram_bytes`]), but for
    /// those that are there or on their way. All of them are kept for a job that reads them, until
    /// the time `until`. Without such memory, nothing is done, and nothing more when half of all
    /// operations are in flight. Says how many leading ones are there or on their way, and which
    /// job reads: it is among [`Plane::take_ended`] when it has ended. What is written anew
    /// meanwhile is not kept.
    ///
    /// `expected`: as for [`Plane::begin`]. What is in flight is not called back, and holds up what
    /// is started later: ask for what is needed next.
    ///
    /// # Errors
    /// [`StoreError::NoSuchFile`], [`StoreError::Ring`], [`StoreError::Failed`].
    pub fn prefetch(
        &mut self,
        files: &[FileId],
        expected: &[u32],
        until: Nanos,
    ) -> Result<(usize, Option<JobId>), StoreError> {
        self.sync()?;
        if let Some(file) = files.iter().copied().find(|file| file.0 + 1 >= self.files) {
            return Err(StoreError::NoSuchFile { file, files: self.files - 1 });
        }
        let is_full = self.is_full();
        let now = Duration::from_nanos(self.clock.now().0);
        let Some(memory) = &mut self.memory else { return Ok((0, None)) };
        memory.tier.expire(now);
        let by = Duration::from_nanos(until.0);
        files.iter().for_each(|file| memory.tier.expect(*file, by));
        let moves = files.iter().zip(0..).map(|(file, position)| Move {
            file: *file,
            block: BlockId(0),
            position,
        });
        // Of what has no room, the tail is left out.
        let taken = moves.map_while(|entry| match memory.tier.class(entry.file) {
            Some(_) => Some(None),
            None if is_full => None,
            None => memory.take(&entry, Some(by)).map(Some),
        });
        let taken: Vec<Option<(Move, HostBlock)>> = taken.collect();
        let there = taken.len();
        let taken: Vec<(Move, HostBlock)> = taken.into_iter().flatten().collect();
        if taken.is_empty() {
            return Ok((there, None));
        }
        let rows = self.shape.rows() as usize;
        let words = taken.iter().flat_map(|(entry, _)| {
            let at = entry.position as usize * rows;
            expected.get(at..at + rows).unwrap_or_default()
        });
        let words: Vec<u32> = words.copied().collect();
        let blocks: Vec<_> = taken.iter().map(|(entry, at)| (entry.file, *at)).collect();
        match self.read_ahead(&blocks, &words) {
            Ok(ticket) => Ok((there, Some(self.abandon_ahead(&ticket)))),
            Err(error) => {
                let memory = self.memory.iter_mut();
                memory.for_each(|m| taken.iter().for_each(|(_, at)| m.tier.filled(*at, false)));
                Err(error)
            }
        }
    }

    /// Whether the rest is for what somebody waits for.
    fn is_full(&self) -> bool {
        self.ops.len() >= self.options.iocbs as usize / 2
    }

    /// Starts reading files into blocks that were admitted for them. The caller says when they are
    /// filled.
    pub(crate) fn read_ahead(
        &mut self,
        blocks: &[(FileId, HostBlock)],
        words: &[u32],
    ) -> Result<Ticket, StoreError> {
        if self.is_full() {
            return Err(StoreError::Busy { in_flight: self.ops.len() as u32 });
        }
        let moves = blocks.iter().zip(0..).map(|((file, at), position)| Move {
            file: *file,
            block: BlockId(at.0),
            position,
        });
        let moves: Vec<Move> = moves.collect();
        // One operation moves all rows.
        let mut job = Job::new(Direction::Read, 1, &moves, self.tally.recoveries);
        job.is_ahead = true;
        self.upload(&mut job, words)?;
        self.jobs_ever += 1;
        let id = JobId(self.jobs_ever);
        self.jobs.insert(id, job);
        if let Err(error) = self.issue(id, Layer(0), None, None) {
            self.jobs.remove(&id);
            return Err(error);
        }
        self.after_completions()?;
        Ok(self.ticket(id, Layer(0), None))
    }

    /// What is read ends by itself: its blocks are filled then, and the job is among
    /// [`Plane::take_ended`].
    pub(crate) fn abandon_ahead(&mut self, ticket: &Ticket) -> JobId {
        if let Some(job) = self.jobs.get_mut(&ticket.job) {
            job.fills = job.moves.iter().map(|at| (*at, HostBlock(at.block.0))).collect();
        }
        self.abandon(ticket.job);
        ticket.job
    }

    /// Ends what was read. Says whether it is there.
    pub(crate) fn end_ahead(&mut self, ticket: &Ticket) -> bool {
        self.end(ticket.job).is_ok_and(|done| done.failure.is_none())
    }

    /// Copies a block to the engine's one in `to`. Says whether the bytes are those of the
    /// checksums; what differs is kept no longer.
    pub(crate) fn copy_ahead(&mut self, to: Move, host: HostBlock, words: &[u32]) -> bool {
        let (rows, is_there) = (0..self.shape.rows(), to.block.0 < self.pool.blocks());
        let memory = self.memory.as_mut().filter(|_| is_there);
        memory.is_some_and(|memory| memory.give(&to, host, rows, words))
    }

    /// Which blocks are in memory; `None` if none are ever.
    pub(crate) fn tier(&mut self) -> Option<&mut Tier<FileId>> {
        self.memory.as_mut().map(|memory| &mut memory.tier)
    }

    /// Whether blocks are kept in memory of this process.
    pub(crate) fn keeps_blocks(&self) -> bool {
        self.memory.is_some()
    }

    /// These files hold nothing any more: their memory is of no use.
    pub(crate) fn forget(&mut self, files: &[FileId]) {
        if let Some(memory) = &mut self.memory {
            files.iter().for_each(|file| memory.tier.remove(*file));
        }
    }
}
