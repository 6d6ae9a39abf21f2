//! Model of a flash translation layer: the flash writes that a host's writes cause.

mod mapping;

use std::sync::{Arc, Mutex, PoisonError};

use nvme_driver::Nanos;
use nvme_emu::{Media, MediaDone, MediaKind, MediaOp};

use self::mapping::{Mapping, PAGE_BYTES};

/// Flash below a [`FtlMedia`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FtlOptions {
    /// Flash beyond the capacity of the medium, as a percentage of it. Some blocks are always
    /// added: one per handle, and three for garbage collection.
    pub over_provisioning_percent: u32,
    /// Bytes of an erase block, rounded up to pages of 4096. With placement handles it is the
    /// reclaim unit.
    pub block_bytes: u32,
    /// Placement handles ([`MediaOp::placement`]): writes with different handles go to different
    /// blocks, until garbage collection (the type "initially isolated").
    pub handles: u16,
}

impl Default for FtlOptions {
    fn default() -> Self {
        Self { over_provisioning_percent: 7, block_bytes: 1 << 20, handles: 1 }
    }
}

/// Totals of written data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FtlCounters {
    /// Bytes written by the host.
    pub host_bytes: u64,
    /// Bytes of programmed pages: for the host, and by garbage collection.
    pub media_bytes: u64,
    /// Number of block erasures.
    pub erases: u64,
}

impl FtlCounters {
    /// Returns the difference to `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            host_bytes: self.host_bytes - before.host_bytes,
            media_bytes: self.media_bytes - before.media_bytes,
            erases: self.erases - before.erases,
        }
    }

    /// Returns bytes written to flash per byte written by the host; 1 without host writes.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn write_amplification(self) -> f64 {
        match self.host_bytes {
            0 => 1.0,
            host => self.media_bytes as f64 / host as f64,
        }
    }
}

/// Reads the counters of a [`FtlMedia`], even inside a controller.
#[derive(Debug, Clone, Default)]
pub struct FtlMeter(Arc<Mutex<FtlCounters>>);

impl FtlMeter {
    /// Returns the current totals.
    #[must_use]
    pub fn counters(&self) -> FtlCounters {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, counters: FtlCounters) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = counters;
    }
}

/// A medium with the accounting of a flash translation layer: the valid pages of each erase block,
/// the pages that garbage collection moves, the erased blocks. The bytes stay in place in the
/// medium below, and operations take as long as there.
///
/// The flash writes pages of 4096 bytes. A write programs each page that it touches. Deallocating
/// or zeroing a whole page invalidates it. When free blocks run out, the block with the fewest
/// valid pages is collected (greedy). An operation counts when it is submitted; it must be inside
/// the capacity.
#[derive(Debug)]
pub struct FtlMedia {
    inner: Box<dyn Media>,
    mapping: Mapping,
    meter: FtlMeter,
}

impl FtlMedia {
    /// Creates an empty drive with the bytes of `inner`: no page is valid yet. Takes 8 bytes of
    /// memory per page of flash.
    ///
    /// # Panics
    /// Panics if there are more than `u32::MAX` pages (16 TiB).
    #[must_use]
    pub fn new(inner: impl Media + 'static, options: FtlOptions) -> Self {
        let mapping = Mapping::new(inner.capacity_bytes(), options);
        Self { inner: Box::new(inner), mapping, meter: FtlMeter::default() }
    }

    /// Returns a handle to its counters.
    #[must_use]
    pub fn meter(&self) -> FtlMeter {
        self.meter.clone()
    }

    fn account(&mut self, op: &MediaOp) {
        if op.len == 0 {
            return;
        }
        let touched = op.offset / PAGE_BYTES..(op.offset + op.len).div_ceil(PAGE_BYTES);
        let covered = op.offset.div_ceil(PAGE_BYTES)..(op.offset + op.len) / PAGE_BYTES;
        match op.kind {
            MediaKind::Read | MediaKind::Flush => return,
            MediaKind::Write { .. } => {
                self.mapping.counters.host_bytes += op.len;
                touched.for_each(|page| self.mapping.write(page, op.placement));
            }
            MediaKind::Deallocate => covered.for_each(|page| self.mapping.unmap(page)),
            MediaKind::WriteZeroes => {
                for page in touched {
                    if covered.contains(&page) {
                        self.mapping.unmap(page);
                    } else if self.mapping.is_mapped(page) {
                        self.mapping.write(page, op.placement);
                    }
                }
            }
        }
        self.meter.set(self.mapping.counters);
    }
}

impl Media for FtlMedia {
    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    fn granularity_bytes(&self) -> u32 {
        self.inner.granularity_bytes()
    }

    fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone> {
        self.account(&op);
        self.inner.submit(op, now)
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        self.inner.poll(now, done);
    }

    fn next_event(&self) -> Option<Nanos> {
        self.inner.next_event()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn cancel(&mut self) {
        self.inner.cancel();
    }

    fn power_loss(&mut self) {
        self.inner.power_loss();
    }
}

mod tests;
