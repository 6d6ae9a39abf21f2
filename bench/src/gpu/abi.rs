//! What the kernels of `bench/ptx` are given: twins of its `abi.h`, which asserts the same numbers.

use std::mem::offset_of;

/// One queue pair, from the controller's side.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Queue {
    /// 64-byte entries.
    pub sq: u64,
    /// 16-byte entries, zeroed.
    pub cq: u64,
    /// Submission tail and completion head, 4 bytes each.
    pub doorbells: u64,
    /// Entries.
    pub depth_log2: u32,
    /// Identifier.
    pub qid: u32,
    /// Next submission entry.
    pub head: u32,
    /// Next completion entry, free running.
    pub tail: u32,
    /// `ENDED_*`.
    pub ended: u32,
    /// Where it ran.
    pub sm: u32,
    /// Commands.
    pub completed: u64,
    /// Polls of the doorbells.
    pub polls: u64,
    /// Polls that found nothing to do.
    pub idle: u64,
    /// Polls that found no room in the completion queue.
    pub full: u64,
    /// Zero.
    pub reserved: [u64; 6],
}

/// The stop word was seen.
pub const ENDED_STOPPED: u32 = 1;
/// It was not stopped in time.
pub const ENDED_BUDGET: u32 = 2;

/// Of `bench_instant`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct InstantArgs {
    /// `Queue[count]`.
    pub queues: u64,
    /// `u32`: nonzero ends it.
    pub stop: u64,
    /// It ends after this time whatever happens.
    pub budget_ns: u64,
    /// Queues.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// Of `bench_matmul`: c = a * transpose(b).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MatmulArgs {
    /// `bf16[m][k]`.
    pub a: u64,
    /// `bf16[n][k]`.
    pub b: u64,
    /// `bf16[m][n]`.
    pub c: u64,
    /// Rows of c, a multiple of [`TILE`].
    pub m: u32,
    /// Columns of c, a multiple of [`TILE`].
    pub n: u32,
    /// A multiple of 32.
    pub k: u32,
    /// Zero.
    pub reserved: u32,
}

/// Rows and columns of a block of `bench_matmul`.
pub const TILE: u32 = 128;
/// Its threads.
pub const MATMUL_THREADS: u32 = 128;

/// Of `bench_fill`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FillArgs {
    /// `bf16[count]`.
    pub at: u64,
    /// Elements.
    pub count: u64,
    /// Which numbers.
    pub seed: u64,
}

/// Of `bench_stamp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StampArgs {
    /// `u64`: the GPU's clock in ns.
    pub at: u64,
}

/// Of `bench_where`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct WhereArgs {
    /// `u32[sms]`: 1 where a block was.
    pub at: u64,
    /// How long a block stays.
    pub hold_ns: u64,
    /// SMs of the GPU.
    pub sms: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<Queue>() == 128 && offset_of!(Queue, depth_log2) == 24);
    assert!(offset_of!(Queue, head) == 32 && offset_of!(Queue, completed) == 48);
    assert!(offset_of!(Queue, full) == 72);
    assert!(size_of::<InstantArgs>() == 32 && offset_of!(InstantArgs, count) == 24);
    assert!(size_of::<MatmulArgs>() == 40 && offset_of!(MatmulArgs, m) == 24);
    assert!(size_of::<FillArgs>() == 24 && size_of::<StampArgs>() == 8);
    assert!(size_of::<WhereArgs>() == 24 && offset_of!(WhereArgs, sms) == 16);
};
