//! Faults of a [`SimMedia`](super::SimMedia): bytes that it changes without saying so, and
//! operations that it reports as failed.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use super::MediaKind;
use crate::random::SplitMix64;

/// How often operations fail, and how often bytes are not what the host was told, by the seed of
/// the medium. The default is never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SimFaults {
    /// Of one million writes: those that are reported as finished and never happen.
    pub lost_write_ppm: u32,
    /// Of one million writes: those that go to other blocks, while the right ones keep what they
    /// have.
    pub misdirected_write_ppm: u32,
    /// Of one million reads: those before which one to eight of the stored bits flip, for good.
    pub rot_ppm: u32,
    /// Of one million reads: those that fail. The next one may succeed.
    pub failed_read_ppm: u32,
    /// Of one million writes: those that fail. Any of their blocks may have been written, and may
    /// be lost again in a power loss.
    pub failed_write_ppm: u32,
    /// Of one million flushes: those that fail. What they were to make permanent stays readable,
    /// and a power loss may take it, also after a later flush that succeeds: the medium has given
    /// up on it. Only a new write of a block changes that.
    pub failed_flush_ppm: u32,
    /// In a power loss, a block that is not permanent may be cut in two at multiples of this many
    /// bytes, and hold two of its contents. `None`: a block is whole.
    pub tear_bytes: Option<u32>,
}

/// A fault that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimFault {
    /// What.
    pub kind: SimFaultKind,
    /// First byte of the operation, or of the torn block.
    pub offset: u64,
    /// Bytes of it.
    pub len: u64,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SimFaultKind {
    /// A write was dropped.
    LostWrite,
    /// A write went somewhere else.
    MisdirectedWrite {
        /// First byte that it overwrote instead.
        to: u64,
    },
    /// Stored bits flipped.
    Rot,
    /// A block holds two contents.
    Torn,
    /// A read failed.
    FailedRead,
    /// A write failed.
    FailedWrite,
    /// A flush failed.
    FailedFlush,
}

/// The faults of one medium so far, in their order. Clones are handles to the same log, which
/// outlives the medium.
#[derive(Debug, Clone, Default)]
pub struct SimFaultLog(Arc<Mutex<Vec<SimFault>>>);

impl SimFaultLog {
    /// Empties the log.
    #[must_use]
    pub fn take(&self) -> Vec<SimFault> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, kind: SimFaultKind, offset: u64, len: u64) {
        let fault = SimFault { kind, offset, len };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(fault);
    }
}

/// Decides about faults. Each kind has a generator of its own, so that turning one on changes
/// neither the others nor the latencies.
#[derive(Debug)]
pub(super) struct FaultChance {
    faults: SimFaults,
    lost: SplitMix64,
    misdirected: SplitMix64,
    rot: SplitMix64,
    torn: SplitMix64,
    failed: SplitMix64,
    pub(super) log: SimFaultLog,
}

fn happens(rng: &mut SplitMix64, ppm: u32) -> bool {
    rng.below(1_000_000) < u64::from(ppm)
}

impl FaultChance {
    pub(super) fn new(seed: u64, faults: SimFaults) -> Self {
        let [lost, misdirected, rot, torn, failed] =
            [1, 2, 3, 4, 5].map(|stream| SplitMix64::new(seed, stream));
        Self { faults, lost, misdirected, rot, torn, failed, log: SimFaultLog::default() }
    }

    /// Returns whether an operation fails.
    pub(super) fn fails(&mut self, kind: MediaKind, offset: u64, len: u64) -> bool {
        let SimFaults { failed_read_ppm, failed_write_ppm, failed_flush_ppm, .. } = self.faults;
        let (ppm, fault) = match kind {
            MediaKind::Read => (failed_read_ppm, SimFaultKind::FailedRead),
            MediaKind::Write { .. } => (failed_write_ppm, SimFaultKind::FailedWrite),
            MediaKind::Flush => (failed_flush_ppm, SimFaultKind::FailedFlush),
            MediaKind::Deallocate | MediaKind::WriteZeroes => return false,
        };
        let fails = happens(&mut self.failed, ppm);
        if fails {
            self.log.push(fault, offset, len);
        }
        fails
    }

    /// Returns whether a block of a write that did not finish was written.
    pub(super) fn gets_there(&mut self) -> bool {
        self.failed.below(2) == 1
    }

    pub(super) fn loses_write(&mut self, offset: u64, len: u64) -> bool {
        let lost = happens(&mut self.lost, self.faults.lost_write_ppm);
        if lost {
            self.log.push(SimFaultKind::LostWrite, offset, len);
        }
        lost
    }

    /// Where a write goes instead: whole blocks of `unit` bytes away, none of them its own.
    pub(super) fn misdirects_write(
        &mut self,
        offset: u64,
        len: u64,
        unit: u64,
        capacity: u64,
    ) -> Option<u64> {
        if !happens(&mut self.misdirected, self.faults.misdirected_write_ppm) {
            return None;
        }
        let (own, blocks) = (offset / unit, len.div_ceil(unit).max(1));
        let before = (own + 1).saturating_sub(blocks);
        let after = ((capacity - len) / unit + 1).saturating_sub(own + blocks);
        if before + after == 0 {
            return None;
        }
        let place = self.misdirected.below(before + after);
        let block = if place < before { place } else { own + blocks + (place - before) };
        let to = block * unit + offset % unit;
        let to = to.min(capacity - len);
        self.log.push(SimFaultKind::MisdirectedWrite { to }, offset, len);
        Some(to)
    }

    /// Which bits of a read's place flip, as a seed.
    pub(super) fn rots(&mut self, offset: u64, len: u64) -> Option<u64> {
        happens(&mut self.rot, self.faults.rot_ppm).then(|| {
            self.log.push(SimFaultKind::Rot, offset, len);
            self.rot.next()
        })
    }

    /// The bytes of a block at `offset` that a power loss replaces: all `len`, or, around its end,
    /// some of its parts.
    pub(super) fn replaced(&mut self, offset: u64, len: usize) -> [Range<usize>; 2] {
        let unit = self.faults.tear_bytes.map_or(len, |bytes| bytes.max(1) as usize);
        let parts = len.div_ceil(unit.max(1)) as u64;
        if parts < 2 || self.torn.below(2) == 0 {
            return [0..len, 0..0];
        }
        self.log.push(SimFaultKind::Torn, offset, len as u64);
        let (first, count) = (self.torn.below(parts), 1 + self.torn.below(parts - 1));
        let at = |part: u64| usize::try_from(part).map_or(len, |part| (part * unit).min(len));
        let end = first + count;
        [at(first)..at(end.min(parts)), 0..at(end.saturating_sub(parts))]
    }
}
