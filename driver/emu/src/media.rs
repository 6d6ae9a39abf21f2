//! Storage of a namespace's bytes.
//!
//! A medium moves bytes between itself and [`SgList`] and is independent of NVMe. Like the
//! controller it has no threads, and its caller passes the time.

mod bandwidth;
mod file;
mod gpu_copies;
mod memory;
mod overlay;
mod sim;

use std::fmt;

use nvme_driver::{Clock, CopyError, MonotonicClock, Nanos, wait_until};
use nvme_spec::status::Status;

pub use self::{
    bandwidth::{Bandwidth, BandwidthDial, BandwidthMedia},
    file::{FileMedia, FileOptions},
    memory::MemoryMedia,
    overlay::DataFault,
    sim::{Latency, SimFault, SimFaultKind, SimFaultLog, SimFaults, SimMedia, SimOptions},
};
pub(crate) use self::{gpu_copies::GpuCopies, overlay::Overlay};
use crate::domain::SgList;

/// Stored bytes, read and written by offset.
pub trait Media: Send + fmt::Debug {
    /// Returns the size in bytes, which is constant.
    fn capacity_bytes(&self) -> u64;

    /// Returns the granularity of operations: offsets and lengths are multiples of it (1: any). A
    /// namespace's LBA size must be a multiple, too.
    fn granularity_bytes(&self) -> u32;

    /// Starts an operation. Returns it if it has already finished (fast media); otherwise it is
    /// returned by [`Media::poll`], in any order.
    ///
    /// An operation outside the capacity, or whose memory does not add up to `len`, is returned
    /// with [`MediaError`] before any byte is moved.
    fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone>;

    /// Starts queued operations, and appends those that have finished by `now`.
    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>);

    /// Returns the time at which the next operation in flight finishes, if known.
    fn next_event(&self) -> Option<Nanos>;

    /// Sets whether only the calling thread submits, polls and cancels from now on. That thread
    /// must reset this before it ends. Media that do not benefit may ignore it.
    fn set_exclusive(&mut self, _exclusive: bool) {}

    /// Returns the number of operations in flight. While it is not 0, memory may be accessed.
    fn in_flight(&self) -> usize;

    /// Abandons everything in flight: [`Media::poll`] returns none of it, and a write may be partly
    /// done. Does not block. Operations that cannot be aborted stay in flight until they end, which
    /// takes further polls. For controller resets.
    fn cancel(&mut self);

    /// Simulates a power failure: [`Media::cancel`], plus a possible loss of the volatile cache.
    fn power_loss(&mut self);
}

/// Kinds of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaKind {
    /// Copies stored bytes to the memory of the operation.
    Read,
    /// Stores the memory of the operation.
    Write {
        /// The operation finishes only when the bytes are durable.
        fua: bool,
    },
    /// Makes all finished writes durable. Offset, length and memory are unused.
    Flush,
    /// Marks the range as unneeded. All media in this crate make it read as zeroes.
    Deallocate,
    /// Makes the range read as zeroes.
    WriteZeroes,
}

/// An operation of a medium.
#[derive(Debug)]
pub struct MediaOp {
    /// Identifies the operation in [`MediaDone`].
    pub token: u64,
    /// Kind of operation.
    pub kind: MediaKind,
    /// First byte on the medium.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Memory of a read or write, `len` bytes in total; else empty. Moves to [`MediaDone`].
    pub sg_list: SgList,
    /// Placement handle of a write (Flexible Data Placement); 0 by default.
    pub placement: u16,
    /// Fault that the overlay injects. Media ignore it.
    pub fault: DataFault,
}

impl MediaOp {
    /// Checks that a medium of `capacity` bytes can perform the operation.
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

/// A finished operation.
#[derive(Debug)]
pub struct MediaDone {
    /// Token of the operation.
    pub token: u64,
    /// Result of the operation.
    pub result: Result<(), MediaError>,
    /// Memory of the operation, for reuse: clear the list to release the memory.
    pub sg_list: SgList,
}

/// Failure of an operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The range extends past the end of the medium.
    #[error("{len} bytes at offset {offset} are outside a medium of {capacity} bytes")]
    OutOfRange {
        /// Requested offset.
        offset: u64,
        /// Requested bytes.
        len: u64,
        /// Size of the medium in bytes.
        capacity: u64,
    },
    /// The memory does not match the length of the operation.
    #[error("an operation of {len} bytes came with memory of {memory} bytes")]
    Length {
        /// Requested bytes.
        len: u64,
        /// Bytes of memory.
        memory: u64,
    },
    /// The operating system reported an error (EIO, ENOSPC, ...).
    #[error("{action} failed: {message}")]
    Os {
        /// Failed action.
        action: &'static str,
        /// errno.
        errno: i32,
        /// Message of the operating system.
        message: String,
    },
    /// A drive behind the medium ended its command with an error.
    #[error("{action} failed: {status}")]
    Drive {
        /// Failed action.
        action: &'static str,
        /// The drive's status.
        status: Status,
    },
    /// Permanent failure: a retry would fail as well.
    #[error("{action} failed, as it was told to")]
    Failed {
        /// Failed action.
        action: &'static str,
    },
    /// Memory that only a GPU can address, without a bounce buffer: a medium cannot access it.
    #[error("the memory has no address in this process, and nothing stands for it")]
    Unreachable,
    /// Data could not be copied to or from GPU memory.
    #[error("{0}")]
    Copy(#[from] CopyError),
    /// The GPU is lost: its memory can no longer be accessed.
    #[error("the GPU is lost: {0}")]
    GpuLost(CopyError),
}

impl MediaError {
    pub(crate) fn os(action: &'static str, error: &std::io::Error) -> Self {
        Self::Os { action, errno: error.raw_os_error().unwrap_or(0), message: error.to_string() }
    }
}

/// Real time that dropping a medium waits for operations that cannot be aborted.
const DROP_TIMEOUT: Nanos = Nanos::from_millis(1_000);

/// Polls a cancelled medium until it no longer accesses memory. Returns `false` on timeout.
fn drain(media: &mut impl Media) -> bool {
    let clock = MonotonicClock::default();
    wait_until(&clock, clock.now() + DROP_TIMEOUT, || {
        media.poll(clock.now(), &mut Vec::new());
        media.in_flight() == 0
    })
}

#[cfg(test)]
mod tests;
