// Made by `cargo xtask abi`: do not edit.
// a5140bd6f9e57377470b2c6f3339b377 kernels/include/pool/abi.h
pub const GIO_TILE: u32 = 2048;
pub const GIO_POOL_THREADS_MAX: u32 = 256;
pub const GIO_SCATTER: u32 = 0;
pub const GIO_GATHER: u32 = 1;
pub const GIO_PATTERN_FILL: u32 = 0;
pub const GIO_PATTERN_POISON: u32 = 1;
pub const GIO_PATTERN_CHECK: u32 = 2;
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_scatter_gather_args {
    pub staging: u64,
    pub staging_row: u64,
    pub rows: u64,
    pub blocks: u64,
    pub block_stride: u64,
    pub row_count: u32,
    pub count: u32,
    pub object_bytes: u32,
    pub direction: u32,
    pub checksums: u64,
    pub status: u64,
    pub errors: u64,
    pub staging_blocks: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_scatter_gather_args"][::std::mem::size_of::<gio_scatter_gather_args>() - 88usize];
    ["Alignment of gio_scatter_gather_args"]
        [::std::mem::align_of::<gio_scatter_gather_args>() - 8usize];
    ["Offset of field: gio_scatter_gather_args::staging"]
        [::std::mem::offset_of!(gio_scatter_gather_args, staging) - 0usize];
    ["Offset of field: gio_scatter_gather_args::staging_row"]
        [::std::mem::offset_of!(gio_scatter_gather_args, staging_row) - 8usize];
    ["Offset of field: gio_scatter_gather_args::rows"]
        [::std::mem::offset_of!(gio_scatter_gather_args, rows) - 16usize];
    ["Offset of field: gio_scatter_gather_args::blocks"]
        [::std::mem::offset_of!(gio_scatter_gather_args, blocks) - 24usize];
    ["Offset of field: gio_scatter_gather_args::block_stride"]
        [::std::mem::offset_of!(gio_scatter_gather_args, block_stride) - 32usize];
    ["Offset of field: gio_scatter_gather_args::row_count"]
        [::std::mem::offset_of!(gio_scatter_gather_args, row_count) - 40usize];
    ["Offset of field: gio_scatter_gather_args::count"]
        [::std::mem::offset_of!(gio_scatter_gather_args, count) - 44usize];
    ["Offset of field: gio_scatter_gather_args::object_bytes"]
        [::std::mem::offset_of!(gio_scatter_gather_args, object_bytes) - 48usize];
    ["Offset of field: gio_scatter_gather_args::direction"]
        [::std::mem::offset_of!(gio_scatter_gather_args, direction) - 52usize];
    ["Offset of field: gio_scatter_gather_args::checksums"]
        [::std::mem::offset_of!(gio_scatter_gather_args, checksums) - 56usize];
    ["Offset of field: gio_scatter_gather_args::status"]
        [::std::mem::offset_of!(gio_scatter_gather_args, status) - 64usize];
    ["Offset of field: gio_scatter_gather_args::errors"]
        [::std::mem::offset_of!(gio_scatter_gather_args, errors) - 72usize];
    ["Offset of field: gio_scatter_gather_args::staging_blocks"]
        [::std::mem::offset_of!(gio_scatter_gather_args, staging_blocks) - 80usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_pattern_item {
    pub at: u64,
    pub seed: u64,
    pub offset: u32,
    pub len: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_pattern_item"][::std::mem::size_of::<gio_pattern_item>() - 24usize];
    ["Alignment of gio_pattern_item"][::std::mem::align_of::<gio_pattern_item>() - 8usize];
    ["Offset of field: gio_pattern_item::at"]
        [::std::mem::offset_of!(gio_pattern_item, at) - 0usize];
    ["Offset of field: gio_pattern_item::seed"]
        [::std::mem::offset_of!(gio_pattern_item, seed) - 8usize];
    ["Offset of field: gio_pattern_item::offset"]
        [::std::mem::offset_of!(gio_pattern_item, offset) - 16usize];
    ["Offset of field: gio_pattern_item::len"]
        [::std::mem::offset_of!(gio_pattern_item, len) - 20usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_pattern_args {
    pub items: u64,
    pub found: u64,
    pub count: u32,
    pub tiles: u32,
    pub mode: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_pattern_args"][::std::mem::size_of::<gio_pattern_args>() - 32usize];
    ["Alignment of gio_pattern_args"][::std::mem::align_of::<gio_pattern_args>() - 8usize];
    ["Offset of field: gio_pattern_args::items"]
        [::std::mem::offset_of!(gio_pattern_args, items) - 0usize];
    ["Offset of field: gio_pattern_args::found"]
        [::std::mem::offset_of!(gio_pattern_args, found) - 8usize];
    ["Offset of field: gio_pattern_args::count"]
        [::std::mem::offset_of!(gio_pattern_args, count) - 16usize];
    ["Offset of field: gio_pattern_args::tiles"]
        [::std::mem::offset_of!(gio_pattern_args, tiles) - 20usize];
    ["Offset of field: gio_pattern_args::mode"]
        [::std::mem::offset_of!(gio_pattern_args, mode) - 24usize];
    ["Offset of field: gio_pattern_args::reserved"]
        [::std::mem::offset_of!(gio_pattern_args, reserved) - 28usize];
};
