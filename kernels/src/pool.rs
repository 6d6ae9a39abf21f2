//! Arguments of the kernels in the second PTX module, [`crate::ptx::POOL_PTX`]: the Rust half of
//! `kernels/include/pool/abi.h`. All addresses are the kernel's.

use gio_uring::{ScatterGather, ScatterGatherOp};

#[allow(
    clippy::all,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    dead_code,
    missing_docs,
    non_camel_case_types,
    rustdoc::all,
    reason = "bindgen's words, and the header's"
)]
mod generated;

pub use generated::{
    GIO_GATHER as GATHER, GIO_PATTERN_CHECK as MODE_CHECK, GIO_PATTERN_FILL as MODE_FILL,
    GIO_PATTERN_POISON as MODE_POISON, GIO_POOL_THREADS_MAX as BLOCK_THREADS_MAX,
    GIO_SCATTER as SCATTER, GIO_TILE as TILE, gio_pattern_args as PatternArgs,
    gio_pattern_item as PatternItem, gio_scatter_gather_args as ScatterGatherArgs,
};

/// [`PatternArgs::found`] of an item without difference. (bindgen takes the header's for an `i32`.)
pub const PATTERN_NONE: u64 = u64::MAX;

impl From<&ScatterGather> for ScatterGatherArgs {
    fn from(moves: &ScatterGather) -> Self {
        Self {
            staging: moves.staging.0,
            staging_row: moves.staging_row,
            rows: moves.rows.0,
            blocks: moves.blocks.0,
            block_stride: moves.block_stride,
            row_count: moves.row_count,
            count: moves.count,
            object_bytes: moves.object_bytes,
            direction: match moves.op {
                ScatterGatherOp::Scatter => SCATTER,
                ScatterGatherOp::Gather => GATHER,
            },
            checksums: moves.checksums.map_or(0, |found| found.values.0),
            status: moves.checksums.map_or(0, |found| found.status.0),
            errors: moves.checksums.map_or(0, |found| found.errors.0),
            staging_blocks: moves.staging_blocks.map_or(0, |blocks| blocks.0),
        }
    }
}

impl ScatterGatherArgs {
    /// Returns the number of tiles of all objects, the maximum of useful warps. `None` beyond 2^64.
    #[must_use]
    pub fn tiles(&self) -> Option<u64> {
        let each = u64::from(self.object_bytes.div_ceil(TILE));
        (u64::from(self.row_count) * u64::from(self.count)).checked_mul(each)
    }
}

#[cfg(test)]
mod tests;
