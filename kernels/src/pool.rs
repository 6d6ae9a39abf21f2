//! The Rust half of `kernels/include/pool/abi.h`: what the kernels of the second PTX module,
//! [`crate::ptx::POOL_PTX`], are given.
//!
//! Each struct exists exactly twice; a test compares them. Every address is the kernel's.

use gio_uring::{ScatterGather, ScatterGatherOp};

/// Bytes that a warp takes at a time.
pub const TILE: u32 = 2048;
/// Threads of a block, at the most.
pub const BLOCK_THREADS_MAX: u32 = 256;
/// [`PatternArgs::found`]: the item is as it should be.
pub const PATTERN_NONE: u64 = u64::MAX;

macro_rules! interface {
    ($(
        $(#[$doc:meta])*
        $name:ident $c:literal $size:literal {
            $( $(#[$field_doc:meta])* $field:ident: $ty:ty, )*
        }
    )*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
            pub struct $name {
                $( $(#[$field_doc])* pub $field: $ty, )*
            }
            const _: () = assert!(size_of::<$name>() == $size);
        )*

        /// Every struct and every field as `(name, size, offset)`, in the order of the header.
        #[cfg(test)]
        fn layout_table() -> Vec<(&'static str, usize, usize)> {
            vec![$(
                ($c, size_of::<$name>(), 0),
                $((
                    concat!($c, ".", stringify!($field)),
                    size_of::<$ty>(),
                    std::mem::offset_of!($name, $field),
                ),)*
            )*]
        }
    };
}

interface! {
    /// What `gio_move` is given: [`ScatterGather`], where each field is documented.
    MoveArgs "gio_move_args" 56 {
        /// As [`ScatterGather::staging`].
        staging: u64,
        /// As [`ScatterGather::staging_row`].
        staging_row: u64,
        /// As [`ScatterGather::rows`].
        rows: u64,
        /// As [`ScatterGather::blocks`].
        blocks: u64,
        /// As [`ScatterGather::block_stride`].
        block_stride: u64,
        /// As [`ScatterGather::row_count`].
        row_count: u32,
        /// As [`ScatterGather::count`].
        count: u32,
        /// As [`ScatterGather::object_bytes`].
        object_bytes: u32,
        /// 0 to the pool, 1 to staging memory.
        way: u32,
    }

    /// Bytes `[offset, offset + len)` of the object with this seed, at an address.
    PatternItem "gio_pattern_item" 24 {
        /// First byte, a multiple of 4.
        at: u64,
        /// The object's seed.
        seed: u64,
        /// Where in the object, a multiple of 8.
        offset: u32,
        /// Length in bytes, a multiple of 4; `offset + len` is below 2^32.
        len: u32,
    }

    /// What `gio_pattern` is given.
    PatternArgs "gio_pattern_args" 32 {
        /// `PatternItem[count]`.
        items: u64,
        /// To check: `u64[count]`, [`PATTERN_NONE`] at first. What differs has the offset of its
        /// first wrong 4-byte word in the upper half, and the word that is there in the lower one.
        found: u64,
        /// Number of items.
        count: u32,
        /// [`TILE`]s of the longest item, rounded up.
        tiles: u32,
        /// 0 fills, 1 poisons, 2 checks.
        mode: u32,
        /// 0.
        reserved: u32,
    }
}

/// [`PatternArgs::mode`]: make the contents.
pub const MODE_FILL: u32 = 0;
/// [`PatternArgs::mode`]: overwrite with what no object holds.
pub const MODE_POISON: u32 = 1;
/// [`PatternArgs::mode`]: compare.
pub const MODE_CHECK: u32 = 2;

impl From<&ScatterGather> for MoveArgs {
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
            way: match moves.op {
                ScatterGatherOp::Scatter => 0,
                ScatterGatherOp::Gather => 1,
            },
        }
    }
}

impl MoveArgs {
    /// Tiles of all objects together: as many warps have something to do. `None` beyond 2^64.
    #[must_use]
    pub fn tiles(&self) -> Option<u64> {
        let each = u64::from(self.object_bytes.div_ceil(TILE));
        (u64::from(self.row_count) * u64::from(self.count)).checked_mul(each)
    }
}

#[cfg(test)]
mod tests;
