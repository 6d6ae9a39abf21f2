//! Arguments of the kernels in `bench/ptx`: twins of its `abi.h`, which asserts the same layout.

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

/// Arguments of `bench_matmul`: c = a * transpose(b).
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
    /// Inner dimension, a multiple of 32.
    pub k: u32,
    /// Must be zero.
    pub reserved: u32,
}

/// Rows and columns of a block of `bench_matmul`.
pub const TILE: u32 = 128;
/// Threads per block of `bench_matmul`.
pub const MATMUL_THREADS: u32 = 128;

/// Arguments of `bench_fill`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FillArgs {
    /// `bf16[count]`.
    pub at: u64,
    /// Number of elements.
    pub count: u64,
    /// Seed of the contents.
    pub seed: u64,
}

/// Arguments of `bench_stamp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StampArgs {
    /// Pointer to a `u64`: the GPU's clock in ns.
    pub at: u64,
}

/// Arguments of `bench_where`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct WhereArgs {
    /// `u32[sms]`: set to 1 for each SM that ran a block.
    pub at: u64,
    /// Duration of a block in ns.
    pub hold_ns: u64,
    /// SMs of the GPU.
    pub sms: u32,
    /// Must be zero.
    pub reserved: u32,
}

/// Arguments of `bench_crc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CrcArgs {
    /// Object 0.
    pub base: u64,
    /// `u32[warps * objects]`.
    pub out: u64,
    /// Bytes of an object, a multiple of 16.
    pub bytes: u32,
    /// Objects of a warp.
    pub objects: u32,
    /// Passes of a warp over its objects.
    pub repeats: u32,
    /// Number of warps.
    pub warps: u32,
}

/// Arguments of `bench_read`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ReadArgs {
    /// A zero `u64` at a multiple of `stride` for each warp.
    pub base: u64,
    /// `u32[warps]`: average clocks of a read.
    pub out: u64,
    /// Distance of two warps' words in bytes; 0: all warps read the same word.
    pub stride: u32,
    /// Reads of a warp.
    pub turns: u32,
    /// Number of warps.
    pub warps: u32,
    /// Must be zero.
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
    assert!(size_of::<CrcArgs>() == 32 && offset_of!(CrcArgs, bytes) == 16);
    assert!(size_of::<ReadArgs>() == 32 && offset_of!(ReadArgs, stride) == 16);
};
