//! Queue pairs granted to an executor, and the proof of quiescence that ends a grant.

use std::sync::atomic::{AtomicU64, Ordering};

use nvme_spec::ids::{Nsid, QueueId};

use crate::dma::Place;

/// Format of a command's data pointer (DPTR).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DescriptorMode {
    /// Scatter gather list: any run of bytes per 16-byte entry.
    Sgl {
        /// Bit buckets may be used to discard data of a read.
        bit_bucket: bool,
        /// Granularity of address and length of every block (1 or 4 bytes).
        granularity: u32,
    },
    /// Physical region pages: whole pages after the first entry.
    Prp {
        /// The controller's memory page size in bytes (CC.MPS).
        page_bytes: u32,
    },
}

/// Identity of a grant, unique across all controllers of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantEpoch(u64);

impl GrantEpoch {
    /// Returns an epoch that no earlier grant has.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "every call returns another value")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: only uniqueness matters.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Most placement handles that an executor can use.
pub const PLACEMENTS_MAX: usize = 8;

/// Description of one I/O queue pair for its executor. Plain data, so that it can cross a process
/// boundary one day.
///
/// The memory behind every address stays mapped until the controller takes the grant back, which
/// needs a [`Quiesced`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueGrant {
    /// Identity of this grant, named by the [`Quiesced`] that ends it.
    pub epoch: GrantEpoch,
    /// The queue pair's identifier (the same for SQ and CQ).
    pub qid: QueueId,
    /// Submission queue: `depth` entries of 64 bytes.
    pub sq: Place,
    /// Completion queue: `depth` entries of 16 bytes, zeroed, so the first pass has phase 1.
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
    /// I/O that crosses a multiple of this many LBAs may be slower (NOIOB); 0 = no such boundary.
    pub boundary_lbas: u32,
    /// Largest data transfer of one command in bytes (MDTS and descriptor area considered).
    pub transfer_bytes_max: u32,
    /// Format of data pointers.
    pub descriptor_mode: DescriptorMode,
    /// Number of placement handles in `placement_ids`.
    pub placements: u32,
    /// Placement identifier of each handle, for the DSPEC field of a write.
    pub placement_ids: [u16; PLACEMENTS_MAX],
}

/// Proof that certain grants are no longer in use: no running thread or kernel can ring their
/// doorbells or access their memory.
///
/// The default covers no grant. It suffices for queues that were never granted.
#[derive(Debug, Default)]
pub struct Quiesced(Vec<GrantEpoch>);

impl Quiesced {
    /// Asserts that the executor which held these grants has ended.
    ///
    /// # Safety
    /// No thread and no kernel that holds a grant with one of these epochs may still be running.
    #[must_use]
    #[allow(unsafe_code, reason = "only an executor can know that its threads or kernels ended")]
    pub unsafe fn assert(grants: impl IntoIterator<Item = GrantEpoch>) -> Self {
        Self(grants.into_iter().collect())
    }

    /// Returns whether this proof covers `grant`.
    #[must_use]
    pub fn covers(&self, grant: GrantEpoch) -> bool {
        self.0.contains(&grant)
    }
}
