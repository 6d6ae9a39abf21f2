//! Faults of a [`SimMedia`](super::SimMedia): silent corruption, and operations reported as failed.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use super::MediaKind;
use crate::random::SplitMix64;

/// Rates of failed operations and of silent corruption, by the seed of the medium. All 0 by
/// default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SimFaults {
    /// Writes, per million, that are reported as finished and never happen.
    pub lost_write_ppm: u32,
    /// Writes, per million, that go to other blocks, while the right ones stay unchanged.
    pub misdirected_write_ppm: u32,
    /// Reads, per million, before which one to eight of the stored bits flip permanently.
    pub rot_ppm: u32,
    /// Reads, per million, that fail. A retry may succeed.
    pub failed_read_ppm: u32,
    /// Writes, per million, that fail. Any of their blocks may have been written, and may be lost
    /// again in a power loss.
    pub failed_write_ppm: u32,
    /// Flushes, per million, that fail. The data to be flushed stays readable, and a power loss may
    /// take it even after a later flush that succeeds: the medium has given up on it. Only a new
    /// write of a block changes that.
    pub failed_flush_ppm: u32,
    /// On a power loss, a block that is not durable may be torn at multiples of this many bytes,
    /// and hold two of its contents. `None`: blocks are atomic.
    pub tear_bytes: Option<u32>,
}

/// An injected fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimFault {
    /// Kind of fault.
    pub kind: SimFaultKind,
    /// First byte of the operation, or of the torn block.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SimFaultKind {
    /// A write was dropped.
    LostWrite,
    /// A write went elsewhere.
    MisdirectedWrite {
        /// First byte that it overwrote instead.
        to: u64,
    },
    /// Stored bits flipped.
    Rot,
    /// A block holds a mix of two contents.
    Torn,
    /// A read failed.
    FailedRead,
    /// A write failed.
    FailedWrite,
    /// A flush failed.
    FailedFlush,
}

/// The faults of one medium so far, in order. Clones are handles to the same log, which outlives
/// the medium.
#[derive(Debug, Clone, Default)]
pub struct SimFaultLog(Arc<Mutex<Vec<SimFault>>>);

impl SimFaultLog {
    /// Takes all entries out of the log.
    #[must_use]
    pub fn take(&self) -> Vec<SimFault> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, kind: SimFaultKind, offset: u64, len: u64) {
        let fault = SimFault { kind, offset, len };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(fault);
    }
}

/// Decides about faults. Each kind has its own generator, so that enabling one changes neither the
/// others nor the latencies.
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

    /// Returns the target of a misdirected write: blocks of `unit` bytes, none of its own.
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

    /// Returns a seed for the bits of a read's range that flip.
    pub(super) fn rots(&mut self, offset: u64, len: u64) -> Option<u64> {
        happens(&mut self.rot, self.faults.rot_ppm).then(|| {
            self.log.push(SimFaultKind::Rot, offset, len);
            self.rot.next()
        })
    }

    /// Returns the bytes of a block at `offset` that a power loss replaces: all `len`, or a part
    /// that wraps around its end.
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
