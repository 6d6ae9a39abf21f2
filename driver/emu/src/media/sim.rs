//! A medium with latencies and a volatile cache that loses unflushed data, both by seed.
#![allow(unsafe_code, reason = "gathers the memory of writes that power loss cut in half")]

mod cache;
mod faults;

use std::{collections::BTreeMap, ops::Range};

use nvme_driver::Nanos;

pub use self::faults::{SimFault, SimFaultKind, SimFaultLog, SimFaults};
use self::{cache::Cache, faults::FaultChance};
use super::{Media, MediaDone, MediaError, MediaKind, MediaOp, MemoryMedia};
use crate::{domain::SgList, memory, random::SplitMix64};

/// Duration of one kind of operation: uniform from `min_ns` with the given mean, except for a few
/// that take `tail_ns`. Integers only, so that a seed gives the same results on any machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Latency {
    /// Minimum.
    pub min_ns: u64,
    /// Mean of operations outside the tail. At least `min_ns`.
    pub mean_ns: u64,
    /// Latency in the tail.
    pub tail_ns: u64,
    /// Operations in the tail, per million.
    pub tail_ppm: u32,
}

impl Latency {
    fn sample(&self, rng: &mut SplitMix64) -> Nanos {
        let (place, tail) = (rng.next(), rng.below(1_000_000) < u64::from(self.tail_ppm));
        if tail {
            return Nanos(self.tail_ns);
        }
        let width = 2 * self.mean_ns.saturating_sub(self.min_ns);
        let offset = (u128::from(place) * u128::from(width + 1)) >> 64;
        Nanos(self.min_ns + u64::try_from(offset).unwrap_or(width))
    }
}

/// Behavior of a [`SimMedia`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimOptions {
    /// Seed of latencies, losses on power failure, and faults.
    pub seed: u64,
    /// Latency of reads.
    pub read: Latency,
    /// Latency of writes, deallocations and zeroing.
    pub write: Latency,
    /// Latency of flushes.
    pub flush: Latency,
    /// Set if unflushed writes are lost on power failure.
    pub volatile_cache: bool,
    /// Bytes of a logical block, which power loss does not tear, except for
    /// [`SimFaults::tear_bytes`].
    pub lba_bytes: u32,
    /// Faults of the medium.
    pub faults: SimFaults,
}

impl Default for SimOptions {
    /// Roughly a datacentre TLC drive, with a volatile cache.
    fn default() -> Self {
        let latency =
            |min_ns, mean_ns, tail_ns| Latency { min_ns, mean_ns, tail_ns, tail_ppm: 500 };
        Self {
            seed: 0,
            read: latency(55_000, 75_000, 900_000),
            write: latency(8_000, 15_000, 1_500_000),
            flush: latency(20_000, 200_000, 3_000_000),
            volatile_cache: true,
            lba_bytes: 4096,
            faults: SimFaults::default(),
        }
    }
}

/// [`MemoryMedia`] with latencies, out-of-order completions, a volatile write cache, and faults.
///
/// Bytes move when an operation finishes. After a power loss each block holds, by seed, any of the
/// contents it had since it was last durable; a write, deallocation or zeroing in flight may have
/// happened for any of its blocks. Blocks are durable after a write with FUA to them, or after a
/// flush that was submitted once the write had finished. A cancelled write ([`Media::cancel`]) may
/// have written any of its blocks, but not durably, even with FUA.
#[derive(Debug)]
pub struct SimMedia {
    bytes: MemoryMedia,
    options: SimOptions,
    rng: SplitMix64,
    /// Operations in flight, by finish time.
    pending: BTreeMap<(Nanos, u64), Pending>,
    cache: Cache,
    chance: FaultChance,
    stamp: u64,
}

#[derive(Debug)]
struct Pending {
    op: MediaOp,
    /// Stamp of its submission.
    stamp: u64,
}

/// Larger ranges are deallocated or zeroed durably right away: remembering their contents would
/// take as much memory as the medium.
const ZERO_BLOCKS_MAX: u64 = 65_536;

impl SimMedia {
    /// Wraps `bytes` with the behavior in `options`.
    #[must_use]
    pub fn new(bytes: MemoryMedia, options: SimOptions) -> Self {
        let rng = SplitMix64::new(options.seed, 0);
        let options = SimOptions { lba_bytes: options.lba_bytes.max(1), ..options };
        let chance = FaultChance::new(options.seed, options.faults);
        let (pending, cache) = (BTreeMap::new(), Cache::default());
        Self { bytes, options, rng, pending, cache, chance, stamp: 0 }
    }

    /// Returns the log of injected faults ([`SimOptions::faults`]).
    #[must_use]
    pub fn fault_log(&self) -> SimFaultLog {
        self.chance.log.clone()
    }

    /// Returns the number of blocks that a power loss could still change.
    #[cfg(test)]
    pub(super) fn volatile_blocks(&self) -> usize {
        self.cache.older.len()
    }

    fn blocks(&self, offset: u64, len: u64) -> Range<u64> {
        let unit = u64::from(self.options.lba_bytes);
        offset / unit..(offset + len).div_ceil(unit)
    }

    fn finish(&mut self, pending: Pending) -> MediaDone {
        let Pending { mut op, stamp } = pending;
        if self.chance.fails(op.kind, op.offset, op.len) {
            let failed = self.fail(&op, stamp);
            return op.done(failed);
        }
        let result = match self.corrupt(&mut op) {
            Ok(true) => self.execute(&op, stamp),
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        op.done(result)
    }

    /// Fails `op`.
    fn fail(&mut self, op: &MediaOp, submitted: u64) -> Result<(), MediaError> {
        let action = match op.kind {
            MediaKind::Read => "a read",
            MediaKind::Flush => {
                self.cache.flush_failed(submitted);
                "a flush"
            }
            _ => {
                self.interrupt(op)?;
                "a write"
            }
        };
        Err(MediaError::Failed { action })
    }

    /// Leaves any blocks of an unfinished write in the cache.
    fn interrupt(&mut self, op: &MediaOp) -> Result<(), MediaError> {
        if !matches!(op.kind, MediaKind::Write { .. }) {
            return Ok(());
        }
        self.stamp += 1;
        let (unit, bytes) = (u64::from(self.options.lba_bytes), gather(&op.sg_list));
        for block in self.blocks(op.offset, op.len) {
            if self.chance.gets_there() {
                let start = op.offset.max(block * unit);
                let end = (op.offset + op.len).min((block + 1) * unit);
                let place = |at: u64| usize::try_from(at - op.offset).unwrap_or(0);
                self.remember(block..block + 1)?;
                self.bytes.poke(start, &bytes[place(start)..place(end)])?;
            }
        }
        Ok(())
    }

    /// Injects the faults of `op`, except for a lost write: returns `false` if nothing of it
    /// remains.
    fn corrupt(&mut self, op: &mut MediaOp) -> Result<bool, MediaError> {
        let (unit, capacity) = (u64::from(self.options.lba_bytes), self.capacity_bytes());
        match op.kind {
            MediaKind::Write { .. } => {
                if self.chance.loses_write(op.offset, op.len) {
                    return Ok(false);
                }
                let to = self.chance.misdirects_write(op.offset, op.len, unit, capacity);
                op.offset = to.unwrap_or(op.offset);
            }
            MediaKind::Read => {
                if let Some(seed) = self.chance.rots(op.offset, op.len) {
                    self.bytes.rot(op.offset, op.len, seed)?;
                }
            }
            MediaKind::Flush | MediaKind::Deallocate | MediaKind::WriteZeroes => {}
        }
        Ok(true)
    }

    fn execute(&mut self, op: &MediaOp, submitted: u64) -> Result<(), MediaError> {
        self.stamp += 1;
        let blocks = self.blocks(op.offset, op.len);
        match op.kind {
            MediaKind::Read => self.bytes.execute(op),
            MediaKind::Flush => {
                self.cache.flush(submitted);
                Ok(())
            }
            MediaKind::Write { fua: true } => {
                self.bytes.execute(op)?;
                self.cache.forget(blocks);
                Ok(())
            }
            MediaKind::Write { fua: false } => {
                self.remember(blocks)?;
                self.bytes.execute(op)
            }
            MediaKind::Deallocate | MediaKind::WriteZeroes => {
                if blocks.end - blocks.start > ZERO_BLOCKS_MAX {
                    self.cache.forget(blocks);
                } else {
                    self.remember(blocks)?;
                }
                self.bytes.execute(op)
            }
        }
    }

    /// Remembers the contents of `blocks` before they are overwritten in the cache.
    fn remember(&mut self, blocks: Range<u64>) -> Result<(), MediaError> {
        if !self.options.volatile_cache {
            return Ok(());
        }
        let unit = u64::from(self.options.lba_bytes);
        for block in blocks {
            let start = block * unit;
            let len = unit.min(self.bytes.capacity_bytes() - start);
            let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)].into_boxed_slice();
            self.bytes.peek(start, &mut bytes)?;
            self.cache.remember(block, self.stamp, bytes);
        }
        Ok(())
    }

    /// Tears an operation that was in flight at a power loss: any of its blocks may be written.
    fn tear(&mut self, op: &MediaOp) -> Result<(), MediaError> {
        let bytes = match op.kind {
            MediaKind::Read | MediaKind::Flush => return Ok(()),
            MediaKind::Write { .. } => gather(&op.sg_list),
            MediaKind::Deallocate | MediaKind::WriteZeroes => Vec::new(),
        };
        let (unit, blocks) = (u64::from(self.options.lba_bytes), self.blocks(op.offset, op.len));
        if bytes.is_empty() && blocks.end - blocks.start > ZERO_BLOCKS_MAX {
            return Ok(());
        }
        let zeroes = vec![0; if bytes.is_empty() { unit as usize } else { 0 }];
        for block in blocks {
            let start = op.offset.max(block * unit);
            let end = (op.offset + op.len).min((block + 1) * unit);
            if self.rng.below(2) == 1 {
                let place = |at: u64| usize::try_from(at - op.offset).unwrap_or(0);
                let new = match bytes.get(place(start)..place(end)) {
                    Some(new) => new,
                    None => &zeroes[..place(end) - place(start)],
                };
                self.replace(start, new)?;
                self.cache.forget(block..block + 1);
            }
        }
        Ok(())
    }

    /// Replaces the contents at `start` with `new`, or a part of it, on power loss.
    fn replace(&mut self, start: u64, new: &[u8]) -> Result<(), MediaError> {
        for part in self.chance.replaced(start, new.len()) {
            self.bytes.poke(start + part.start as u64, &new[part])?;
        }
        Ok(())
    }
}

/// Copies the bytes of `sg_list` into one buffer.
fn gather(sg_list: &SgList) -> Vec<u8> {
    let mut bytes = vec![0u8; usize::try_from(sg_list.bytes()).unwrap_or(0)];
    let mut at = 0;
    for entry in sg_list.as_slice() {
        if let Some(host) = entry.host {
            let to = std::ptr::NonNull::from(&mut bytes[at..at + entry.len]).cast();
            // SAFETY: `sg_list` keeps its memory, which has no references into it; `to` is ours.
            unsafe { memory::copy(host, to, entry.len) };
        }
        at += entry.len;
    }
    bytes
}

impl Media for SimMedia {
    fn capacity_bytes(&self) -> u64 {
        self.bytes.capacity_bytes()
    }

    fn granularity_bytes(&self) -> u32 {
        1
    }

    fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone> {
        if let Err(error) = op.check(self.capacity_bytes()) {
            return Some(op.done(Err(error)));
        }
        let latency = match op.kind {
            MediaKind::Read => self.options.read,
            MediaKind::Flush => self.options.flush,
            MediaKind::Write { .. } | MediaKind::Deallocate | MediaKind::WriteZeroes => {
                self.options.write
            }
        };
        let due = now + latency.sample(&mut self.rng);
        self.stamp += 1;
        let stamp = self.stamp;
        self.pending.insert((due, stamp), Pending { op, stamp });
        None
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        while let Some(first) = self.pending.first_entry()
            && first.key().0 <= now
        {
            let pending = first.remove();
            done.push(self.finish(pending));
        }
    }

    fn next_event(&self) -> Option<Nanos> {
        self.pending.first_key_value().map(|((due, _), _)| *due)
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn cancel(&mut self) {
        while let Some((_, Pending { op, .. })) = self.pending.pop_first() {
            if let Err(error) = self.interrupt(&op) {
                tracing::error!(%error, "cancelling an operation that had been checked failed");
            }
        }
    }

    fn power_loss(&mut self) {
        while let Some((_, Pending { op, .. })) = self.pending.pop_first() {
            if let Err(error) = self.tear(&op) {
                tracing::error!(%error, "tearing an operation that had been checked failed");
            }
        }
        let unit = u64::from(self.options.lba_bytes);
        for (block, older) in std::mem::take(&mut self.cache.older) {
            let choice = usize::try_from(self.rng.below(older.len() as u64 + 1)).unwrap_or(0);
            if let Some(content) = older.get(choice)
                && let Err(error) = self.replace(block * unit, &content.bytes)
            {
                tracing::error!(%error, block, "restoring a block failed");
            }
        }
    }
}
