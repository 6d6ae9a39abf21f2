//! What a store reports about itself.

use std::fmt;

/// The route data takes between SSD and the engine's KV memory (decision 7). It is a value that
/// the store reports, never a silent fallback.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Path {
    /// SSD to GPU memory and back, peer to peer.
    Direct,
    /// SSD to pinned host memory, copied from and to the GPU.
    Staged,
    /// SSD to host memory; there is no GPU.
    Host,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Host => "host",
        })
    }
}

/// What memory of this process beside the devices did ([`crate::StoreOptions::dram_bytes`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DramStats {
    /// Blocks of retrievals that were there: they are copied.
    pub hits: u64,
    /// Blocks of retrievals that were not: the devices are asked.
    pub misses: u64,
    /// Bytes that were retrieved from there.
    pub retrieved_bytes: u64,
    /// Blocks that are there now.
    pub blocks: u32,
    /// Blocks that went for others.
    pub evictions: u64,
    /// Bytes that were read from the devices ahead of time.
    pub prefetched_bytes: u64,
    /// Of these, bytes that went for others, or were written anew, before anybody retrieved them.
    pub wasted_bytes: u64,
    /// Blocks that are only there now, or are being copied there to be: no device has them yet.
    pub dirty: u32,
    /// Bytes that were written to the devices from there.
    pub written_back_bytes: u64,
    /// Bytes that were dropped before any device got them.
    pub spared_bytes: u64,
}

/// Counts since the store was opened, and what it holds now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// The route of the data.
    pub path: Path,
    /// Files in all.
    pub files: u32,
    /// Files that hold nothing.
    pub files_free: u32,
    /// Runs of neighbours that the free files form; 1 is not fragmented at all.
    pub free_runs: u32,
    /// Files that lookups can find.
    pub files_stored: u32,
    /// Files that are being written.
    pub files_writing: u32,
    /// Files in use by prefixes, transfers and writings.
    pub files_referenced: u32,
    /// Bytes that one file takes on the devices, padding included.
    pub file_bytes: u64,
    /// Calls of `lookup`.
    pub lookups: u64,
    /// Blocks that lookups asked for.
    pub blocks_looked_up: u64,
    /// Blocks that they found.
    pub blocks_hit: u64,
    /// Files that made room for others.
    pub evictions: u64,
    /// Files that lost their key because reading them failed.
    pub files_lost: u64,
    /// Bytes written to the devices, without padding.
    pub stored_bytes: u64,
    /// Bytes retrieved from the devices, without padding.
    pub retrieved_bytes: u64,
    /// What was retrieved without them.
    pub dram: DramStats,
    /// Bytes written to the journal, padding included.
    pub journal_bytes: u64,
    /// Bytes that drives were told are not needed.
    pub deallocated_bytes: u64,
    /// Drives that refused that, and are not told any more.
    pub deallocations_failed: u64,
    /// Times the controllers were recovered from a timeout or a fault.
    pub recoveries: u64,
    /// NVMe commands of the I/O kernel.
    pub commands: u64,
    /// Submission queue doorbells it rang.
    pub sq_doorbells: u64,
    /// Completion queue doorbells it rang.
    pub cq_doorbells: u64,
}
