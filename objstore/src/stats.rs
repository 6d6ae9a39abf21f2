//! Statistics of a store.

use nvme_driver::Nanos;
use nvme_spec::nvm::Direction;

use crate::data_path::Route;

/// Number and duration of operations that have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Durations {
    /// Number of operations.
    pub count: u64,
    /// Sum of their durations.
    pub sum: Nanos,
}

impl Durations {
    pub(crate) fn add(&mut self, took: Nanos) {
        self.count += 1;
        self.sum.0 += took.0;
    }
}

/// Where the time of a plane's callers goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Times {
    /// Loads, from [`crate::Plane::begin`] to the end of the last layer.
    pub loads: Durations,
    /// Saves, from [`crate::Plane::begin`] to the end of the last layer.
    pub saves: Durations,
    /// Waits for a layer of a load.
    pub load_waits: Durations,
    /// Waits for a layer of a save.
    pub save_waits: Durations,
    /// Waits to start a layer while as many are in flight as there may be.
    pub slot_waits: Durations,
    /// Flushes of the devices.
    pub flushes: Durations,
}

impl Times {
    pub(crate) fn moved(&mut self, direction: Direction, took: Nanos) {
        let all = if direction == Direction::Read { &mut self.loads } else { &mut self.saves };
        all.add(took);
    }

    pub(crate) fn waited(&mut self, direction: Direction, took: Nanos) {
        let is_load = direction == Direction::Read;
        let all = if is_load { &mut self.load_waits } else { &mut self.save_waits };
        all.add(took);
    }
}

/// Counts of the DRAM cache ([`crate::StoreOptions::dram`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DramStats {
    /// Retrieved blocks found in the cache: they are copied.
    pub hits: u64,
    /// Retrieved blocks not found in the cache: they are read from the devices.
    pub misses: u64,
    /// Bytes retrieved from the cache.
    pub retrieved_bytes: u64,
    /// Blocks in the cache now.
    pub blocks: u32,
    /// Blocks evicted from the cache.
    pub evictions: u64,
    /// Bytes prefetched from the devices.
    pub prefetched_bytes: u64,
    /// Prefetched bytes that were evicted or overwritten before any retrieval.
    pub wasted_bytes: u64,
}

/// Counts since the store was opened, and its current contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// The data path.
    pub path: Route,
    /// Files in all.
    pub files: u32,
    /// Free files.
    pub files_free: u32,
    /// Runs of adjacent free files; 1 means no fragmentation.
    pub free_runs: u32,
    /// Files that lookups can find.
    pub files_stored: u32,
    /// Files being written.
    pub files_writing: u32,
    /// Files in use by prefixes, load requests and store requests.
    pub files_referenced: u32,
    /// Bytes that one file takes on the devices, padding included.
    pub file_bytes: u64,
    /// Calls of `lookup`.
    pub lookups: u64,
    /// Blocks that lookups asked for.
    pub blocks_looked_up: u64,
    /// Blocks found by lookups.
    pub blocks_hit: u64,
    /// Files evicted.
    pub evictions: u64,
    /// Files that lost their key because reading them failed.
    pub files_lost: u64,
    /// Bytes written to the devices, without padding.
    pub stored_bytes: u64,
    /// Bytes retrieved from the devices, without padding.
    pub retrieved_bytes: u64,
    /// Counts of the DRAM cache.
    pub dram: DramStats,
    /// Bytes written to the journal, padding included.
    pub journal_bytes: u64,
    /// Bytes of deallocate hints that drives accepted.
    pub deallocated_bytes: u64,
    /// Drives that refused a deallocate hint, and get no more.
    pub deallocations_failed: u64,
    /// Recoveries of the controllers from a timeout or a fault.
    pub recoveries: u64,
    /// NVMe commands of the I/O kernel.
    pub commands: u64,
    /// Submission queue doorbells that it rang.
    pub sq_doorbells: u64,
    /// Completion queue doorbells that it rang.
    pub cq_doorbells: u64,
}
