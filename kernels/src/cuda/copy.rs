#![allow(unsafe_code, reason = "calls libcuda, and reads a word that a stream writes")]
//! Copies between this process and the GPU, for the software controller and for route checks:
//! batched on a stream of their own, and polled without calling the driver.
//!
//! After every batch the stream writes the batch's number to a pinned word. A completion check
//! reads that word; it asks the driver only if the word has not changed for a while, because a lost
//! GPU never writes it.
//!
//! Pinned memory is allocated in large chunks beforehand and divided here: the driver may wait for
//! kernels to allocate, and the kernel of a started executor may in turn wait for this thread.

use std::{
    fmt,
    mem::{self, ManuallyDrop},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use cudarc::driver::sys::{
    CUdeviceptr, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder,
    CUstream,
};
use nvme_driver::{
    CopyDirection, CopyEngine, CopyError, CopyFence, DeviceCopy, DevicePtr, ExternalMemory,
    platform::mmio,
};

use super::{
    device::CudaDevice,
    error::{CudaError, ErrorCode},
    memory::PinnedMemory,
    stream::CudaStream,
};

/// Pinned memory that [`CudaCopies::new`] allocates: the software controllers of a domain need 64
/// MiB from their first transfer on, which may come while a kernel runs; the rest is for others.
const HOST_BYTES: usize = 80 << 20;
/// Growth step.
const CHUNK: usize = 16 << 20;
/// Alignment of [`CopyEngine::host_memory`].
const PAGE: usize = 4096;
/// Copies per driver call.
const BATCH: usize = 1024;
/// Polls of the word between two driver queries.
const POLLS_PER_QUERY: u32 = 64;
/// Time allowed for copies started before another failure. A batch is at most gigabytes, and a link
/// transfers some gigabytes per second.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Copies between this process and a GPU: the [`CopyEngine`] of CUDA.
///
/// No method waits for kernels, so all may be called while an executor is started, except
/// [`CudaCopies::new`] and [`CopyEngine::host_memory`] once the preallocated memory is used up,
/// which then returns an error. Copies run concurrently with a resident kernel.
///
/// Copies from and to [`CopyEngine::host_memory`] or other pinned memory are asynchronous. Copies
/// from and to other memory are correct too, but the driver may perform them synchronously.
///
/// If a batch fails after parts of it were started, `submit` waits for these parts and then returns
/// the error: no copy is in flight afterwards, but some bytes may have been copied.
pub struct CudaCopies {
    device: Arc<CudaDevice>,
    // Leaked together if the stream does not become idle.
    stream: ManuallyDrop<CudaStream>,
    word: ManuallyDrop<PinnedMemory>,
    arena: Arc<Arena>,
    queue: Mutex<Queue>,
}

/// Driver interface for enqueuing copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// `cuMemcpyBatchAsync_v2`, since CUDA 13.0.
    Batch,
    /// `cuMemcpyBatchAsync`, since CUDA 12.8.
    BatchOf12,
    /// One call per copy.
    Single,
}

struct Queue {
    /// Batches submitted.
    submitted: u64,
    call: Call,
    /// Consecutive polls that found the word unchanged.
    polls: u32,
    /// Set once the state of copies is unknown.
    failed: Option<CopyError>,
    // One call's copies; allocated once.
    to: Vec<CUdeviceptr>,
    from: Vec<CUdeviceptr>,
    len: Vec<usize>,
}

impl fmt::Debug for CudaCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Queue { submitted, call, .. } = &*self.queue();
        write!(f, "CudaCopies({:?}, {call:?}, {submitted} batches)", self.device)
    }
}

impl CudaCopies {
    /// Creates a copy stream with 80 MiB of pinned memory: enough for the software controllers of
    /// one domain, and a little more. May wait for kernels; call it before an executor starts.
    ///
    /// # Errors
    /// Returns [`CudaError::Call`], typically if memory is exhausted.
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        Self::with_host_memory(device, HOST_BYTES)
    }

    /// Same as [`CudaCopies::new`], with `len` bytes for [`CopyEngine::host_memory`]: all memory
    /// that will be requested while an executor is started.
    pub fn with_host_memory(device: &Arc<CudaDevice>, len: usize) -> Result<Self, CudaError> {
        let call = match (device.api.cuMemcpyBatchAsync_v2, device.api.cuMemcpyBatchAsync) {
            (Some(_), _) => Call::Batch,
            (None, Some(_)) => Call::BatchOf12,
            (None, None) => Call::Single,
        };
        let arena = Arena { device: device.clone(), chunks: Mutex::default() };
        arena.grow(len.max(PAGE))?;
        let queue = Queue {
            submitted: 0,
            call,
            polls: 0,
            failed: None,
            to: Vec::with_capacity(BATCH),
            from: Vec::with_capacity(BATCH),
            len: Vec::with_capacity(BATCH),
        };
        // Both, before either is wrapped in ManuallyDrop.
        let (stream, word) = (CudaStream::new(device, None)?, device.pinned(PAGE)?);
        Ok(Self {
            device: device.clone(),
            stream: ManuallyDrop::new(stream),
            word: ManuallyDrop::new(word),
            arena: Arc::new(arena),
            queue: Mutex::new(queue),
        })
    }

    /// Returns true if the driver takes whole batches, false if it is called once per copy.
    #[must_use]
    pub fn is_batched(&self) -> bool {
        self.queue().call != Call::Single
    }

    /// Returns the GPU.
    #[must_use]
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Counters, and vectors that are refilled each time.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn word(&self) -> u32 {
        // SAFETY: the first word of a page that lives as long as `self`; the stream writes it
        // atomically.
        unsafe { mmio::load_acquire32(self.word.host().cast()) }
    }

    /// Waits until all work on the stream is done.
    fn drain(&self) -> Result<(), CudaError> {
        let start = Instant::now();
        while !self.stream.is_idle()? {
            if start.elapsed() > TIMEOUT {
                let text = format!("copies did not end within {} s", TIMEOUT.as_secs());
                return Err(CudaError::Argument(text));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Enqueues the copies; on failure some of them may already be enqueued.
    ///
    /// # Safety
    /// Same as [`CopyEngine::submit`].
    unsafe fn enqueue(&self, queue: &mut Queue, copies: &[DeviceCopy]) -> Result<(), CudaError> {
        let _entered = self.device.enter()?;
        for part in copies.chunks(BATCH) {
            // SAFETY: the caller's promise.
            let code = unsafe { self.batch(queue, part) };
            if code != ErrorCode::NOT_SUPPORTED {
                self.device.check("copying", "cuMemcpyBatchAsync", code)?;
                continue;
            }
            if queue.call != Call::Single {
                tracing::debug!("no batches of copies here: one by one from now on");
                queue.call = Call::Single;
            }
            for copy in part.iter().filter(|copy| copy.len > 0) {
                // SAFETY: the caller's promise.
                unsafe { self.single(copy) }?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// Same as [`CopyEngine::submit`]; the context is current.
    unsafe fn batch(&self, queue: &mut Queue, copies: &[DeviceCopy]) -> ErrorCode {
        let Queue { to, from, len, call, .. } = queue;
        if *call == Call::Single {
            return ErrorCode::NOT_SUPPORTED;
        }
        to.clear();
        from.clear();
        len.clear();
        for copy in copies.iter().filter(|copy| copy.len > 0) {
            let host = copy.host.as_ptr().expose_provenance() as u64;
            let ends = match copy.direction {
                CopyDirection::HostToDevice => (copy.device.0, host),
                CopyDirection::DeviceToHost => (host, copy.device.0),
            };
            to.push(ends.0);
            from.push(ends.1);
            len.push(copy.len);
        }
        let count = to.len();
        if count == 0 {
            return ErrorCode::SUCCESS;
        }
        // Locations are hints for managed memory only, which is not used here.
        let nowhere =
            CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let (mut first, mut failed) = (0, 0);
        let (to, from, len) = (to.as_mut_ptr(), from.as_mut_ptr(), len.as_mut_ptr());
        let (attributes, first, stream) =
            (&raw mut attributes, &raw mut first, handle(&self.stream));
        let api = self.device.api;
        match (*call, api.cuMemcpyBatchAsync_v2, api.cuMemcpyBatchAsync) {
            (Call::Batch, Some(copy), _) => {
                // SAFETY: three arrays of `count` items and one of one item, all read before the
                // call returns; the caller promises the memory they name.
                unsafe { copy(to, from, len, count, attributes, first, 1, stream) }
            }
            (Call::BatchOf12, _, Some(copy)) => {
                let failed = &raw mut failed;
                // SAFETY: as above; one number is written.
                unsafe { copy(to, from, len, count, attributes, first, 1, failed, stream) }
            }
            _ => ErrorCode::NOT_SUPPORTED,
        }
    }

    /// # Safety
    /// Same as [`CopyEngine::submit`]; the context is current.
    unsafe fn single(&self, copy: &DeviceCopy) -> Result<(), CudaError> {
        let DeviceCopy { host, device, len, direction } = *copy;
        let (api, host, stream) = (self.device.api, host.as_ptr().cast(), handle(&self.stream));
        // SAFETY: the caller promises that both ranges have this length and stay valid.
        let (call, code) = unsafe {
            match direction {
                CopyDirection::HostToDevice => {
                    ("cuMemcpyHtoDAsync", (api.cuMemcpyHtoDAsync_v2)(device.0, host, len, stream))
                }
                CopyDirection::DeviceToHost => {
                    ("cuMemcpyDtoHAsync", (api.cuMemcpyDtoHAsync_v2)(host, device.0, len, stream))
                }
            }
        };
        self.device.check("copying", call, code)
    }

    /// Asks the driver about the copies, because the word has not arrived.
    fn ask(&self, queue: &mut Queue, fence: CopyFence) -> Result<bool, CopyError> {
        let error = match self.stream.is_idle() {
            Ok(false) => return Ok(false),
            // The stream finished between the poll and the query.
            Ok(true) if queue.done(self.word()) >= fence.0 => return Ok(true),
            Ok(true) => "the stream is at its end and did not write its word".into(),
            Err(error) => error.to_string(),
        };
        Err(queue.fail(error))
    }
}

impl Queue {
    /// Returns the number of batches done, of which the stream wrote the lower half.
    fn done(&self, word: u32) -> u64 {
        let behind = (self.submitted as u32).wrapping_sub(word);
        self.submitted.saturating_sub(u64::from(behind))
    }

    fn fail(&mut self, cause: String) -> CopyError {
        tracing::error!(%cause, "nothing is copied any more");
        self.failed.get_or_insert(CopyError { cause }).clone()
    }
}

fn handle(stream: &CudaStream) -> CUstream {
    std::ptr::with_exposed_provenance_mut(stream.raw() as usize)
}

impl CopyEngine for CudaCopies {
    fn host_memory(&self, len: usize) -> Result<ExternalMemory, CopyError> {
        // Copies of unknown state may still write to returned memory.
        if let Some(error) = &self.queue().failed {
            return Err(error.clone());
        }
        let part = self.arena.take(len).map_err(|error| CopyError { cause: error.to_string() })?;
        let (host, device, len) = (part.host, part.device, part.len);
        // SAFETY: a part of pinned memory that only its owner uses until `part`, the owner, is
        // dropped, and into which no reference is ever made.
        Ok(unsafe { ExternalMemory::new(Some(host), Some(device), len, Arc::new(part)) })
    }

    unsafe fn submit(&self, copies: &[DeviceCopy]) -> Result<CopyFence, CopyError> {
        let mut queue = self.queue();
        if let Some(error) = &queue.failed {
            return Err(error.clone());
        }
        if copies.iter().all(|copy| copy.len == 0) {
            return Ok(CopyFence(queue.submitted));
        }
        let number = queue.submitted + 1;
        let (stream, word) = (self.stream.raw(), self.word.device());
        // SAFETY: the caller's promise.
        let enqueued = unsafe { self.enqueue(&mut queue, copies) };
        // SAFETY: stream and word live as long as `self`, whose drop waits for the stream.
        let enqueued = enqueued
            .and_then(|()| unsafe { self.device.stream_write(stream, word, number as u32) });
        let Err(error) = enqueued else {
            queue.submitted = number;
            return Ok(CopyFence(number));
        };
        if let Err(lost) = self.drain() {
            return Err(queue.fail(format!("{error}; then {lost}")));
        }
        Err(CopyError { cause: error.to_string() })
    }

    fn is_done(&self, fence: CopyFence) -> Result<bool, CopyError> {
        // Valid for an issued fence less than half the number range old.
        if (self.word().wrapping_sub(fence.0 as u32) as i32) >= 0 {
            return Ok(true);
        }
        let mut queue = self.queue();
        if queue.done(self.word()) >= fence.0 {
            return Ok(true);
        }
        if let Some(error) = &queue.failed {
            return Err(error.clone());
        }
        if fence.0 > queue.submitted {
            let (asked, submitted) = (fence.0, queue.submitted);
            let cause = format!("fence {asked} was asked for and {submitted} were given out");
            return Err(CopyError { cause });
        }
        queue.polls += 1;
        if queue.polls < POLLS_PER_QUERY && self.device.healthy().is_ok() {
            return Ok(false);
        }
        queue.polls = 0;
        self.ask(&mut queue, fence)
    }
}

impl Drop for CudaCopies {
    fn drop(&mut self) {
        // The word must not be freed or reused while the stream may still write it.
        if let Err(error) = self.drain() {
            tracing::error!(%error, "dropping a stream whose copies may go on: leaked");
            // Existing owners keep their memory; returned parts are no longer handed out.
            mem::forget(self.arena.clone());
            return;
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe {
            ManuallyDrop::drop(&mut self.stream);
            ManuallyDrop::drop(&mut self.word);
        }
    }
}

/// Pinned memory, divided into parts of whole pages.
struct Arena {
    device: Arc<CudaDevice>,
    chunks: Mutex<Vec<Chunk>>,
}

struct Chunk {
    memory: PinnedMemory,
    /// Offsets and lengths, ascending, never adjacent.
    free: Vec<(usize, usize)>,
}

/// A part of a chunk, returned to it on drop.
struct Allocation {
    host: NonNull<u8>,
    device: DevicePtr,
    len: usize,
    chunk: usize,
    offset: usize,
    arena: Arc<Arena>,
}

// SAFETY: addresses; the memory is accessed through the owner of the addresses.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(chunk) = self.arena.chunks().get_mut(self.chunk) {
            put_back(&mut chunk.free, self.offset, self.len);
        }
    }
}

impl Arena {
    fn chunks(&self) -> MutexGuard<'_, Vec<Chunk>> {
        // The free lists are consistent between the calls below, none of which panics.
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates another chunk from the driver.
    fn grow(&self, len: usize) -> Result<(), CudaError> {
        let memory = self.device.pinned(len)?;
        let free = vec![(0, memory.len())];
        self.chunks().push(Chunk { memory, free });
        Ok(())
    }

    /// Allocates `len` zeroed bytes, rounded up to whole pages.
    fn take(self: &Arc<Self>, len: usize) -> Result<Allocation, CudaError> {
        let what = || format!("{len} bytes of pinned memory for copies");
        let len = len.max(1).checked_next_multiple_of(PAGE);
        let len = len.ok_or_else(|| CudaError::Argument(format!("{}: too many", what())))?;
        if let Some(part) = self.find(len) {
            return Ok(part);
        }
        if self.device.is_started() {
            return Err(CudaError::Argument(format!(
                "{}: none is left, and the driver must not be asked for more while an executor \
                 runs; ask before it starts, or for more in CudaCopies::with_host_memory",
                what()
            )));
        }
        self.grow(len.max(CHUNK))?;
        let none = || CudaError::Argument(format!("{}: taken by others meanwhile", what()));
        self.find(len).ok_or_else(none)
    }

    /// Allocates from the first free part that is large enough.
    fn find(self: &Arc<Self>, len: usize) -> Option<Allocation> {
        let (host, device, chunk, offset) = {
            let mut chunks = self.chunks();
            let mut found = chunks.iter_mut().enumerate();
            let (chunk, offset, memory) = found.find_map(|(index, chunk)| {
                let offset = take_from(&mut chunk.free, len)?;
                Some((index, offset, &chunk.memory))
            })?;
            // SAFETY: the offset is inside the chunk's memory.
            let host = unsafe { memory.host().add(offset) };
            (host, DevicePtr(memory.device().0 + offset as u64), chunk, offset)
        };
        // SAFETY: `len` bytes of the chunk that were free.
        unsafe { host.as_ptr().write_bytes(0, len) };
        Some(Allocation { host, device, len, chunk, offset, arena: self.clone() })
    }
}

/// Takes `len` bytes from the first free part that is large enough; returns their offset.
fn take_from(free: &mut Vec<(usize, usize)>, len: usize) -> Option<usize> {
    let index = free.iter().position(|(_, size)| *size >= len)?;
    let (offset, size) = free[index];
    if size == len {
        free.remove(index);
    } else {
        free[index] = (offset + len, size - len);
    }
    Some(offset)
}

/// Frees a part and merges it with adjacent free parts.
fn put_back(free: &mut Vec<(usize, usize)>, offset: usize, len: usize) {
    let index = free.partition_point(|(other, _)| *other < offset);
    free.insert(index, (offset, len));
    if let Some((next, size)) = free.get(index + 1).copied()
        && offset + len == next
    {
        free[index].1 += size;
        free.remove(index + 1);
    }
    if let Some((before, size)) = index.checked_sub(1).map(|before| free[before])
        && before + size == offset
    {
        free[index - 1].1 += free[index].1;
        free.remove(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts allocated and freed in any order restore the original free list.
    #[test]
    fn free_memory_is_whole_again_in_every_order() {
        let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        for order in orders {
            let mut free = vec![(0, 100)];
            let parts = [10, 20, 30].map(|len| (take_from(&mut free, len).expect("room"), len));
            assert_eq!(
                (parts, free.as_slice()),
                ([(0, 10), (10, 20), (30, 30)], [(60, 40)].as_slice())
            );
            assert_eq!(take_from(&mut free, 41), None);
            for index in order {
                put_back(&mut free, parts[index].0, parts[index].1);
            }
            assert_eq!(free, [(0, 100)], "{order:?}");
        }
        let mut whole = vec![(0, 8)];
        assert_eq!((take_from(&mut whole, 8), whole.len()), (Some(0), 0));
    }
}
