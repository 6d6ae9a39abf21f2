//! Statistics of a store.

use gio_uring::UringCounters;
use kv_catalog::CatalogCounts;
use nvme_driver::Nanos;
use nvme_spec::nvm::Direction;

use crate::data_path::Route;

/// Upper limits of the buckets of [`Durations`], in microseconds: those of the connector for vLLM.
#[rustfmt::skip]
pub const DURATION_LIMITS_US: [u64; 11] = [
    100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000,
];

/// Number and duration of operations that have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Durations {
    /// Number of operations.
    pub count: u64,
    /// Sum of their durations.
    pub sum: Nanos,
    /// Number of operations up to each of the [`DURATION_LIMITS_US`], and above the one before.
    pub buckets: [u64; DURATION_LIMITS_US.len()],
}

impl Durations {
    /// Adds an operation.
    pub fn add(&mut self, took: Nanos) {
        self.count += 1;
        self.sum.0 += took.0;
        if let Some(at) = DURATION_LIMITS_US.iter().position(|limit| took.0 <= limit * 1000) {
            self.buckets[at] += 1;
        }
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

/// Counts of a codec ([`crate::Format::codec`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CodecStats {
    /// Raw bytes that were encoded.
    pub encoded_bytes: u64,
    /// Raw bytes that were decoded.
    pub decoded_bytes: u64,
    /// Blocks that do not fit, and were not stored.
    pub unfit_blocks: u64,
    /// Time to encode layers.
    pub encodes: Durations,
    /// Time to decode layers.
    pub decodes: Durations,
}

/// Counts since a plane was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlaneStats {
    /// The data path.
    pub path: Route,
    /// The executor, and how it runs where that is not the usual way.
    pub executor: &'static str,
    /// Set if blocks are copied through bounce buffers.
    pub is_bounced: bool,
    /// Bytes written to the devices, without padding.
    pub stored_bytes: u64,
    /// Bytes read from the devices, without padding.
    pub retrieved_bytes: u64,
    /// Counts of the DRAM cache.
    pub dram: DramStats,
    /// Counts of the codec.
    pub codec: CodecStats,
    /// Recoveries of the controllers from a timeout or a fault.
    pub recoveries: u64,
    /// Counts of the I/O kernel.
    pub ring: UringCounters,
    /// Layers in flight.
    pub layers_in_flight: u32,
    /// Layers that wait for their turn.
    pub layers_waiting: u32,
    /// Where the time of callers goes.
    pub times: Times,
}

/// Counts of lookups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Lookups {
    /// Calls of `lookup`.
    pub calls: u64,
    /// Blocks that they asked for.
    pub blocks: u64,
    /// Blocks that they found.
    pub hits: u64,
    /// Files that lost their key because reading them failed.
    pub files_lost: u64,
}

/// Counts since the store was opened, and its current contents.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// Counts of the plane.
    pub plane: PlaneStats,
    /// Counts of the files of all namespaces.
    pub files: CatalogCounts,
    /// Bytes that one file takes on the devices, padding included.
    pub file_bytes: u64,
    /// Counts of lookups.
    pub lookups: Lookups,
    /// Bytes written to the journal, padding included.
    pub journal_bytes: u64,
    /// Bytes of deallocate hints that drives accepted.
    pub deallocated_bytes: u64,
    /// Drives that refused a deallocate hint, and get no more.
    pub deallocations_failed: u64,
}

impl StoreStats {
    /// Returns the files that can be written without evicting: also those that wait for the
    /// journal.
    #[must_use]
    pub fn files_free(&self) -> u32 {
        self.files.free + self.files.limbo
    }
}
