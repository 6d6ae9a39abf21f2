#![allow(unsafe_code, reason = "calls into the C++ half of this crate")]
//! Bindings to the C++ half: the kernels compiled for host threads.

use gio_uring::abi::Args;

/// A command was submitted or completed, or an operation rejected (`GIO_RUN_MOVED`).
pub(crate) const RUN_MOVED: u32 = 1;
/// Nothing is in progress; only a new submission changes that (`GIO_RUN_IDLE`).
pub(crate) const RUN_IDLE: u32 = 2;
/// The kernel was stopped and has finished (`GIO_RUN_FINISHED`).
pub(crate) const RUN_FINISHED: u32 = 4;

unsafe extern "C" {
    fn gio_host_run(args: *const Args, first: u32, count: u32) -> u32;
    /// Runs a whole launch of `gio_scatter_gather` with `threads` threads.
    #[cfg(test)]
    pub(crate) fn gio_host_scatter_gather(
        args: *const crate::pool::ScatterGatherArgs,
        threads: u32,
    );
    /// Runs a whole launch of `gio_pattern` with `threads` threads.
    #[cfg(test)]
    pub(crate) fn gio_host_pattern(args: *const crate::pool::PatternArgs, threads: u32);

    /// Returns the CRC-32C of `bytes` bytes at `at`, computed as by a GPU warp (0), with a lookup
    /// table (1), the CRC instruction (2), wide products (3), or the best available way.
    #[cfg(test)]
    pub(crate) fn gio_host_crc32c(at: u64, bytes: u32, how: u32) -> u32;
    /// Returns the CRC-32C of an object.
    pub(crate) fn gio_host_checksum(at: u64, bytes: u32) -> u32;

    /// Writes bytes `[byte, byte + len)` of the object with this seed to `at`.
    pub(crate) fn gio_host_fill(at: u64, seed: u64, byte: u64, len: u64);
    /// Writes a pattern that no object contains to `at`.
    pub(crate) fn gio_host_poison(at: u64, len: u64);
    /// Compares `at` with bytes `[byte, byte + len)` of the object; reports the first difference.
    pub(crate) fn gio_host_check(
        at: u64,
        seed: u64,
        byte: u64,
        len: u64,
        first: *mut u64,
        found: *mut u32,
    ) -> bool;
}

/// Runs warps `first .. first + count` for a few rounds each.
///
/// # Safety
/// `args` and everything it points to satisfy [`gio_uring::IoExecutor::start`], and no other thread
/// runs one of these warps at the same time.
pub(crate) unsafe fn run(args: &Args, first: u32, count: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { gio_host_run(args, first, count) }
}
