#![allow(unsafe_code, reason = "calls into the C++ half of this crate")]
//! The C++ half: the kernels as the host runs them.

use gio_uring::abi::Args;

/// Something was submitted, completed or refused (`GIO_RUN_MOVED`).
pub(crate) const RUN_MOVED: u32 = 1;
/// Nothing is in progress: only a new submission changes that (`GIO_RUN_IDLE`).
pub(crate) const RUN_IDLE: u32 = 2;
/// The kernel was stopped and has nothing left to do (`GIO_RUN_FINISHED`).
pub(crate) const RUN_FINISHED: u32 = 4;

unsafe extern "C" {
    fn gio_host_run(args: *const Args, first: u32, count: u32) -> u32;
    /// All of a launch of `gio_scatter_gather` with so many threads.
    #[cfg(test)]
    pub(crate) fn gio_host_scatter_gather(
        args: *const crate::pool::ScatterGatherArgs,
        threads: u32,
    );
    /// All of a launch of `gio_pattern` with so many threads.
    #[cfg(test)]
    pub(crate) fn gio_host_pattern(args: *const crate::pool::PatternArgs, threads: u32);

    /// The CRC-32C of `bytes` bytes at `at`: as a GPU's warp takes it (0), or as processors do, by
    /// a table (1), the instruction for it (2), wide products (3), or the best that there is.
    #[cfg(test)]
    pub(crate) fn gio_host_crc32c(at: u64, bytes: u32, how: u32) -> u32;

    /// Writes bytes `[byte, byte + len)` of the object with this seed to `at`.
    pub(crate) fn gio_host_fill(at: u64, seed: u64, byte: u64, len: u64);
    /// Writes what no object holds to `at`.
    pub(crate) fn gio_host_poison(at: u64, len: u64);
    /// Whether bytes `[byte, byte + len)` of the object are at `at`, else the first difference.
    pub(crate) fn gio_host_check(
        at: u64,
        seed: u64,
        byte: u64,
        len: u64,
        first: *mut u64,
        found: *mut u32,
    ) -> bool;
}

/// Runs warps `first .. first + count`, a few rounds each.
///
/// # Safety
/// `args` and all it points to are as [`gio_uring::IoExecutor::start`] demands, and no other thread
/// runs one of these warps at the same time.
pub(crate) unsafe fn run(args: &Args, first: u32, count: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { gio_host_run(args, first, count) }
}
