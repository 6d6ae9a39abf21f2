//! Queue pairs, the grant of one to an executor, and the proof of quiescence that ends a grant.

use std::sync::atomic::{AtomicU64, Ordering};

use nvme_spec::ids::{Nsid, QueueId};

use crate::{
    cid::DEPTH_MAX,
    dma::{DmaSlice, Place},
};

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
    /// Placement handles of the namespace.
    pub placements: Placements,
}

/// Placement handles that an executor can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placements {
    /// Number of handles.
    pub count: u32,
    /// Placement identifier of each handle, for the DSPEC field of a write.
    pub ids: [u16; PLACEMENTS_MAX],
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

/// The queue of the driver's own blocking calls.
pub(crate) const HOST_QUEUE: QueueId = QueueId(1);

/// Memory of one queue pair. All three slices are page aligned for the controller.
#[derive(Debug, Clone)]
pub struct QueueMemory {
    /// Submission queue of 64-byte entries; its length sets the depth.
    pub sq: DmaSlice,
    /// Completion queue: at least 16 bytes per entry.
    pub cq: DmaSlice,
    /// Descriptor areas: at least 64 bytes per entry.
    pub descriptors: DmaSlice,
}

impl QueueMemory {
    /// Checks the memory of a queue of `depth` entries, at most `entries_max`, for a controller
    /// with pages of `page` bytes. Returns the bytes of one descriptor area.
    pub(crate) fn check(&self, depth: u32, entries_max: u32, page: u32) -> Result<u32, String> {
        check_depth(depth, entries_max)?;
        let named = [("sq", &self.sq), ("cq", &self.cq), ("descriptors", &self.descriptors)];
        for (name, slice) in named {
            let iova = slice.iova();
            if iova.0 % u64::from(page) != 0 {
                return Err(format!("{name} memory at {iova} is not page aligned ({page})"));
            }
        }
        let len = self.cq.len();
        if len < depth as usize * 16 {
            return Err(format!("{len} bytes cannot hold {depth} completions of 16 bytes"));
        }
        let each = (self.descriptors.len() / depth as usize).min(page as usize) as u32;
        if each < 64 {
            return Err(format!("{each} descriptor bytes for each entry; 64 is the least"));
        }
        Ok(1 << each.ilog2())
    }
}

/// Checks that a controller allows queues of `depth` entries.
pub(crate) fn check_depth(depth: u32, entries_max: u32) -> Result<(), String> {
    let max = entries_max.min(DEPTH_MAX);
    if depth.is_power_of_two() && (2..=max).contains(&depth) {
        return Ok(());
    }
    Err(format!("{depth} entries; a power of two from 2 to {max} is possible"))
}

/// A queue pair that can be granted.
#[derive(Debug)]
pub(crate) struct IoQueue {
    pub(crate) memory: QueueMemory,
    pub(crate) depth: u32,
    pub(crate) descriptor_bytes: u32,
    /// The grant held by its executor.
    pub(crate) granted: Option<QueueGrant>,
    /// State on the device.
    pub(crate) device: OnDevice,
}

/// State of a queue on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnDevice {
    /// The queue is usable.
    Live,
    /// Its deletion failed: it is unusable, and the device may still access its memory.
    Stuck,
    /// Deleted, or ended by a reset: the device does not access its memory.
    Absent,
}

/// The step that recovered the granted queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecoveryLevel {
    /// The queues were deleted and recreated.
    Queues,
    /// The controller was reset.
    Controller,
}

/// Result of [`crate::Controller::recover`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovered {
    /// The step that was needed.
    pub level: RecoveryLevel,
    /// Queues that can be granted again: same identifiers, same memory, zeroed.
    pub queues: Vec<QueueId>,
}
