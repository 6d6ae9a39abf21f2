//! The kernels for GPUs, as PTX that was compiled when the source last changed: the I/O kernel, and
//! in a module of their own those that work on a KV pool.
//!
//! It is committed so that no build needs nvcc; the driver compiles it for the GPU that it finds.
//! It is PTX ISA 8.6, which takes a driver of CUDA 12.7 (r565) or later, and a GPU of compute
//! capability 9.0 or later. The sources also compile for 8.0, but that PTX is not kept.
//! `cargo xtask ptx` makes it anew and checks what the assembler turns it into; a test of this
//! crate fails when it is older than the headers.

/// PTX for compute capability 9.0 and later, with the entry [`ENTRY`].
pub const PTX: &str = include_str!("../ptx/gio_kernel.ptx");

/// What [`PTX`] was made from: the compiler, its flags, and a hash (XXH3, 128 bits) of each source,
/// a line each. The last line is the PTX itself.
pub const SOURCES: &str = include_str!("../ptx/gio_kernel.sources");

/// The hash of all lines of [`SOURCES`] but the first, which it is: 32 hexadecimal digits.
pub const SOURCE_HASH: &str = SOURCES.split_at(32).0;

/// The kernel's name. Its one parameter is a [`gio_uring::abi::Args`], by value.
pub const ENTRY: &str = "gio_kernel";

/// The second module, PTX for compute capability 9.0 and later, with the entries
/// [`SCATTER_GATHER_ENTRY`] and [`PATTERN_ENTRY`].
pub const POOL_PTX: &str = include_str!("../ptx/gio_pool.ptx");

/// What [`POOL_PTX`] was made from, as [`SOURCES`].
pub const POOL_SOURCES: &str = include_str!("../ptx/gio_pool.sources");

/// The kernel that moves objects between staging memory and blocks of a pool. Its one parameter is
/// a [`crate::pool::ScatterGatherArgs`], by value.
pub const SCATTER_GATHER_ENTRY: &str = "gio_scatter_gather";

/// The kernel that makes contents, and checks them. Its one parameter is a
/// [`crate::pool::PatternArgs`], by value.
pub const PATTERN_ENTRY: &str = "gio_pattern";

/// Threads of a block of the I/O kernel, at the most: a warp for each of four queue pairs.
pub const BLOCK_THREADS_MAX: u32 = 128;
