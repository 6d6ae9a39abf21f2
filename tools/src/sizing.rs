//! Sizes of the store and the KV pool, checked against this machine's memory and disk space.

use objstore::{Format, Store, StoreId};
use ripieno_stack::{Executor, HostMemory};

use crate::config::StoreArgs;
use crate::devices::EmuChoice;
use crate::machine;
use crate::model::Shape;
use crate::plan::Plan;
use crate::problem::Problem;
use crate::size::{Size, grouped};

/// Maximum number of adjacent objects of one row on a device, within a group.
const WIDTH_MAX: u64 = 64;
/// Minimum number of groups of a store that has enough files.
const GROUPS_WANTED: u64 = 8;
/// Minimum size of a default pool in bytes, so that it does not fit into the CPU caches.
const POOL_BYTES_MIN: u64 = 64 << 20;
/// Maximum size of a default pool in bytes.
const POOL_BYTES_MAX: u64 = 256 << 20;
/// Memory besides media and pool: queues, tables, the buffers of the plain copy.
const OTHER_BYTES: u64 = 256 << 20;
/// Approximate memory per file in the tables of the store.
const FILE_TABLE_BYTES: u64 = 128;

/// Size of the store, in bytes and files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizing {
    /// Maximum number of files in the store.
    pub(crate) files: u32,
    /// Files per group of the layout.
    pub(crate) group: u32,
    /// Bytes of a file on the devices, including padding.
    pub(crate) file_bytes: u64,
    /// Bytes of each device.
    pub(crate) device_bytes: u64,
    /// Bytes of all blocks of the workload.
    pub(crate) needed_bytes: u64,
    /// Blocks of the KV pool.
    pub(crate) pool_blocks: u32,
    /// Number of files that the workload can fill.
    filled: u64,
}

impl Sizing {
    /// Returns the sizes for `plan`, limited by `--capacity`, on devices with LBAs of `lba_bytes`.
    pub(crate) fn new(args: &StoreArgs, plan: &Plan, lba_bytes: u32) -> Result<Self, Problem> {
        let file_bytes = args.shape.file_bytes(lba_bytes);
        let needed = plan.distinct.max(1);
        let files = args.config.capacity.map_or(needed, |bytes| bytes / file_bytes);
        if files == 0 {
            let asked = args.config.capacity.unwrap_or(0);
            return Err(Problem::new(
                format!(
                    "--capacity {asked} bytes: one block of model {} in {} layers needs \
                     {file_bytes} bytes ({})",
                    args.shape.model,
                    args.shape.layers,
                    Size(file_bytes)
                ),
                format!("ask for {} or more, or for fewer --block-tokens", Size(file_bytes)),
            ));
        }
        let files =
            u32::try_from(files).ok().filter(|&files| files < u32::MAX).ok_or_else(|| {
                Problem::new(
                    format!("a store of {files} blocks is more than the layout can number (2^32)"),
                    "use a smaller --capacity, fewer --requests, or more --block-tokens",
                )
            })?;
        let devices = u64::from(args.devices.count());
        let mut width = WIDTH_MAX;
        while width > 1 && u64::from(files) < GROUPS_WANTED * width * devices {
            width /= 2;
        }
        let group = (width * devices) as u32;
        let format = Format {
            capacity_bytes: Some(u64::from(files) * file_bytes),
            group: Some(group),
            ..Format::new(StoreId([0; 16]), *args.shape)
        };
        let device_bytes = Store::device_bytes(&format, args.devices.count(), lba_bytes)
            .map_err(|error| Problem::new(error.to_string(), ""))?;
        Ok(Self {
            files,
            group,
            file_bytes,
            device_bytes,
            needed_bytes: plan.distinct * file_bytes,
            pool_blocks: args.common.pool_blocks.unwrap_or_else(|| pool_blocks(&args.shape, plan)),
            filled: u64::from(files).min(plan.distinct),
        })
    }

    /// Same as [`Sizing::new`], but a trace without `--capacity` gets half of what is free at most.
    pub(crate) fn fitting(args: &StoreArgs, plan: &Plan, lba_bytes: u32) -> Result<Self, Problem> {
        let emu = args.devices.emu().filter(|_| args.common.trace.is_some());
        let free = match emu.map(EmuChoice::dir) {
            Some(Some(dir)) => machine::disk_available(dir).ok(),
            Some(None) => HostMemory::of_machine().map(|memory| memory.available),
            None => None,
        };
        let needed = plan.distinct.max(1) * args.shape.file_bytes(lba_bytes);
        let mut args = args.clone();
        args.config.capacity = args.config.capacity.or(free.map(|free| needed.min(free / 2)));
        Self::new(&args, plan, lba_bytes)
    }

    /// Returns the bytes that the store may use over all devices, including padding.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        u64::from(self.files) * self.file_bytes
    }

    /// Returns true if the workload fills the whole store.
    pub(crate) fn is_filled(&self) -> bool {
        self.filled == u64::from(self.files)
    }

    /// Returns the bytes of the KV pool.
    pub(crate) fn pool_bytes(&self, args: &StoreArgs) -> u64 {
        args.shape.block_bytes() * u64::from(self.pool_blocks)
    }

    /// Rejects sizes that exceed this machine's memory or disk space; the media of an existing
    /// store have theirs already.
    pub(crate) fn check_machine(&self, args: &StoreArgs, found: bool) -> Result<(), Problem> {
        let data = self.filled * self.file_bytes;
        let tables = u64::from(self.files) * FILE_TABLE_BYTES + OTHER_BYTES;
        // With a GPU the location of the pool is not yet known.
        let pool = match args.executor {
            Executor::Cuda(_) => 0,
            Executor::File | Executor::Host | Executor::Inline => self.pool_bytes(args),
        };
        let dram = args.dram();
        let mut memory = pool.saturating_add(tables).saturating_add(dram);
        let mut parts = vec![
            format!("{} in the KV pool", Size(pool)),
            format!("{} of --dram", Size(dram)),
            format!("{} for tables of {} blocks", Size(tables), grouped(self.files.into())),
        ];
        let emu = args.devices.emu();
        if let Some(directory) = emu.and_then(EmuChoice::dir) {
            let needed = if found { 0 } else { data };
            let hint = "name a directory on a larger file system, or set --capacity or --requests";
            machine::check_disk(directory, directory, needed, hint)?;
        } else if emu.is_some() {
            memory = memory.saturating_add(data);
            parts.push(format!("{} in the store", Size(data)));
        }
        fits(memory, &parts.join(", "))
    }

    /// Rejects a KV pool that exceeds this machine's memory.
    pub(crate) fn check_pool(&self, args: &StoreArgs) -> Result<(), Problem> {
        fits(self.pool_bytes(args), "all of it in the KV pool")
    }
}

/// Checks that this machine has `memory` bytes left for `what`.
pub(crate) fn fits(memory: u64, what: &str) -> Result<(), Problem> {
    machine::check_memory(
        memory,
        || format!("the replay needs about {} of memory ({what})", Size(memory)),
        "give a smaller --capacity (blocks are then evicted), --requests, --pool-blocks or --dram, \
         or keep the bytes in files with --path DIR",
    )
}

fn pool_blocks(shape: &Shape, plan: &Plan) -> u32 {
    let at_least = (POOL_BYTES_MIN / shape.block_bytes()).max(1);
    let at_most = (POOL_BYTES_MAX / shape.block_bytes()).max(1);
    (plan.longest as u64).clamp(at_least, at_most) as u32
}

#[cfg(test)]
mod tests;
