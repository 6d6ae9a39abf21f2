#![allow(unsafe_code, reason = "plays a GPU: reaches memory by the addresses that it is told")]
#![allow(dead_code, reason = "each test file uses its part")]
//! A model of a GPU as a store sees it: memory at addresses that this process cannot use, streams,
//! and copies. Streams advance only in [`Gpu::step`], which [`GpuClock`] calls on every pause, in
//! an order that follows from the seed.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    collections::VecDeque,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use gio_uring::{RawStream, ScatterGather, ScatterGatherOp, StreamError, StreamOps, abi};
use nvme_driver::{
    Clock, CopyDirection, CopyEngine, CopyError, CopyFence, DeviceCopy, DevicePtr, ExternalMemory,
    Nanos,
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

/// Offset of the GPU's addresses from this process's.
const SHIFT: u64 = 1 << 56;
/// The store's own stream.
const OWN: u64 = 1;

/// A computation of an engine in a stream.
pub type Work = Box<dyn FnOnce(&Memory) + Send>;

/// An operation in a stream.
enum Op {
    Write {
        word: DevicePtr,
        value: u32,
    },
    Wait {
        word: DevicePtr,
        value: u32,
    },
    Move(ScatterGather),
    /// Continues once the test opens the gate.
    Gate(u32),
    Work(Work),
}

#[derive(Default)]
struct Stream {
    handle: u64,
    ops: VecDeque<Op>,
}

/// Defect of the GPU.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Defect {
    #[default]
    None,
    /// Moves ignore the block table.
    BlocksInOrder,
    /// Moves do nothing.
    NoMoves,
    /// Moves to staging memory do nothing.
    NoMovesBack,
    /// Objects of the second segment are moved to the place of the first.
    OneRow,
    /// Copies do nothing.
    NoCopies,
    /// Streams accept this many more operations, then none.
    RefusesAfter(u32),
    /// Streams accept waits, but do not wait.
    NoWaits,
}

/// All memory of the GPU, and page-locked memory of this process.
#[derive(Debug, Default)]
pub struct Memory(Mutex<Vec<Allocation>>);

#[derive(Debug, Clone, Copy)]
struct Allocation {
    host: usize,
    len: usize,
}

impl Memory {
    /// Returns the bytes at GPU address `address`. Addresses outside all allocations are words of
    /// the ring, which the executor of these tests has at the same address for host and GPU.
    fn at(&self, address: u64, len: usize) -> *mut u8 {
        let Some(host) = address.checked_sub(SHIFT).map(|host| host as usize) else {
            return std::ptr::with_exposed_provenance_mut(address as usize);
        };
        let known = self.0.lock().unwrap();
        let is_inside = |a: &&Allocation| host >= a.host && host + len <= a.host + a.len;
        let found = known.iter().find(is_inside);
        assert!(found.is_some(), "{len} bytes at {address:#x} are no memory of the GPU");
        std::ptr::with_exposed_provenance_mut(host)
    }

    pub fn read(&self, address: DevicePtr, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: `at` returns valid memory; everything happens on one thread.
        unsafe { bytes.as_mut_ptr().copy_from(self.at(address.0, len), len) };
        bytes
    }

    pub fn write(&self, address: DevicePtr, bytes: &[u8]) {
        // SAFETY: same as in `read`.
        unsafe { self.at(address.0, bytes.len()).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    fn copy(&self, from: u64, to: u64, len: usize) {
        // SAFETY: same as in `read`.
        unsafe { self.at(to, len).copy_from(self.at(from, len), len) };
    }

    fn table<T: Copy>(&self, address: u64, index: u32) -> T {
        let address = address + u64::from(index) * size_of::<T>() as u64;
        // SAFETY: tables lie in the ring's memory, aligned, and have as many entries as the move.
        unsafe { self.at(address, size_of::<T>()).cast::<T>().read_volatile() }
    }
}

struct State {
    streams: Vec<Stream>,
    rng: SmallRng,
    open: u32,
    defect: Defect,
    copies: VecDeque<Vec<DeviceCopy>>,
    submitted: u64,
    done: u64,
    moved: u64,
    enqueued: u64,
}

/// The GPU.
pub struct Gpu {
    pub memory: Memory,
    itself: Weak<Self>,
    state: Mutex<State>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gpu")
    }
}

/// Frees an allocation, and records that.
struct Owner {
    gpu: Arc<Gpu>,
    host: usize,
    len: usize,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.gpu.memory.0.lock().unwrap().retain(|known| known.host != self.host);
        let layout = Layout::from_size_align(self.len, 4096).unwrap();
        // SAFETY: allocated in `Gpu::take` with this layout; nothing finds it any more.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(self.host), layout) };
    }
}

impl Gpu {
    pub fn new(seed: u64) -> Arc<Self> {
        let state = State {
            streams: Vec::with_capacity(8),
            rng: SmallRng::seed_from_u64(seed),
            open: 0,
            defect: Defect::None,
            copies: VecDeque::new(),
            submitted: 0,
            done: 0,
            moved: 0,
            enqueued: 0,
        };
        Arc::new_cyclic(|itself| Self {
            memory: Memory::default(),
            itself: itself.clone(),
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn take(self: &Arc<Self>, len: usize, pinned: bool) -> (ExternalMemory, DevicePtr) {
        let len = len.next_multiple_of(4096);
        // SAFETY: the layout is not empty.
        let host = unsafe { alloc_zeroed(Layout::from_size_align(len, 4096).unwrap()) };
        let (pointer, host) = (NonNull::new(host).unwrap(), host.expose_provenance());
        self.memory.0.lock().unwrap().push(Allocation { host, len });
        let device = DevicePtr(host as u64 + SHIFT);
        let owner = Arc::new(Owner { gpu: self.clone(), host, len });
        // SAFETY: the owner frees it, and accesses go through pointers only.
        let memory =
            unsafe { ExternalMemory::new(pinned.then_some(pointer), Some(device), len, owner) };
        (memory, device)
    }

    /// Allocates GPU memory, and returns its address.
    pub fn alloc(self: &Arc<Self>, len: usize) -> (ExternalMemory, DevicePtr) {
        self.take(len, false)
    }

    /// Allocates page-locked memory of this process.
    pub fn alloc_pinned(self: &Arc<Self>, len: usize) -> ExternalMemory {
        self.take(len, true).0
    }

    /// Returns the number of allocations that were not freed.
    pub fn living(&self) -> usize {
        self.memory.0.lock().unwrap().len()
    }

    /// Returns a stream of the engine.
    pub fn stream(&self, number: u64) -> RawStream {
        // SAFETY: streams exist as long as the GPU.
        unsafe { RawStream::new(OWN + number) }
    }

    pub fn break_it(&self, defect: Defect) {
        self.state().defect = defect;
    }

    /// Returns the number of objects moved by streams.
    pub fn moved(&self) -> u64 {
        self.state().moved
    }

    /// Returns the number of operations that streams accepted.
    pub fn enqueued(&self) -> u64 {
        self.state().enqueued
    }

    fn push(&self, stream: RawStream, op: Op) -> Result<(), StreamError> {
        let mut state = self.state();
        if let Defect::RefusesAfter(left) = &mut state.defect {
            match left.checked_sub(1) {
                Some(less) => *left = less,
                None => return Err(StreamError { cause: "CUDA_ERROR_LAUNCH_FAILED".into() }),
            }
        }
        state.enqueued += 1;
        let handle = stream.handle();
        if !state.streams.iter().any(|stream| stream.handle == handle) {
            state.streams.push(Stream { handle, ops: VecDeque::with_capacity(64) });
        }
        let found = state.streams.iter_mut().find(|stream| stream.handle == handle);
        found.unwrap().ops.push_back(op);
        Ok(())
    }

    /// Enqueues work of the engine.
    pub fn enqueue(&self, stream: RawStream, work: impl FnOnce(&Memory) + Send + 'static) {
        self.push(stream, Op::Work(Box::new(work))).unwrap();
    }

    /// Holds up the stream until [`Gpu::open`] is called with `gate` or more.
    pub fn gate(&self, stream: RawStream, gate: u32) {
        self.push(stream, Op::Gate(gate)).unwrap();
    }

    pub fn open(&self, gate: u32) {
        self.state().open = gate;
    }

    /// Returns true if all streams are empty.
    pub fn is_idle(&self) -> bool {
        self.state().streams.iter().all(|stream| stream.ops.is_empty())
    }

    /// Returns true if this stream is empty.
    pub fn is_past(&self, stream: RawStream) -> bool {
        let state = self.state();
        let mut streams = state.streams.iter();
        streams.find(|s| s.handle == stream.handle()).is_none_or(|s| s.ops.is_empty())
    }

    /// Advances some of the streams, if they can.
    pub fn step(&self) {
        let mut state = self.state();
        let count = state.streams.len();
        if count == 0 {
            return;
        }
        let first = state.rng.random_range(0..count);
        for at in 0..count {
            for _ in 0..state.rng.random_range(0..4) {
                let (open, defect) = (state.open, state.defect);
                let ops = &mut state.streams[(first + at) % count].ops;
                let Some(op) = ops.pop_front() else { break };
                if let Err(op) = self.carry_out(op, open, defect) {
                    ops.push_front(op);
                    break;
                }
            }
        }
    }

    /// Executes one operation; returns it if it must wait.
    fn carry_out(&self, op: Op, open: u32, defect: Defect) -> Result<(), Op> {
        match op {
            Op::Write { word, value } => {
                // SAFETY: a word of the ring, which the store keeps until the stream is past it.
                unsafe { self.memory.at(word.0, 4).cast::<u32>().write_volatile(value) };
            }
            Op::Wait { word, value } => {
                let found: u32 = self.memory.table(word.0, 0);
                if defect != Defect::NoWaits && found.wrapping_sub(value).cast_signed() < 0 {
                    return Err(op);
                }
            }
            Op::Gate(gate) if gate > open => return Err(op),
            Op::Gate(_) => {}
            Op::Move(moves) => self.carry_objects(&moves, defect),
            Op::Work(work) => work(&self.memory),
        }
        Ok(())
    }

    /// Does what [`ScatterGather`] promises, object by object.
    fn carry_objects(&self, moves: &ScatterGather, defect: Defect) {
        let back = moves.op == ScatterGatherOp::Gather;
        if defect == Defect::NoMoves || back && defect == Defect::NoMovesBack {
            return;
        }
        for row in 0..moves.row_count {
            for position in 0..moves.count {
                let staged = moves.staging_blocks.map(|at| self.memory.table(at.0, position));
                let object = u64::from(staged.unwrap_or(position)) * u64::from(moves.object_bytes);
                let staged = moves.staging.0 + u64::from(row) * moves.staging_row + object;
                let block: u32 = match defect {
                    Defect::BlocksInOrder => position,
                    _ => self.memory.table(moves.blocks.0, position),
                };
                let row = if defect == Defect::OneRow { 0 } else { row };
                let base: u64 = self.memory.table(moves.rows.0, row);
                let in_pool = base + u64::from(block) * moves.block_stride;
                let len = moves.object_bytes as usize;
                match moves.op {
                    ScatterGatherOp::Scatter => self.memory.copy(staged, in_pool, len),
                    ScatterGatherOp::Gather => self.memory.copy(in_pool, staged, len),
                }
                if let Some(sums) = &moves.checksums {
                    let at = u64::from(row * moves.count + position);
                    let sum = crc32c::crc32c(&self.memory.read(DevicePtr(in_pool), len));
                    if back {
                        let value = DevicePtr(sums.values.0 + 4 * at);
                        self.memory.write(value, &sum.to_ne_bytes());
                    } else if sum != self.memory.table::<u32>(sums.values.0, at as u32) {
                        let status = DevicePtr(sums.status.0 + 4 * u64::from(position));
                        self.memory.write(status, &abi::STATUS_CHECKSUM.to_ne_bytes());
                        let errors: u64 = self.memory.table(sums.errors.0, 0);
                        self.memory.write(sums.errors, &(errors + 1).to_ne_bytes());
                    }
                }
            }
        }
    }
}

// SAFETY: streams do what is enqueued, one operation after another, on the thread that steps.
unsafe impl StreamOps for Gpu {
    fn own_stream(&self) -> RawStream {
        self.stream(0)
    }

    fn host_memory(&self, len: usize) -> Result<ExternalMemory, StreamError> {
        let found = self.itself.upgrade();
        Ok(found.expect("it is being used").alloc_pinned(len))
    }

    unsafe fn write_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u32,
    ) -> Result<(), StreamError> {
        self.push(stream, Op::Write { word, value })
    }

    unsafe fn wait_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u32,
    ) -> Result<(), StreamError> {
        self.push(stream, Op::Wait { word, value })
    }

    unsafe fn scatter_gather(
        &self,
        stream: RawStream,
        moves: &ScatterGather,
    ) -> Result<(), StreamError> {
        self.state().moved += u64::from(moves.count) * u64::from(moves.row_count);
        self.push(stream, Op::Move(*moves))
    }
}

/// Copy engine of the GPU: a copy is done when it is polled for the second time.
#[derive(Debug)]
pub struct Copies(pub Arc<Gpu>);

impl CopyEngine for Copies {
    fn host_memory(&self, len: usize) -> Result<ExternalMemory, CopyError> {
        Ok(self.0.alloc_pinned(len))
    }

    unsafe fn submit(&self, copies: &[DeviceCopy]) -> Result<CopyFence, CopyError> {
        let mut state = self.0.state();
        state.copies.push_back(copies.to_vec());
        state.submitted += 1;
        Ok(CopyFence(state.submitted))
    }

    fn is_done(&self, fence: CopyFence) -> Result<bool, CopyError> {
        let mut state = self.0.state();
        if state.done >= fence.0 {
            return Ok(true);
        }
        let (batch, defect) = (state.copies.pop_front().unwrap(), state.defect);
        state.done += 1;
        drop(state);
        for copy in batch.iter().filter(|_| defect != Defect::NoCopies) {
            let device = self.0.memory.at(copy.device.0, copy.len);
            let (from, to) = match copy.direction {
                CopyDirection::HostToDevice => (copy.host.as_ptr(), device),
                CopyDirection::DeviceToHost => (device, copy.host.as_ptr()),
            };
            // SAFETY: the submitter of the copy guarantees that both sides are valid.
            unsafe { to.copy_from(from, copy.len) };
        }
        Ok(false)
    }
}

/// A clock whose pauses advance the streams.
#[derive(Debug)]
pub struct GpuClock<C: ?Sized>(pub Arc<C>, pub Arc<Gpu>);

impl<C: Clock + ?Sized> Clock for GpuClock<C> {
    fn now(&self) -> Nanos {
        self.0.now()
    }

    fn pause(&self, idle: u32, until: Nanos) {
        self.1.step();
        self.0.pause(idle, until);
    }
}
