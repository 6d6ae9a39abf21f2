//! A fake GPU: memory that nothing else can address, and copies that are executed late, in steps,
//! and in an adverse order. It tracks allocations and panics if a copy touches anything else.
#![allow(unsafe_code, reason = "copies by address")]
#![allow(dead_code, reason = "each of the tests that share it uses some")]

use std::{
    alloc::Layout,
    collections::{BTreeMap, VecDeque},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard},
};

use nvme_driver::{
    CopyDirection, CopyEngine, CopyError, CopyFence, DeviceCopy, DevicePtr, ExternalMemory,
};

const PAGE: usize = 4096;
/// An address that no process has.
const BASE: u64 = 0x6660_0000_0000_0000;

#[derive(Debug, Default)]
pub struct Gpu {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Allocated memory of the GPU, by address, and of the host, as address and length.
    device: BTreeMap<u64, Vec<u8>>,
    host: BTreeMap<usize, usize>,
    next: u64,
    /// Copies submitted and not executed.
    queue: VecDeque<(u64, DeviceCopy)>,
    batches: Vec<usize>,
    /// Copies executed per poll of a fence.
    per_look: usize,
    refusal: Option<String>,
    lost: Option<String>,
    no_memory: bool,
}

/// Memory of the GPU or for it; freed on drop.
struct Owned {
    gpu: Arc<Gpu>,
    device: u64,
    host: Option<(NonNull<u8>, Layout)>,
}

// SAFETY: addresses, used by the fake alone.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        let mut state = self.gpu.state();
        match self.host {
            None => drop(state.device.remove(&self.device)),
            Some((host, layout)) => {
                state.host.remove(&host.as_ptr().addr());
                // SAFETY: allocated with this layout, and dropped once.
                unsafe { std::alloc::dealloc(host.as_ptr(), layout) };
            }
        }
    }
}

/// The engine of a [`Gpu`]. Separate, so that memory can keep the GPU alive without a cycle.
#[derive(Debug)]
pub struct Engine(pub Arc<Gpu>);

impl Gpu {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Allocates memory of the GPU; freed when its last user drops it.
    pub fn alloc(self: &Arc<Self>, len: usize) -> (ExternalMemory, DevicePtr) {
        let mut state = self.state();
        let device = BASE + state.next;
        state.next += (len as u64).next_multiple_of(PAGE as u64) + (1 << 20);
        state.device.insert(device, vec![0xDD; len]);
        drop(state);
        let owner = Arc::new(Owned { gpu: self.clone(), device, host: None });
        // SAFETY: the owner keeps the bytes, and only the GPU has them.
        let memory = unsafe { ExternalMemory::new(None, Some(DevicePtr(device)), len, owner) };
        (memory, DevicePtr(device))
    }

    pub fn write(&self, at: DevicePtr, bytes: &[u8]) {
        self.state().bytes(at, bytes.len()).copy_from_slice(bytes);
    }

    pub fn read(&self, at: DevicePtr, len: usize) -> Vec<u8> {
        self.state().bytes(at, len).to_vec()
    }

    /// Returns the number of live allocations.
    pub fn allocations(&self) -> usize {
        self.state().device.len()
    }

    /// Returns the number of copies in each batch so far.
    pub fn batches(&self) -> Vec<usize> {
        self.state().batches.clone()
    }

    /// Returns the number of copies not executed yet.
    pub fn pending(&self) -> usize {
        self.state().queue.len()
    }

    /// Executes `count` copies, each batch from its end.
    pub fn run(&self, count: usize) {
        self.state().run(count);
    }

    pub fn finish(&self) {
        self.run(usize::MAX);
    }

    /// Executes this many copies per poll of a fence from now on.
    pub fn per_look(&self, count: usize) {
        self.state().per_look = count;
    }

    /// Rejects copies for this reason from now on; `None` accepts them again.
    pub fn refuse(&self, why: Option<&str>) {
        self.state().refusal = why.map(str::to_owned);
    }

    /// Executes nothing any more.
    pub fn lose(&self, why: &str) {
        let mut state = self.state();
        state.lost = Some(why.to_owned());
        state.queue.clear();
    }

    pub fn no_memory(&self, yes: bool) {
        self.state().no_memory = yes;
    }
}

impl State {
    fn bytes(&mut self, at: DevicePtr, len: usize) -> &mut [u8] {
        let (base, bytes) =
            self.device.range_mut(..=at.0).next_back().expect("nothing is allocated there");
        let offset = usize::try_from(at.0 - base).unwrap();
        let total = bytes.len();
        bytes
            .get_mut(offset..)
            .and_then(|rest| rest.get_mut(..len))
            .unwrap_or_else(|| panic!("{len} bytes at {offset} of {total}: freed, or never there"))
    }

    fn run(&mut self, count: usize) {
        for _ in 0..count {
            let Some(&(batch, _)) = self.queue.front() else { return };
            let last = self.queue.iter().rposition(|(of, _)| *of == batch).unwrap();
            let (_, copy) = self.queue.remove(last).unwrap();
            self.carry_out(copy);
        }
    }

    fn carry_out(&mut self, copy: DeviceCopy) {
        let DeviceCopy { host, device, len, direction } = copy;
        let address = host.as_ptr().addr();
        let (base, size) = self.host.range(..=address).next_back().expect("no such host memory");
        assert!(address + len <= base + size, "past the end of host memory, or it is freed");
        let bytes = self.bytes(device, len);
        // SAFETY: inside host memory that the assertion found, which has no references.
        unsafe {
            match direction {
                CopyDirection::HostToDevice => {
                    host.copy_to_nonoverlapping(NonNull::from(bytes).cast(), len)
                }
                CopyDirection::DeviceToHost => {
                    host.copy_from_nonoverlapping(NonNull::from(bytes).cast(), len)
                }
            }
        }
    }

    fn error(cause: &str) -> CopyError {
        CopyError { cause: cause.to_owned() }
    }
}

impl CopyEngine for Engine {
    fn host_memory(&self, len: usize) -> Result<ExternalMemory, CopyError> {
        let mut state = self.0.state();
        if state.no_memory {
            return Err(State::error("no memory can be pinned"));
        }
        let layout = Layout::from_size_align(len, PAGE).unwrap();
        // SAFETY: the layout has nonzero size.
        let host = NonNull::new(unsafe { std::alloc::alloc(layout) }).unwrap();
        state.host.insert(host.as_ptr().addr(), len);
        drop(state);
        let owner = Owned { gpu: self.0.clone(), device: 0, host: Some((host, layout)) };
        // SAFETY: the owner keeps the bytes; the fake creates no references into them.
        Ok(unsafe { ExternalMemory::new(Some(host), None, len, Arc::new(owner)) })
    }

    unsafe fn submit(&self, copies: &[DeviceCopy]) -> Result<CopyFence, CopyError> {
        let mut state = self.0.state();
        if let Some(why) = state.lost.as_ref().or(state.refusal.as_ref()) {
            return Err(State::error(why));
        }
        assert!(!copies.is_empty(), "a batch of nothing");
        state.batches.push(copies.len());
        let fence = state.batches.len() as u64;
        state.queue.extend(copies.iter().map(|copy| (fence, *copy)));
        Ok(CopyFence(fence))
    }

    fn is_done(&self, fence: CopyFence) -> Result<bool, CopyError> {
        let mut state = self.0.state();
        if let Some(why) = &state.lost {
            return Err(State::error(why));
        }
        let count = state.per_look;
        state.run(count);
        Ok(state.queue.front().is_none_or(|(next, _)| *next > fence.0))
    }
}
