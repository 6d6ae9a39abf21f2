//! Data faults on top of a medium that itself stays pristine.
#![allow(unsafe_code, reason = "flips bits in memory that a read has just filled")]

use std::collections::HashMap;

use nvme_driver::Nanos;

use super::{Media, MediaDone, MediaKind, MediaOp};
use crate::{domain::SgList, random::SplitMix64};

/// Silent fault of the data of an operation, which reports success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DataFault {
    /// No fault.
    #[default]
    None,
    /// A write stores only its first bytes.
    Torn {
        /// Number of bytes stored.
        keep_bytes: u64,
    },
    /// A write goes elsewhere: `delta_bytes` further on, wrapping around the end.
    Misdirected {
        /// Distance; may be negative.
        delta_bytes: i64,
    },
    /// A read returns some flipped bits.
    Corrupt {
        /// Seed of their positions.
        seed: u64,
    },
}

/// A medium with [`DataFault`]s. Costs one comparison for an operation without one.
#[derive(Debug)]
pub struct Overlay {
    inner: Box<dyn Media>,
    /// Reads in flight that will be corrupted.
    corrupt: HashMap<u64, u64>,
}

impl Overlay {
    /// Wraps `inner`.
    #[must_use]
    pub fn new(inner: Box<dyn Media>) -> Self {
        Self { inner, corrupt: HashMap::new() }
    }

    /// Applies a write's fault. Returns `false` if nothing of the operation remains.
    fn apply(op: &mut MediaOp, capacity: u64) -> bool {
        match op.fault {
            DataFault::Torn { keep_bytes } => {
                op.len = op.len.min(keep_bytes);
                op.sg_list.truncate(op.len);
                op.len > 0
            }
            DataFault::Misdirected { delta_bytes } => {
                let room = i128::from(capacity.saturating_sub(op.len));
                let to = i128::from(op.offset) + i128::from(delta_bytes);
                // There are `room + 1` positions; the remainder is one of them.
                op.offset = u64::try_from(to.rem_euclid(room + 1)).unwrap_or(0);
                true
            }
            DataFault::None | DataFault::Corrupt { .. } => true,
        }
    }

    fn finish(&mut self, done: &MediaDone) {
        if let Some(seed) = self.corrupt.remove(&done.token)
            && done.result.is_ok()
        {
            flip(&done.sg_list, seed);
        }
    }
}

/// Flips one to eight bits of the read data.
fn flip(sg_list: &SgList, seed: u64) {
    let mut rng = SplitMix64::new(seed, 0);
    for _ in 0..=rng.below(8) {
        let mut at = rng.below(sg_list.bytes());
        for entry in sg_list.as_slice() {
            if at < entry.len as u64 {
                if let Some(host) = entry.host {
                    // SAFETY: inside an entry, whose memory `sg_list` keeps.
                    unsafe {
                        let byte = host.add(usize::try_from(at).unwrap_or(0));
                        byte.write(byte.read() ^ (1 << rng.below(8)));
                    }
                }
                break;
            }
            at -= entry.len as u64;
        }
    }
}

impl Media for Overlay {
    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    fn granularity_bytes(&self) -> u32 {
        self.inner.granularity_bytes()
    }

    #[inline]
    fn submit(&mut self, mut op: MediaOp, now: Nanos) -> Option<MediaDone> {
        if op.fault == DataFault::None {
            return self.inner.submit(op, now);
        }
        // An invalid operation is rejected as it would be without the fault.
        if let Err(error) = op.check(self.capacity_bytes()) {
            return Some(op.done(Err(error)));
        }
        match (op.kind, op.fault) {
            (MediaKind::Read, DataFault::Corrupt { seed }) => {
                self.corrupt.insert(op.token, seed);
            }
            (MediaKind::Write { .. }, _) if !Self::apply(&mut op, self.capacity_bytes()) => {
                return Some(op.done(Ok(())));
            }
            _ => {}
        }
        let done = self.inner.submit(op, now)?;
        self.finish(&done);
        Some(done)
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        let before = done.len();
        self.inner.poll(now, done);
        if !self.corrupt.is_empty() {
            done[before..].iter().for_each(|done| self.finish(done));
        }
    }

    fn next_event(&self) -> Option<Nanos> {
        self.inner.next_event()
    }

    fn set_exclusive(&mut self, exclusive: bool) {
        self.inner.set_exclusive(exclusive);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn cancel(&mut self) {
        self.inner.cancel();
        self.corrupt.clear();
    }

    fn power_loss(&mut self) {
        self.inner.power_loss();
        self.corrupt.clear();
    }
}
