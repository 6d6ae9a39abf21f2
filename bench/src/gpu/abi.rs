//! Arguments of the kernel in `bench/ptx`: twins of its `abi.h`, which asserts the same layout.

use std::mem::offset_of;

/// A queue pair from the controller's side.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Queue {
    /// 64-byte entries.
    pub sq: u64,
    /// 16-byte entries, zeroed.
    pub cq: u64,
    /// Submission tail and completion head, 4 bytes each.
    pub doorbells: u64,
    /// Log2 of the entries.
    pub depth_log2: u32,
    /// Identifier.
    pub qid: u32,
    /// Next submission entry.
    pub head: u32,
    /// Next completion entry, free running.
    pub tail: u32,
    /// Result: `ENDED_*`.
    pub ended: u32,
    /// SM that the warp ran on.
    pub sm: u32,
    /// Commands completed.
    pub completed: u64,
    /// Polls of the doorbells.
    pub polls: u64,
    /// Polls that found nothing to do.
    pub idle: u64,
    /// Polls that found no room in the completion queue.
    pub full: u64,
    /// Must be zero.
    pub reserved: [u64; 6],
}

/// The kernel saw the stop word.
pub const ENDED_STOPPED: u32 = 1;
/// The kernel exceeded its time budget.
pub const ENDED_BUDGET: u32 = 2;

/// Arguments of `bench_instant`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct InstantArgs {
    /// `Queue[count]`.
    pub queues: u64,
    /// Pointer to a `u32`: nonzero stops the kernel.
    pub stop: u64,
    /// Time in ns after which the kernel ends in any case.
    pub budget_ns: u64,
    /// Number of queues.
    pub count: u32,
    /// Must be zero.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<Queue>() == 128 && offset_of!(Queue, depth_log2) == 24);
    assert!(offset_of!(Queue, head) == 32 && offset_of!(Queue, completed) == 48);
    assert!(offset_of!(Queue, full) == 72);
    assert!(size_of::<InstantArgs>() == 32 && offset_of!(InstantArgs, count) == 24);
};
