//! Bounce buffers between the media and a GPU, in memory that a copy engine can copy.
//!
//! Media move bytes with the CPU or with io_uring and cannot address GPU memory. Data of a command
//! there goes through memory of this process that the GPU's engine copies fast: reads medium ->
//! bounce -> GPU, writes GPU -> bounce -> medium (`media/gpu_copies.rs`).
#![allow(unsafe_code, reason = "addresses that cross threads; nothing is dereferenced here")]

use std::{
    collections::BTreeMap,
    fmt,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nvme_driver::{CopyEngine, CopyError, ExternalMemory};

use crate::memory::{page_bytes, page_ceil};

/// Bytes of bounce buffers in use by all controllers of a domain, at most: 1 ms of data at 50 GB/s.
/// A single longer transfer gets its own memory.
pub(crate) const POOL_BYTES: usize = 64 << 20;

/// Access to a GPU's memory in one address space.
#[derive(Debug, Clone)]
pub(crate) struct Copies {
    pub(crate) engine: Arc<dyn CopyEngine>,
    pub(crate) pool: Arc<BouncePool>,
}

impl Copies {
    pub(crate) fn new(engine: Arc<dyn CopyEngine>) -> Self {
        let pool = BouncePool { engine: engine.clone(), state: Mutex::new(State::default()) };
        Self { engine, pool: Arc::new(pool) }
    }
}

/// One allocation of the engine, divided first fit. Allocated by the first transfer.
pub(crate) struct BouncePool {
    engine: Arc<dyn CopyEngine>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    memory: Option<EngineMemory>,
    /// Free ranges: offset -> length. No two are adjacent.
    free: BTreeMap<usize, usize>,
}

/// Memory of a copy engine: its address and its owner.
struct EngineMemory {
    host: NonNull<u8>,
    _memory: ExternalMemory,
}

// SAFETY: an address with its owner, which is Send and Sync; all accesses are raw.
unsafe impl Send for EngineMemory {}
// SAFETY: as above.
unsafe impl Sync for EngineMemory {}

impl BouncePool {
    /// Takes `len` bytes, in whole pages; `None` if other users must return theirs first.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<Option<Bounce>, CopyError> {
        let too_long = || CopyError { cause: format!("{len} bytes are no length of memory") };
        let len = page_ceil(len).ok_or_else(too_long)?;
        if len > POOL_BYTES {
            let memory = self.ask(len)?;
            let host = memory.host;
            return Ok(Some(Bounce { host, len, origin: Origin::Own { _memory: memory } }));
        }
        let mut state = self.state();
        if state.memory.is_none() {
            state.memory = Some(self.ask(POOL_BYTES)?);
            state.free.insert(0, POOL_BYTES);
        }
        let Some(base) = state.memory.as_ref().map(|memory| memory.host) else { return Ok(None) };
        let fits = state.free.iter().find(|(_, free)| **free >= len).map(|(at, free)| (*at, *free));
        let Some((offset, free)) = fits else { return Ok(None) };
        state.free.remove(&offset);
        if free > len {
            state.free.insert(offset + len, free - len);
        }
        drop(state);
        let host = NonNull::new(base.as_ptr().wrapping_add(offset)).unwrap_or(base);
        Ok(Some(Bounce { host, len, origin: Origin::Pool { pool: self.clone(), offset } }))
    }

    fn ask(&self, len: usize) -> Result<EngineMemory, CopyError> {
        let memory = self.engine.host_memory(len)?;
        let (host, device, found, owner) = memory.into_parts();
        let aligned = |host: &NonNull<u8>| host.as_ptr().addr().is_multiple_of(page_bytes());
        let Some(host) = host.filter(aligned).filter(|_| found >= len) else {
            let cause = format!(
                "{len} page aligned bytes of host memory were asked for, and the copy engine gave \
                 {found} at {host:?}; this is a defect of the engine"
            );
            return Err(CopyError { cause });
        };
        // SAFETY: these are the parts of memory that the engine vouched for.
        let memory = unsafe { ExternalMemory::new(Some(host), device, found, owner) };
        Ok(EngineMemory { host, _memory: memory })
    }

    fn give_back(&self, offset: usize, len: usize) {
        let mut state = self.state();
        let (mut start, mut end) = (offset, offset + len);
        if let Some(behind) = state.free.remove(&end) {
            end += behind;
        }
        if let Some((&before, &size)) = state.free.range(..start).next_back()
            && before + size == start
        {
            state.free.remove(&before);
            start = before;
        }
        state.free.insert(start, end - start);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for BouncePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free: usize = self.state().free.values().sum();
        write!(f, "BouncePool({free} bytes free)")
    }
}

/// A range of a copy engine's memory, returned on drop.
pub(crate) struct Bounce {
    host: NonNull<u8>,
    len: usize,
    origin: Origin,
}

enum Origin {
    Pool { pool: Arc<BouncePool>, offset: usize },
    Own { _memory: EngineMemory },
}

// SAFETY: an address and the owner of the memory, which is Send and Sync.
unsafe impl Send for Bounce {}
// SAFETY: as above.
unsafe impl Sync for Bounce {}

impl Bounce {
    /// Returns the first byte, page aligned.
    pub(crate) fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// Returns the length in bytes, a multiple of the page size.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        if let Origin::Pool { pool, offset } = &self.origin {
            pool.give_back(*offset, self.len);
        }
    }
}

#[cfg(test)]
mod tests;
