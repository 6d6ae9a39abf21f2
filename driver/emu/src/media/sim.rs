//! A medium that takes its time, forgets what was not flushed, and does both as a seed says.
#![allow(unsafe_code, reason = "gathers the memory of writes that power loss cut in half")]

use std::collections::BTreeMap;

use nvme_driver::Nanos;

use super::{Media, MediaDone, MediaError, MediaKind, MediaOp, MemoryMedia};
use crate::{domain::SgList, memory, random::SplitMix64};

/// How long operations of one kind take: spread evenly from `min_ns` so that the mean comes out,
/// but for a few that take `tail_ns`. Integers only, so that a seed gives the same on any machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Latency {
    /// Shortest.
    pub min_ns: u64,
    /// Mean of those that are not in the tail. At least `min_ns`.
    pub mean_ns: u64,
    /// Of the few that take long.
    pub tail_ns: u64,
    /// How few: of one million operations.
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

/// How a [`SimMedia`] behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimOptions {
    /// Decides latencies and what a power loss takes.
    pub seed: u64,
    /// Of reads.
    pub read: Latency,
    /// Of writes, deallocations and zeroing.
    pub write: Latency,
    /// Of flushes.
    pub flush: Latency,
    /// Whether writes are lost in a power loss until they are flushed.
    pub volatile_cache: bool,
    /// What power loss cannot cut in two: bytes of a logical block.
    pub lba_bytes: u32,
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
        }
    }
}

/// [`MemoryMedia`] with latencies, completions out of order, and a volatile write cache.
///
/// Bytes move when an operation finishes. After a power loss each block holds, by seed, any of the
/// contents it had since it was last made permanent; a write in flight may have happened for any of
/// its blocks. Blocks are permanent after a write with FUA to them, or when a flush finishes that
/// was submitted after the write had finished.
#[derive(Debug)]
pub struct SimMedia {
    bytes: MemoryMedia,
    options: SimOptions,
    rng: SplitMix64,
    /// In flight, by when they finish.
    pending: BTreeMap<(Nanos, u64), Pending>,
    cache: Cache,
    stamp: u64,
}

#[derive(Debug)]
struct Pending {
    op: MediaOp,
    /// When it was submitted, in stamps.
    stamp: u64,
}

/// Contents that blocks may fall back to: what was there before each write since the last flush.
#[derive(Debug, Default)]
struct Cache {
    older: BTreeMap<u64, Vec<Older>>,
}

#[derive(Debug)]
struct Older {
    /// When it was overwritten.
    stamp: u64,
    bytes: Box<[u8]>,
}

/// Contents remembered per block, the oldest and the latest ones.
const VERSIONS_MAX: usize = 4;
/// Ranges with more blocks than this are deallocated or zeroed for good at once: remembering what
/// was there would take as much memory as the medium.
const ZERO_BLOCKS_MAX: u64 = 65_536;

impl SimMedia {
    /// Lets `bytes` behave like `options` say.
    #[must_use]
    pub fn new(bytes: MemoryMedia, options: SimOptions) -> Self {
        let rng = SplitMix64::new(options.seed, 0);
        let options = SimOptions { lba_bytes: options.lba_bytes.max(1), ..options };
        let (pending, cache) = (BTreeMap::new(), Cache::default());
        Self { bytes, options, rng, pending, cache, stamp: 0 }
    }

    /// Blocks whose contents a power loss could still change.
    #[cfg(test)]
    pub(super) fn volatile_blocks(&self) -> usize {
        self.cache.older.len()
    }

    fn blocks(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        let unit = u64::from(self.options.lba_bytes);
        offset / unit..(offset + len).div_ceil(unit)
    }

    fn finish(&mut self, pending: Pending) -> MediaDone {
        let Pending { op, stamp } = pending;
        let result = self.execute(&op, stamp);
        op.done(result)
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

    /// Remembers what `blocks` hold, for they are about to be overwritten in the cache.
    fn remember(&mut self, blocks: std::ops::Range<u64>) -> Result<(), MediaError> {
        if !self.options.volatile_cache {
            return Ok(());
        }
        let unit = u64::from(self.options.lba_bytes);
        for block in blocks {
            let start = block * unit;
            let len = unit.min(self.bytes.capacity_bytes() - start);
            let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)].into_boxed_slice();
            self.bytes.peek(start, &mut bytes)?;
            let older = self.cache.older.entry(block).or_default();
            if older.len() == VERSIONS_MAX {
                older.remove(1);
            }
            older.push(Older { stamp: self.stamp, bytes });
        }
        Ok(())
    }

    /// A write that power loss met in flight: any of its blocks may have made it.
    fn tear(&mut self, op: &MediaOp) -> Result<(), MediaError> {
        let bytes = gather(&op.sg_list);
        self.stamp += 1;
        for block in self.blocks(op.offset, op.len) {
            let unit = u64::from(self.options.lba_bytes);
            let start = op.offset.max(block * unit);
            let end = (op.offset + op.len).min((block + 1) * unit);
            if self.rng.below(2) == 1 {
                let place = |at: u64| usize::try_from(at - op.offset).unwrap_or(0);
                self.bytes.poke(start, &bytes[place(start)..place(end)])?;
                self.cache.forget(block..block + 1);
            }
        }
        Ok(())
    }
}

/// The bytes of `sg_list` in one place.
fn gather(sg_list: &SgList) -> Vec<u8> {
    let mut bytes = vec![0u8; usize::try_from(sg_list.bytes()).unwrap_or(0)];
    let mut at = 0;
    for entry in sg_list.as_slice() {
        if let Some(host) = entry.host {
            let to = std::ptr::NonNull::from(&mut bytes[at..at + entry.len]).cast();
            // SAFETY: `sg_list` keeps its memory, which no reference points into; `to` is ours.
            unsafe { memory::copy(host, to, entry.len) };
        }
        at += entry.len;
    }
    bytes
}

impl Cache {
    fn flush(&mut self, submitted: u64) {
        self.older.retain(|_, older| {
            older.retain(|content| content.stamp > submitted);
            !older.is_empty()
        });
    }

    fn forget(&mut self, blocks: std::ops::Range<u64>) {
        if self.older.is_empty() {
            return;
        }
        let known: Vec<u64> = self.older.range(blocks).map(|(block, _)| *block).collect();
        for block in known {
            self.older.remove(&block);
        }
    }
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
        self.pending.clear();
    }

    fn power_loss(&mut self) {
        while let Some((_, Pending { op, .. })) = self.pending.pop_first() {
            if matches!(op.kind, MediaKind::Write { .. })
                && let Err(error) = self.tear(&op)
            {
                tracing::error!(%error, "tearing a write that had been checked failed");
            }
        }
        let unit = u64::from(self.options.lba_bytes);
        for (block, older) in std::mem::take(&mut self.cache.older) {
            let choice = usize::try_from(self.rng.below(older.len() as u64 + 1)).unwrap_or(0);
            if let Some(content) = older.get(choice)
                && let Err(error) = self.bytes.poke(block * unit, &content.bytes)
            {
                tracing::error!(%error, block, "restoring a block failed");
            }
        }
    }
}
