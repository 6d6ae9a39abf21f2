#![allow(unsafe_code, reason = "calls libcuda, and reads a word that a stream writes")]
//! Copies between this process and the GPU, for the software controller and for the proof of a
//! route: on a stream of their own, in batches, and done without a call of the driver.
//!
//! Behind every batch the stream writes the batch's number to a pinned word. Who asks whether a
//! batch is done reads that word; the driver is asked only when the word has not come for a
//! while, because a lost GPU never writes it.
//!
//! Pinned memory is taken in large parts beforehand and divided here: the driver may wait for
//! kernels when it allocates some, and the kernel of a started executor may wait for us.

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

/// Pinned memory that [`CudaCopies::new`] takes: the software controllers of a domain ask for 64
/// MiB with their first transfer, which may come when a kernel runs; and some for others.
const HOST_BYTES: usize = 80 << 20;
/// By how much it grows.
const CHUNK: usize = 16 << 20;
/// What [`CopyEngine::host_memory`] aligns to.
const PAGE: usize = 4096;
/// Copies that one call of the driver gets.
const BATCH: usize = 1024;
/// Polls of the word between two queries of the driver.
const POLLS_PER_QUERY: u32 = 64;
/// How long copies may take that were started before something else failed. A batch is at most
/// gigabytes, and a link moves some of them in a second.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Copies between this process and a GPU: the [`CopyEngine`] of CUDA.
///
/// Nothing here waits for kernels, so all of it may be called while an executor is started, with
/// two exceptions: [`CudaCopies::new`], and [`CopyEngine::host_memory`] when the memory taken
/// beforehand is used up, which is an error then. Copies go on beside a resident kernel.
///
/// Copies are asynchronous from and to memory of [`CopyEngine::host_memory`] or other pinned
/// memory. With other memory they are right, too, but the driver may do them at once, in the
/// caller's time.
///
/// When a batch is refused after parts of it were started, `submit` waits for these parts and then
/// returns the error: none is under way any more, but some bytes may have been copied.
pub struct CudaCopies {
    device: Arc<CudaDevice>,
    // Leaked together when the stream does not become idle.
    stream: ManuallyDrop<CudaStream>,
    word: ManuallyDrop<PinnedMemory>,
    arena: Arc<Arena>,
    queue: Mutex<Queue>,
}

/// How many copies are put on the stream at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// `cuMemcpyBatchAsync_v2`, of CUDA 13.0.
    Batch,
    /// `cuMemcpyBatchAsync`, of CUDA 12.8.
    BatchOf12,
    /// One call for each.
    Single,
}

struct Queue {
    /// Batches submitted.
    submitted: u64,
    call: Call,
    /// Polls of the word that found it where it was.
    polls: u32,
    /// Nothing is known of copies any more.
    failed: Option<CopyError>,
    // One call's worth, allocated once.
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
    /// A stream for copies and 80 MiB of pinned memory: what the software controllers of one domain
    /// want, and a little more. May wait for kernels: before an executor starts.
    ///
    /// # Errors
    /// [`CudaError::Call`], mostly without memory.
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        Self::with_host_memory(device, HOST_BYTES)
    }

    /// As [`CudaCopies::new`], with so much memory for [`CopyEngine::host_memory`]: all that is
    /// going to be asked for while an executor is started.
    ///
    /// # Errors
    /// As [`CudaCopies::new`].
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
        // Both, before either is kept from being dropped.
        let (stream, word) = (CudaStream::new(device, None)?, device.pinned(PAGE)?);
        Ok(Self {
            device: device.clone(),
            stream: ManuallyDrop::new(stream),
            word: ManuallyDrop::new(word),
            arena: Arc::new(arena),
            queue: Mutex::new(queue),
        })
    }

    /// Whether the driver takes whole batches; else it is called for every copy.
    #[must_use]
    pub fn is_batched(&self) -> bool {
        self.queue().call != Call::Single
    }

    /// The GPU.
    #[must_use]
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Counters, and vectors that are filled anew each time.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn word(&self) -> u32 {
        // SAFETY: the first word of a page that lives as long as `self`; the stream writes it
        // whole.
        unsafe { mmio::load_acquire32(self.word.host().cast()) }
    }

    /// Whether everything on the stream is done.
    fn is_idle(&self) -> Result<bool, CudaError> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream lives as long as `self`.
        let code = unsafe { (self.device.api.cuStreamQuery)(handle(&self.stream)) };
        match code {
            ErrorCode::NOT_READY => Ok(false),
            code => self.device.check("copying", "cuStreamQuery", code).map(|()| true),
        }
    }

    /// Waits until everything on the stream is done.
    fn drain(&self) -> Result<(), CudaError> {
        let start = Instant::now();
        while !self.is_idle()? {
            if start.elapsed() > TIMEOUT {
                let text = format!("copies did not end within {} s", TIMEOUT.as_secs());
                return Err(CudaError::Argument(text));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Puts the copies on the stream; a part of them may be there when it fails.
    ///
    /// # Safety
    /// As [`CopyEngine::submit`].
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
    /// As [`CopyEngine::submit`]; the context is current.
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
        // The places are hints for managed memory only, of which there is none.
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
                // SAFETY: three arrays of `count` items and one of one, which are read before the
                // call returns; what they name is the caller's promise.
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
    /// As [`CopyEngine::submit`]; the context is current.
    unsafe fn single(&self, copy: &DeviceCopy) -> Result<(), CudaError> {
        let DeviceCopy { host, device, len, direction } = *copy;
        let (api, host, stream) = (self.device.api, host.as_ptr().cast(), handle(&self.stream));
        // SAFETY: both ranges are as long, and stay: the caller's promise.
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

    /// The driver is asked what became of the copies, because the word does not come.
    fn ask(&self, queue: &mut Queue, fence: CopyFence) -> Result<bool, CopyError> {
        let error = match self.is_idle() {
            Ok(false) => return Ok(false),
            // The stream got to its end between the poll and the query.
            Ok(true) if queue.done(self.word()) >= fence.0 => return Ok(true),
            Ok(true) => "the stream is at its end and did not write its word".into(),
            Err(error) => error.to_string(),
        };
        Err(queue.fail(error))
    }
}

impl Queue {
    /// Batches that are done, of which the stream wrote the lower half.
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
        // Copies of unknown state may go on in memory that came back.
        if let Some(error) = &self.queue().failed {
            return Err(error.clone());
        }
        let part = self.arena.take(len).map_err(|error| CopyError { cause: error.to_string() })?;
        let (host, device, len) = (part.host, part.device, part.len);
        // SAFETY: a part of pinned memory that only its owner uses until `part`, the owner, is
        // dropped, and into which nothing ever makes a reference.
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
        // Of a number that was given out and is not half of all numbers ago.
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
        // The word must not be freed, or handed out again, under a stream that writes it.
        if let Err(error) = self.drain() {
            tracing::error!(%error, "dropping a stream whose copies may go on: leaked");
            // Whoever still has memory of it keeps it; what is back is no longer handed out.
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
    /// Offsets and lengths, ascending, never two that touch.
    free: Vec<(usize, usize)>,
}

/// A part of a chunk, which goes back to it.
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
        // The lists of free parts are right between the calls below, none of which panics.
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes another chunk from the driver.
    fn grow(&self, len: usize) -> Result<(), CudaError> {
        let memory = self.device.pinned(len)?;
        let free = vec![(0, memory.len())];
        self.chunks().push(Chunk { memory, free });
        Ok(())
    }

    /// `len` zeroed bytes, rounded up to whole pages.
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

    /// The first part that is large enough.
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

/// The offset of `len` bytes that were free, in the first part that has so many.
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

/// Makes a part free again, one with its neighbours.
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

    /// Parts taken and given back in every order leave what there was.
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
