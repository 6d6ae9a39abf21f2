#![allow(unsafe_code, reason = "calls libcuda, and reads words that streams write")]
//! GPU memory of another process, and how far that process's streams have got.

use std::{
    any::Any,
    fmt, mem,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys::{
    CUdeviceptr, CUipcMem_flags, CUipcMemHandle, CUpointer_attribute as Attribute,
};
use gio_uring::RawStream;
use nvme_driver::{DevicePtr, platform::mmio};

use super::{
    device::{CudaDevice, Held, Registration, Resource},
    error::CudaError,
    gdr::pointer_attribute,
};

/// Bytes of a handle (`CU_IPC_HANDLE_SIZE`).
const HANDLE_BYTES: usize = 64;
const WORD_BYTES: usize = size_of::<u32>();

/// A range of GPU memory, as another process names it: plain data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuHandle {
    /// PCI address of the GPU: ordinals differ between processes.
    pub gpu: String,
    /// CUDA's handle of the whole allocation.
    pub handle: Vec<u8>,
    /// Offset of the range in the allocation, in bytes: allocators divide what the driver gives.
    pub offset: u64,
    /// Length of the range in bytes.
    pub bytes: u64,
}

/// GPU memory of another process, mapped into this one. Unmapped after drop, once no executor of
/// the device runs any more.
///
/// CUDA does not define what an access does once the other process has freed the memory, or has
/// ended: drop this as soon as that is known.
pub struct ForeignMemory {
    address: u64,
    len: usize,
    held: Held,
}

impl fmt::Debug for ForeignMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, len, held } = self;
        write!(f, "ForeignMemory({len} bytes at {address:#x} of {:?})", held.device())
    }
}

impl ForeignMemory {
    /// Returns the first byte's address in a kernel.
    #[must_use]
    pub fn device(&self) -> DevicePtr {
        DevicePtr(self.address)
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl GpuHandle {
    /// Returns what names `len` bytes of GPU memory of this process to another one.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if the range is not in one allocation of `cuMemAlloc`, which
    /// is all that CUDA's handles are for, or [`CudaError::Call`].
    pub fn of(device: &Arc<CudaDevice>, at: DevicePtr, len: usize) -> Result<Self, CudaError> {
        let DevicePtr(at) = at;
        let what = || format!("sharing {len} bytes at {at:#x} with another process");
        let capable = Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        let capable = pointer_attribute(device, at, capable)?;
        if capable == 0 {
            return Err(CudaError::Argument(format!(
                "{}: CUDA shares memory of cuMemAlloc only, and this was made by cuMemCreate or \
                 is of a pool; with PyTorch, leave expandable_segments out of \
                 PYTORCH_CUDA_ALLOC_CONF",
                what()
            )));
        }
        let start =
            pointer_attribute(device, at, Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?;
        let room = pointer_attribute(device, at, Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?;
        let offset = at.saturating_sub(start);
        if offset.checked_add(len as u64).is_none_or(|end| end > room) {
            let text = format!("{}: its allocation has {room} bytes at {start:#x}", what());
            return Err(CudaError::Argument(text));
        }
        let _entered = device.enter()?;
        let mut handle = CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: writes one handle.
        let code = unsafe { (device.api.cuIpcGetMemHandle)(&raw mut handle, start) };
        device.check(what(), "cuIpcGetMemHandle", code)?;
        let gpu = device.report().pci.clone();
        let handle = handle.reserved.map(|byte| byte as u8).to_vec();
        Ok(Self { gpu, handle, offset, bytes: len as u64 })
    }

    /// Maps GPU memory of another process. It may say anything: that is checked.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if the handle is none, or the range leaves the allocation;
    /// [`CudaError::Call`]: the other process has ended or freed it, is this process, or has the
    /// memory on a GPU that this one does not reach.
    pub fn open(&self, device: &Arc<CudaDevice>) -> Result<ForeignMemory, CudaError> {
        let Self { gpu, handle, offset, bytes } = self;
        let what = || format!("mapping {bytes} bytes of another process on GPU {gpu}");
        let wrong = |why: String| CudaError::Argument(format!("{}: {why}", what()));
        let reserved: [u8; HANDLE_BYTES] = handle.as_slice().try_into().map_err(|_| {
            wrong(format!("its handle has {} bytes instead of {HANDLE_BYTES}", handle.len()))
        })?;
        let reserved = reserved.map(|byte| byte as std::ffi::c_char);
        let entered = device.enter()?;
        let mut base: CUdeviceptr = 0;
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let opened = CUipcMemHandle { reserved };
        // SAFETY: writes one address; the driver knows its handles.
        let code = unsafe { (device.api.cuIpcOpenMemHandle_v2)(&raw mut base, opened, flags) };
        device.check(what(), "cuIpcOpenMemHandle", code)?;
        let held = Held::new(device, Resource::Foreign(base));
        drop(entered);
        let room = pointer_attribute(device, base, Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?;
        let address = base.checked_add(*offset).zip(offset.checked_add(*bytes));
        match (address, usize::try_from(*bytes)) {
            (Some((address, end)), Ok(len)) if end <= room => {
                Ok(ForeignMemory { address, len, held })
            }
            _ => Err(wrong(format!("{offset} bytes into an allocation of {room} bytes"))),
        }
    }
}

/// Words of memory that two processes share, by which streams of one tell the other how far they
/// have got. The other one reads them, and needs no GPU for it.
pub struct StreamMarks {
    device: Arc<CudaDevice>,
    words: Arc<Registration>,
    host: NonNull<u32>,
    room: usize,
    /// By number of the word: the stream, and its last value.
    streams: Mutex<Vec<(RawStream, u32)>>,
}

// SAFETY: an address of memory that `words` keeps, whose words are accessed atomically.
unsafe impl Send for StreamMarks {}
// SAFETY: as above.
unsafe impl Sync for StreamMarks {}

impl fmt::Debug for StreamMarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamMarks({:?}, {} streams)", self.device, self.streams().len())
    }
}

impl StreamMarks {
    /// Maps the words into the GPU.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] for memory that does not begin at a page, or
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// `len` bytes from `host` on are zero, of whole pages, stay mapped until `owner` is dropped,
    /// and are accessed by atomic reads only.
    pub unsafe fn new(
        device: &Arc<CudaDevice>,
        host: NonNull<u8>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, CudaError> {
        use cudarc::driver::sys::{CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE};
        let flags = CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE;
        let words = device.register(host, len, flags, owner, "marks of streams")?;
        let room = len / WORD_BYTES;
        let (host, streams) = (host.cast(), Mutex::default());
        Ok(Self { device: device.clone(), words, host, room, streams })
    }

    fn streams(&self) -> MutexGuard<'_, Vec<(RawStream, u32)>> {
        // A value is changed only after its write was enqueued.
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the current position of a stream: returns the number of a word, and the value that it
    /// has or has passed once everything enqueued so far is done.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if there is no word for another stream, or
    /// [`CudaError::Call`].
    pub fn mark(&self, stream: RawStream) -> Result<(u32, u32), CudaError> {
        let mut streams = self.streams();
        let found = streams.iter().position(|(known, _)| *known == stream);
        let at = found.unwrap_or(streams.len());
        if at == self.room {
            let text = format!("marking a stream: there are words for {} streams", self.room);
            return Err(CudaError::Argument(text));
        }
        let value = found.map_or(1, |at| streams[at].1.wrapping_add(1));
        let word = DevicePtr(self.words.device().0 + (at * WORD_BYTES) as u64);
        // SAFETY: a stream of this GPU (`RawStream::new`); drop keeps the words until it was there.
        unsafe { self.device.stream_write(stream.handle(), word, value) }?;
        match found {
            Some(at) => streams[at].1 = value,
            None => streams.push((stream, value)),
        }
        Ok((at as u32, value))
    }
}

/// Returns true if a word has a value, or has passed it.
#[must_use]
pub fn is_reached(word: u32, value: u32) -> bool {
    word.wrapping_sub(value) as i32 >= 0
}

impl Drop for StreamMarks {
    fn drop(&mut self) {
        let is_past = |(at, (_, value)): (usize, &(RawStream, u32))| {
            // SAFETY: one of the words, which `words` keeps mapped.
            let word = unsafe { mmio::load_acquire32(self.host.add(at)) };
            is_reached(word, *value)
        };
        let are_past = self.streams().iter().enumerate().all(is_past);
        if !are_past && self.device.healthy().is_ok() {
            tracing::warn!("streams have still to write their marks: the memory leaks");
            mem::forget(self.words.clone());
        }
    }
}
