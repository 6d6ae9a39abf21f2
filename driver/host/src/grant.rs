//! A queue pair lent to an executor, and the token that gives it back.

use nvme_spec::ids::{Nsid, QueueId};

use crate::dma::Place;

/// How a command names its data (DPTR).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DescriptorMode {
    /// Scatter gather list: any run of bytes per 16-byte entry.
    Sgl {
        /// Bit buckets may be used to discard data of a read.
        bit_bucket: bool,
        /// Address and length of every block are multiples of this (1 or 4 bytes).
        granularity: u32,
    },
    /// Physical region pages: whole pages after the first entry.
    Prp {
        /// The controller's memory page size in bytes (CC.MPS).
        page_bytes: u32,
    },
}

/// Everything an executor learns about one I/O queue pair. Plain data: one day it crosses a process
/// boundary.
///
/// The memory behind every address stays mapped until the controller took the grant back, which
/// needs a [`Quiesced`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueGrant {
    /// The queue pair's identifier (SQ and CQ have the same).
    pub qid: QueueId,
    /// Submission queue: `depth` entries of 64 bytes.
    pub sq: Place,
    /// Completion queue: `depth` entries of 16 bytes, zeroed: the first pass has phase 1.
    pub cq: Place,
    /// Submission tail doorbell; `iova` is unused.
    pub sq_doorbell: Place,
    /// Completion head doorbell; `iova` is unused.
    pub cq_doorbell: Place,
    /// One area per submission slot for SGL segments or PRP lists, `descriptor_bytes` each.
    pub descriptors: Place,
    /// Bytes of one descriptor area; a power of two, at most one controller page.
    pub descriptor_bytes: u32,
    /// Entries of each queue, a power of two; at most `depth - 1` commands may be outstanding.
    pub depth: u32,
    /// The namespace this grant may address.
    pub nsid: Nsid,
    /// log2 of the LBA size in bytes.
    pub lba_shift: u8,
    /// Size of the namespace in LBAs.
    pub lbas: u64,
    /// Largest data transfer of one command in bytes (MDTS and descriptor area considered).
    pub transfer_bytes_max: u32,
    /// How data is described.
    pub descriptor_mode: DescriptorMode,
}

/// Proof that nobody touches a set of granted queues any more: no thread or kernel runs that could
/// ring their doorbells or read their memory.
#[derive(Debug)]
pub struct Quiesced(());

impl Quiesced {
    /// States that the executor which held the grants has ended.
    ///
    /// # Safety
    /// No thread and no kernel that was given one of the grants is still running.
    #[must_use]
    #[allow(unsafe_code, reason = "only an executor can know that its threads or kernels ended")]
    pub unsafe fn assert() -> Self {
        Self(())
    }
}
