//! Where the bytes of a namespace live.
//!
//! A medium moves bytes between itself and [`SgList`] and knows nothing of NVMe. It is driven like
//! the controller: it has no threads, and is told the time.

mod bandwidth;
mod file;
mod ftl;
mod gpu_copies;
mod memory;
mod overlay;
mod sim;

use std::fmt;

use nvme_driver::{Clock, CopyError, MonotonicClock, Nanos, wait_until};

pub use self::{
    bandwidth::{Bandwidth, BandwidthDial, BandwidthMedia},
    file::{FileMedia, FileOptions},
    ftl::{FtlCounters, FtlMedia, FtlMeter, FtlOptions},
    memory::MemoryMedia,
    overlay::DataFault,
    sim::{Latency, SimFault, SimFaultKind, SimFaultLog, SimFaults, SimMedia, SimOptions},
};
pub(crate) use self::{gpu_copies::GpuCopies, overlay::Overlay};
use crate::domain::SgList;

/// Stored bytes, read and written by offset.
pub trait Media: Send + fmt::Debug {
    /// Size in bytes. It does not change.
    fn capacity_bytes(&self) -> u64;

    /// Offsets and lengths of operations are multiples of this (1: anything goes). A namespace's
    /// LBA size must be one too.
    fn granularity_bytes(&self) -> u32;

    /// Starts an operation. Given back at once when it is already finished (fast media); else it
    /// comes out of [`Media::poll`], in any order.
    ///
    /// An operation outside the capacity, or whose memory does not add up to `len`, comes back with
    /// [`MediaError`] and no byte moved.
    fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone>;

    /// Starts what was queued, and appends what has finished by `now`.
    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>);

    /// When the next operation in flight will finish, if that is known.
    fn next_event(&self) -> Option<Nanos>;

    /// Says whether from now on the calling thread alone submits, polls and cancels. It is the
    /// thread that says so, and that takes it back before it ends. Media that gain nothing by it
    /// need not listen.
    fn set_exclusive(&mut self, _exclusive: bool) {}

    /// Operations in flight: while there are any, memory may be touched.
    fn in_flight(&self) -> usize;

    /// Gives up everything in flight: nothing of it comes out of [`Media::poll`], and a write may
    /// have happened in part. Returns at once. What cannot be called back is in flight until it has
    /// ended, which takes further polls. For controller resets.
    fn cancel(&mut self);

    /// Power fails now: as [`Media::cancel`], and what a volatile cache holds may be lost.
    fn power_loss(&mut self);
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaKind {
    /// Stored bytes into the memory of the operation.
    Read,
    /// The memory of the operation into store.
    Write {
        /// Not finished before the bytes are where power loss cannot reach them.
        fua: bool,
    },
    /// Makes all finished writes permanent. Offset, length and memory are unused.
    Flush,
    /// The range is no longer needed. Every medium here makes it read as zeroes.
    Deallocate,
    /// The range reads as zeroes afterwards.
    WriteZeroes,
}

/// One operation.
#[derive(Debug)]
pub struct MediaOp {
    /// Comes back in [`MediaDone`].
    pub token: u64,
    /// What to do.
    pub kind: MediaKind,
    /// First byte on the medium.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Memory of a read or write, `len` bytes together; else empty. Travels to [`MediaDone`].
    pub sg_list: SgList,
    /// Placement handle of a write (Flexible Data Placement). Writes that name none have 0.
    pub placement: u16,
    /// What the overlay does wrong with this operation. Media ignore it.
    pub fault: DataFault,
}

impl MediaOp {
    /// Whether the operation is one that a medium of `capacity` bytes can do.
    pub(crate) fn check(&self, capacity: u64) -> Result<(), MediaError> {
        if self.kind == MediaKind::Flush {
            return Ok(());
        }
        if self.offset.checked_add(self.len).is_none_or(|end| end > capacity) {
            return Err(MediaError::OutOfRange { offset: self.offset, len: self.len, capacity });
        }
        let moves = matches!(self.kind, MediaKind::Read | MediaKind::Write { .. });
        if moves && self.sg_list.bytes() != self.len {
            return Err(MediaError::Length { len: self.len, memory: self.sg_list.bytes() });
        }
        if moves && self.sg_list.lacks_bounce() {
            return Err(MediaError::Unreachable);
        }
        Ok(())
    }

    pub(crate) fn done(self, result: Result<(), MediaError>) -> MediaDone {
        MediaDone { token: self.token, result, sg_list: self.sg_list }
    }
}

/// One finished operation.
#[derive(Debug)]
pub struct MediaDone {
    /// The operation's.
    pub token: u64,
    /// How it went.
    pub result: Result<(), MediaError>,
    /// The operation's, for reuse: clear them to let go of the memory.
    pub sg_list: SgList,
}

/// An operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// Past the end of the medium.
    #[error("{len} bytes at offset {offset} are outside a medium of {capacity} bytes")]
    OutOfRange {
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes there are.
        capacity: u64,
    },
    /// The memory given is not as long as the operation.
    #[error("an operation of {len} bytes came with memory of {memory} bytes")]
    Length {
        /// Bytes asked for.
        len: u64,
        /// Bytes of memory.
        memory: u64,
    },
    /// The operating system failed it (EIO, ENOSPC ...).
    #[error("{action} failed: {message}")]
    Os {
        /// What was tried.
        action: &'static str,
        /// The operating system's number for the error.
        errno: i32,
        /// The operating system's words for it.
        message: String,
    },
    /// It failed for good: the same again would fail as well.
    #[error("{action} failed, as it was told to")]
    Failed {
        /// What was tried.
        action: &'static str,
    },
    /// Memory that only a GPU addresses, with nothing in between: a medium cannot move it.
    #[error("the memory has no address in this process, and nothing stands for it")]
    Unreachable,
    /// Data did not get to a GPU's memory, or from there.
    #[error("{0}")]
    Copy(#[from] CopyError),
    /// The GPU is lost: no data will get to its memory any more, or from there.
    #[error("the GPU is lost: {0}")]
    GpuLost(CopyError),
}

impl MediaError {
    pub(crate) fn os(action: &'static str, error: &std::io::Error) -> Self {
        Self::Os { action, errno: error.raw_os_error().unwrap_or(0), message: error.to_string() }
    }
}

/// How long the end of a medium waits for what cannot be called back, in the machine's time.
const DROP_TIMEOUT: Nanos = Nanos::from_millis(1_000);

/// Polls a cancelled medium until it touches no memory any more; `false`: it took too long.
fn drain(media: &mut impl Media) -> bool {
    let clock = MonotonicClock::default();
    wait_until(&clock, clock.now() + DROP_TIMEOUT, || {
        media.poll(clock.now(), &mut Vec::new());
        media.in_flight() == 0
    })
}

#[cfg(test)]
mod tests;
