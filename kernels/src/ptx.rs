//! The GPU kernels as committed PTX: the I/O kernel and, in a separate module, the kernels that
//! work on a KV pool.
//!
//! The PTX is committed so that no build needs nvcc; the driver compiles it for its GPU. It is PTX
//! ISA 8.6, which requires a driver for CUDA 12.7 (r565) or later, and a GPU of compute capability
//! 9.0 or later. The sources also compile for 8.0, but that PTX is not committed. `cargo xtask ptx`
//! regenerates it and checks the assembler's output; a test of this crate fails if it is older than
//! the headers.

/// PTX for compute capability 9.0 and later, with the entry [`ENTRY`].
pub const PTX: &str = include_str!("../ptx/gio_kernel.ptx");

/// Sources of [`PTX`], one per line: the compiler, its flags, and a hash (XXH3, 128 bits) of each
/// source. The last line is the PTX itself.
pub const SOURCES: &str = include_str!("../ptx/gio_kernel.sources");

/// The first line of [`SOURCES`], a hash of all other lines: 32 hexadecimal digits.
pub const SOURCE_HASH: &str = SOURCES.split_at(32).0;

/// The kernel's name. Its only parameter is a [`gio_uring::abi::Args`], by value.
pub const ENTRY: &str = "gio_kernel";

/// The second module, PTX for compute capability 9.0 and later, with the entries
/// [`SCATTER_GATHER_ENTRY`] and [`PATTERN_ENTRY`].
pub const POOL_PTX: &str = include_str!("../ptx/gio_pool.ptx");

/// Sources of [`POOL_PTX`], in the form of [`SOURCES`].
pub const POOL_SOURCES: &str = include_str!("../ptx/gio_pool.sources");

/// Name of the kernel that copies objects between staging memory and blocks of a pool. Its only
/// parameter is a [`crate::pool::ScatterGatherArgs`], by value.
pub const SCATTER_GATHER_ENTRY: &str = "gio_scatter_gather";

/// Name of the kernel that writes and checks generated contents. Its only parameter is a
/// [`crate::pool::PatternArgs`], by value.
pub const PATTERN_ENTRY: &str = "gio_pattern";

/// Maximum threads per block of the I/O kernel: one warp for each of four queue pairs.
pub const BLOCK_THREADS_MAX: u32 = 128;
