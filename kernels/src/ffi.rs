#![allow(unsafe_code, reason = "calls into the C++ half of this crate")]
//! The C++ half: the kernels as the host runs them, and the tables of their structs.

use std::ffi::{CStr, c_char};

use gio_uring::abi::Args;

/// Something was submitted, completed or refused (`GIO_RUN_MOVED`).
pub(crate) const RUN_MOVED: u32 = 1;
/// Nothing is in progress: only a new submission changes that (`GIO_RUN_IDLE`).
pub(crate) const RUN_IDLE: u32 = 2;
/// The kernel was stopped and has nothing left to do (`GIO_RUN_FINISHED`).
pub(crate) const RUN_FINISHED: u32 = 4;

/// A row of `gio_abi_table`.
#[repr(C)]
struct Row {
    name: *const c_char,
    size: u64,
    offset: u64,
}

impl Row {
    fn read(&self) -> (&'static str, usize, usize) {
        // SAFETY: names are string literals.
        let name = unsafe { CStr::from_ptr(self.name) };
        let name = name.to_str().expect("names of fields are ASCII");
        (name, self.size as usize, self.offset as usize)
    }
}

unsafe extern "C" {
    fn gio_host_run(args: *const Args, first: u32, count: u32) -> u32;
    static gio_abi_table: Row;
    static gio_abi_rows: u64;
    static gio_abi_version: u32;
    #[cfg(test)]
    static gio_pool_table: Row;
    #[cfg(test)]
    static gio_pool_rows: u64;
    /// All of a launch of `gio_move` with so many threads.
    #[cfg(test)]
    pub(crate) fn gio_host_move(args: *const crate::pool::MoveArgs, threads: u32);
    /// All of a launch of `gio_pattern` with so many threads.
    #[cfg(test)]
    pub(crate) fn gio_host_pattern(args: *const crate::pool::PatternArgs, threads: u32);

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

/// Gives warps `first .. first + count` a turn each.
///
/// # Safety
/// `args` and all it points to are as [`gio_uring::IoExecutor::start`] demands, and no other thread
/// runs one of these warps at the same time.
pub(crate) unsafe fn run(args: &Args, first: u32, count: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { gio_host_run(args, first, count) }
}

/// Version of the interface that the C++ half was compiled with.
#[must_use]
pub fn abi_version() -> u32 {
    // SAFETY: a constant of src/host/abi_table.cpp.
    unsafe { gio_abi_version }
}

/// Every struct and field of `abi.h` as `(name, size, offset)`, as the C++ compiler lays them out.
/// The twin of [`gio_uring::abi::layout_table`].
#[must_use]
pub fn layout_table() -> Vec<(&'static str, usize, usize)> {
    // SAFETY: src/host/abi_table.cpp defines an array of that many rows and never changes it.
    let rows = unsafe {
        std::slice::from_raw_parts(std::ptr::addr_of!(gio_abi_table), gio_abi_rows as usize)
    };
    rows.iter().map(Row::read).collect()
}

/// The same of `pool/abi.h`.
#[cfg(test)]
pub(crate) fn pool_layout_table() -> Vec<(&'static str, usize, usize)> {
    // SAFETY: src/host/pool.cpp defines an array of that many rows and never changes it.
    let rows = unsafe {
        std::slice::from_raw_parts(std::ptr::addr_of!(gio_pool_table), gio_pool_rows as usize)
    };
    rows.iter().map(Row::read).collect()
}
