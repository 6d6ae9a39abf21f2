#![allow(unsafe_code, reason = "launches a kernel on memory that the caller names")]
//! Generates, overwrites and checks contents on the GPU: the counterpart of [`crate::pattern`].
//!
//! The items of a launch lie in pinned memory, allocated beforehand and divided into slots: a word
//! that the stream writes after the kernel, the items, and the results of a check. A slot is reused
//! once its word is set, so no call here waits for the GPU unless all slots are in flight.

use std::{
    fmt,
    mem::{self, ManuallyDrop},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use gio_uring::RawStream;
use nvme_driver::{DevicePtr, platform::mmio};

use super::{
    device::CudaDevice,
    error::CudaError,
    memory::PinnedMemory,
    module::{CudaFunction, CudaModule},
    stream::CudaStream,
};
use crate::{
    pattern::{Difference, Pattern},
    pool::{self, BLOCK_THREADS_MAX, MODE_CHECK, MODE_FILL, MODE_POISON, PATTERN_NONE, TILE},
    ptx::{PATTERN_ENTRY, POOL_PTX},
};

/// Items per slot, and thus per launch.
const SLOT_ITEMS: usize = 2048;
/// Offset of the items in a slot; the word is at 0.
const ITEMS_AT: usize = 64;
/// Offset of the results.
const FOUND_AT: usize = ITEMS_AT + SLOT_ITEMS * size_of::<pool::PatternItem>();
/// Bytes of a slot.
const SLOT_BYTES: usize = (FOUND_AT + SLOT_ITEMS * size_of::<u64>()).next_multiple_of(4096);
/// Item capacity of [`CudaPattern::new`].
const ITEMS: usize = 32 * SLOT_ITEMS;
/// Warps per block.
const BLOCK_WARPS: u64 = BLOCK_THREADS_MAX as u64 / 32;
/// Maximum blocks of a launch per SM of the GPU.
const BLOCKS_PER_SM: u64 = 4;
/// Time that a launch waits for a slot if all are in flight.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that drop waits for launches in flight.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Bytes `[offset, offset + len)` of the object with this seed, in GPU memory or in other memory
/// that the GPU addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PatternItem {
    /// First byte, a multiple of 4. Multiples of 16 are fastest.
    pub at: DevicePtr,
    /// [`Pattern::seed`].
    pub seed: u64,
    /// Offset in the object, a multiple of 8.
    pub offset: u32,
    /// Length in bytes, a multiple of 4; `offset + len` is below 2^32.
    pub len: u32,
}

impl PatternItem {
    fn lower(&self, index: usize) -> Result<pool::PatternItem, CudaError> {
        let Self { at, seed, offset, len } = *self;
        let fits = at.0.is_multiple_of(4)
            && offset.is_multiple_of(8)
            && len.is_multiple_of(4)
            && offset.checked_add(len).is_some();
        if fits {
            return Ok(pool::PatternItem { at: at.0, seed, offset, len });
        }
        Err(CudaError::Argument(format!(
            "item {index}, {len} bytes from {offset} on at {:#x}: the address and the length have \
             to be multiples of 4, the offset of 8, and the end below 2^32",
            at.0
        )))
    }
}

/// Generates, overwrites and checks contents on a GPU.
pub struct CudaPattern {
    shared: Arc<Shared>,
}

impl fmt::Debug for CudaPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaPattern({:?})", self.shared.device)
    }
}

impl CudaPattern {
    /// Compiles the kernel, and allocates 2 MiB of pinned memory: capacity for 65,536 items in
    /// flight or checked. May wait for running kernels: call it before an executor starts.
    ///
    /// # Errors
    /// Returns [`CudaError::Compile`] or [`CudaError::Call`].
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        Self::with_items(device, ITEMS)
    }

    /// Same as [`CudaPattern::new`], with capacity for `items` items: the items of all launches in
    /// flight and of all checks not yet dropped, each rounded up to 2,048. The capacity grows on
    /// demand, but not while an executor of the device is started.
    pub fn with_items(device: &Arc<CudaDevice>, items: usize) -> Result<Self, CudaError> {
        let module = CudaModule::compile(device, POOL_PTX, "the pool's kernels")?;
        let function = module.function(PATTERN_ENTRY)?;
        function.takes::<pool::PatternArgs>()?;
        let shared = Shared {
            function: ManuallyDrop::new(function),
            probe: CudaStream::lowest(device)?,
            device: device.clone(),
            state: Mutex::default(),
        };
        shared.grow(&mut shared.state(), items.div_ceil(SLOT_ITEMS))?;
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Enqueues writing the items' contents on `stream`.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] for a misaligned item (nothing was enqueued); the same or
    /// [`CudaError::Call`], with some items enqueued, if the capacity is exhausted or a call fails.
    ///
    /// # Safety
    /// `stream` belongs to the device and is alive. The items' memory is mapped for the GPU, and
    /// not otherwise used, until the stream is past the launch; items do not overlap.
    pub unsafe fn fill(&self, stream: RawStream, items: &[PatternItem]) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let parts = unsafe { self.shared.launch(stream, MODE_FILL, items) }?;
        self.shared.release(parts);
        Ok(())
    }

    /// Enqueues overwriting the items' memory with a pattern that no object contains, on `stream`.
    ///
    /// # Errors
    /// Same as [`CudaPattern::fill`].
    ///
    /// # Safety
    /// Same as [`CudaPattern::fill`].
    pub unsafe fn poison(&self, stream: RawStream, items: &[PatternItem]) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let parts = unsafe { self.shared.launch(stream, MODE_POISON, items) }?;
        self.shared.release(parts);
        Ok(())
    }

    /// Enqueues comparing the items' memory with the expected contents on `stream`.
    ///
    /// # Errors
    /// Same as [`CudaPattern::fill`].
    ///
    /// # Safety
    /// Same as [`CudaPattern::fill`], but others may read the memory, and items may overlap.
    pub unsafe fn check(
        &self,
        stream: RawStream,
        items: &[PatternItem],
    ) -> Result<PatternCheck, CudaError> {
        // SAFETY: the caller's promise.
        let parts = unsafe { self.shared.launch(stream, MODE_CHECK, items) }?;
        let seeds = items.iter().map(|item| item.seed).collect();
        Ok(PatternCheck { shared: self.shared.clone(), parts, seeds })
    }
}

/// An enqueued check. May be dropped before it is done.
pub struct PatternCheck {
    shared: Arc<Shared>,
    parts: Vec<Part>,
    seeds: Vec<u64>,
}

impl fmt::Debug for PatternCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PatternCheck({} items)", self.seeds.len())
    }
}

impl PatternCheck {
    /// Returns true if all items have been compared.
    ///
    /// # Errors
    /// Returns [`CudaError::Call`] if the GPU is lost.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        if self.parts.iter().all(|part| part.slot.is_done()) {
            return Ok(true);
        }
        // A lost GPU never writes the words; every driver call then returns an error.
        self.shared.probe.is_idle()?;
        Ok(false)
    }

    /// Waits until all items have been compared.
    ///
    /// # Errors
    /// Same as [`PatternCheck::is_done`]; also [`CudaError::Argument`] after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<(), CudaError> {
        let start = Instant::now();
        while !self.is_done()? {
            if start.elapsed() > timeout {
                let (items, seconds) = (self.seeds.len(), timeout.as_secs_f64());
                let text = format!("checking {items} items did not end within {seconds} s");
                return Err(CudaError::Argument(text));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the indices of the mismatched items, each with its first difference.
    ///
    /// # Errors
    /// Same as [`PatternCheck::is_done`]; also [`CudaError::Argument`] while it is not done.
    pub fn differences(&self) -> Result<Vec<(usize, Difference)>, CudaError> {
        if !self.is_done()? {
            let text = format!("a check of {} items is not done yet", self.seeds.len());
            return Err(CudaError::Argument(text));
        }
        let mut found = Vec::new();
        for (part, first) in self.parts.iter().zip((0..).step_by(SLOT_ITEMS)) {
            for at in 0..part.count {
                let word = part.slot.finding(at);
                if word != PATTERN_NONE {
                    let (index, offset) = (first + at, (word >> 32) as usize);
                    let pattern = Pattern::new(self.seeds[index]);
                    found.push((index, pattern.difference(offset, word as u32)));
                }
            }
        }
        Ok(found)
    }
}

impl Drop for PatternCheck {
    fn drop(&mut self) {
        self.shared.release(mem::take(&mut self.parts));
    }
}

/// Pinned memory for one launch.
#[derive(Clone, Copy)]
struct Slot {
    host: NonNull<u8>,
    device: u64,
}

// SAFETY: addresses; a slot is written by its one owner, and by the GPU.
unsafe impl Send for Slot {}
// SAFETY: as above; shared ones are only read, with volatile or atomic loads.
unsafe impl Sync for Slot {}

impl Slot {
    /// Returns true if the launch that uses the slot has ended.
    fn is_done(self) -> bool {
        // SAFETY: the first word of a slot, which lives as long as `Shared`; the stream writes it
        // atomically.
        unsafe { mmio::load_acquire32(self.host.cast()) == 1 }
    }

    /// # Safety
    /// The caller owns the slot, and no launch in flight uses it.
    unsafe fn write(self, items: &[pool::PatternItem], check: bool) {
        assert!(items.len() <= SLOT_ITEMS);
        // SAFETY: word, items and results lie within the slot one after another, aligned, since
        // there are at most SLOT_ITEMS; the caller owns them.
        unsafe {
            mmio::store_release32(self.host.cast(), 0);
            let to = self.host.byte_add(ITEMS_AT).cast::<pool::PatternItem>();
            for (at, item) in items.iter().enumerate() {
                to.add(at).write_volatile(*item);
            }
            if check {
                let found = self.host.byte_add(FOUND_AT).cast::<u64>();
                for at in 0..items.len() {
                    found.add(at).write_volatile(PATTERN_NONE);
                }
            }
        }
    }

    /// Returns the result for an item, once the launch is done.
    fn finding(self, at: usize) -> u64 {
        assert!(at < SLOT_ITEMS);
        // SAFETY: inside the slot, which lives as long as `Shared`; nothing writes it any more.
        unsafe { self.host.byte_add(FOUND_AT).cast::<u64>().add(at).read_volatile() }
    }
}

/// One launch of an operation.
struct Part {
    slot: Slot,
    count: usize,
}

#[derive(Default)]
struct State {
    free: Vec<Slot>,
    /// In flight, with results that are not wanted.
    in_flight: Vec<Slot>,
    memory: Vec<PinnedMemory>,
}

struct Shared {
    /// Leaked, with the memory, if a launch is still in flight at the end.
    function: ManuallyDrop<CudaFunction>,
    /// An empty stream, queried for the GPU's health.
    probe: CudaStream,
    device: Arc<CudaDevice>,
    state: Mutex<State>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Slots move one at a time: a panic neither loses nor duplicates one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grow(&self, state: &mut State, slots: usize) -> Result<(), CudaError> {
        let slots = slots.max(1);
        let memory = self.device.pinned(slots.saturating_mul(SLOT_BYTES))?;
        for at in 0..slots {
            // SAFETY: inside the memory.
            let host = unsafe { memory.host().byte_add(at * SLOT_BYTES) };
            let device = memory.device().0 + (at * SLOT_BYTES) as u64;
            state.free.push(Slot { host, device });
        }
        state.memory.push(memory);
        Ok(())
    }

    /// Returns a free slot; waits for one if necessary.
    fn slot(&self) -> Result<Slot, CudaError> {
        let start = Instant::now();
        loop {
            let mut state = self.state();
            state.reap();
            if let Some(slot) = state.free.pop() {
                return Ok(slot);
            }
            if !self.device.is_started() {
                self.grow(&mut state, 1)?;
                continue;
            }
            let none = state.in_flight.is_empty();
            drop(state);
            self.probe.is_idle()?;
            if none || start.elapsed() > SLOT_TIMEOUT {
                let text = "no room for more items while an executor runs: drop checks that are \
                            done, or make it with more items (CudaPattern::with_items)";
                return Err(CudaError::Argument(text.into()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// # Safety
    /// Same as [`CudaPattern::fill`].
    unsafe fn launch(
        &self,
        stream: RawStream,
        mode: u32,
        items: &[PatternItem],
    ) -> Result<Vec<Part>, CudaError> {
        let lower = |(index, item): (usize, &PatternItem)| item.lower(index);
        let items: Vec<_> = items.iter().enumerate().map(lower).collect::<Result<_, _>>()?;
        let mut parts = Vec::new();
        for items in items.chunks(SLOT_ITEMS) {
            // SAFETY: the caller's promise.
            match unsafe { self.launch_part(stream, mode, items) } {
                Ok(slot) => parts.push(Part { slot, count: items.len() }),
                Err(error) => {
                    self.release(parts);
                    return Err(error);
                }
            }
        }
        Ok(parts)
    }

    /// # Safety
    /// Same as [`CudaPattern::fill`].
    unsafe fn launch_part(
        &self,
        stream: RawStream,
        mode: u32,
        items: &[pool::PatternItem],
    ) -> Result<Slot, CudaError> {
        let slot = self.slot()?;
        // SAFETY: the slot was free.
        unsafe { slot.write(items, mode == MODE_CHECK) };
        let longest = items.iter().map(|item| item.len).max().unwrap_or(0);
        let args = pool::PatternArgs {
            items: slot.device + ITEMS_AT as u64,
            found: slot.device + FOUND_AT as u64,
            count: items.len() as u32,
            tiles: longest.div_ceil(TILE).max(1),
            mode,
            reserved: 0,
        };
        let warps = u64::from(args.count) * u64::from(args.tiles);
        let most = u64::from(self.device.report().sms) * BLOCKS_PER_SM;
        let blocks = warps.div_ceil(BLOCK_WARPS).clamp(1, most.max(1)) as u32;
        // SAFETY: `PatternArgs` is the kernel's argument. The slot stays until its word is set, the
        // function until all are; the caller promises the items' memory.
        let launched = unsafe { self.function.launch(stream, blocks, BLOCK_THREADS_MAX, args) };
        if let Err(error) = launched {
            self.state().free.push(slot);
            return Err(error);
        }
        // SAFETY: as above.
        let marked =
            unsafe { self.device.stream_write(stream.handle(), DevicePtr(slot.device), 1) };
        if let Err(error) = marked {
            // The kernel runs, but its end cannot be observed: the slot is never reused.
            self.state().in_flight.push(slot);
            return Err(error);
        }
        Ok(slot)
    }

    fn release(&self, parts: Vec<Part>) {
        let mut state = self.state();
        state.in_flight.extend(parts.into_iter().map(|part| part.slot));
        state.reap();
    }
}

impl State {
    /// Frees the slots of launches that have ended.
    fn reap(&mut self) {
        let (free, in_flight) = (&mut self.free, &mut self.in_flight);
        in_flight.retain(|slot| {
            let done = slot.is_done();
            if done {
                free.push(*slot);
            }
            !done
        });
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let start = Instant::now();
        loop {
            let mut state = self.state();
            state.reap();
            // A lost GPU runs nothing, and the driver frees nothing.
            if state.in_flight.is_empty() || self.probe.is_idle().is_err() {
                break;
            }
            if start.elapsed() > DROP_TIMEOUT {
                let count = state.in_flight.len();
                tracing::error!(count, "launches that do not end: their kernel and memory leak");
                mem::forget(mem::take(&mut state.memory));
                return;
            }
            drop(state);
            std::thread::sleep(POLL_INTERVAL);
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.function) };
    }
}
