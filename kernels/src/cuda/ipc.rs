#![allow(unsafe_code, reason = "opens memory and events of other processes")]
//! GPU memory and events across processes of one machine.
//!
//! A handle is plain bytes: send it over a socket or a file. Who opens it must be another process,
//! and on the same GPU. CUDA does not tell one process what the other one frees: the process that
//! exported keeps its memory and its event until the other one says that it closed them.

use std::{
    ffi::{c_char, c_uint},
    fmt,
    sync::Arc,
};

use cudarc::driver::sys::{
    CUdeviceptr, CUevent, CUevent_flags, CUipcEventHandle, CUipcMem_flags_enum, CUipcMemHandle,
    CUpointer_attribute,
};
use gio_uring::RawStream;
use nvme_driver::DevicePtr;

use super::{
    device::{CudaDevice, Held, Resource},
    error::{CudaError, ErrorCode},
    memory::{DeviceMemory, Span},
};

/// Bytes of CUDA's own handles.
const HANDLE: usize = 64;

/// GPU memory for another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcMemoryHandle {
    /// Of the whole allocation.
    bytes: [u8; HANDLE],
    offset: u64,
    len: u64,
}

impl IpcMemoryHandle {
    /// Length of [`IpcMemoryHandle::to_bytes`].
    pub const BYTES: usize = HANDLE + 16;

    /// To be sent.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut all = [0; Self::BYTES];
        all[..HANDLE].copy_from_slice(&self.bytes);
        all[HANDLE..HANDLE + 8].copy_from_slice(&self.offset.to_le_bytes());
        all[HANDLE + 8..].copy_from_slice(&self.len.to_le_bytes());
        all
    }

    /// As it was sent. Whatever the bytes are, [`CudaDevice::open_memory`] looks at them.
    #[must_use]
    pub fn from_bytes(all: &[u8; Self::BYTES]) -> Self {
        let number = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&all[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let mut bytes = [0; HANDLE];
        bytes.copy_from_slice(&all[..HANDLE]);
        Self { bytes, offset: number(HANDLE), len: number(HANDLE + 8) }
    }
}

impl DeviceMemory {
    /// A handle with which another process reaches this memory, for as long as it exists.
    ///
    /// # Errors
    /// [`CudaError::Call`]: this GPU or this system has no IPC.
    pub fn export(&self) -> Result<IpcMemoryHandle, CudaError> {
        let (device, base) = (self.gpu(), self.base());
        let mut handle = CUipcMemHandle { reserved: [0; HANDLE] };
        let _entered = device.enter()?;
        // SAFETY: memory that is allocated; a handle is written.
        let code = unsafe { (device.api.cuIpcGetMemHandle)(&raw mut handle, base) };
        device.check("exporting GPU memory", "cuIpcGetMemHandle", code)?;
        let bytes = handle.reserved.map(|byte| byte as u8);
        Ok(IpcMemoryHandle { bytes, offset: self.device().0 - base, len: self.len() as u64 })
    }
}

/// GPU memory of another process. Closed when dropped, once no executor of the device runs any
/// more.
pub struct IpcMemory {
    address: u64,
    len: usize,
    held: Held,
}

impl fmt::Debug for IpcMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, len, held } = self;
        write!(f, "IpcMemory({len} bytes at {address:#x} of {:?})", held.device())
    }
}

impl CudaDevice {
    /// Opens another process's memory. May wait for kernels that run: before an executor starts.
    ///
    /// # Errors
    /// [`CudaError::Argument`] for bytes that are no handle, [`CudaError::Call`], also for a handle
    /// of this process.
    ///
    /// # Safety
    /// The other process keeps the memory until the result was dropped, and after that until no
    /// executor of this device is started.
    pub unsafe fn open_memory(
        self: &Arc<Self>,
        handle: &IpcMemoryHandle,
    ) -> Result<IpcMemory, CudaError> {
        let what = "opening another process's GPU memory";
        let end = handle.offset.checked_add(handle.len);
        let Ok(len) = usize::try_from(handle.len) else {
            return Err(CudaError::Argument(format!("{what}: these bytes are no handle")));
        };
        let raw = CUipcMemHandle { reserved: handle.bytes.map(|byte| byte as c_char) };
        let flags = CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        let mut base: CUdeviceptr = 0;
        let _entered = self.enter()?;
        // SAFETY: an address is written.
        let code = unsafe { (self.api.cuIpcOpenMemHandle_v2)(&raw mut base, raw, flags) };
        self.check(what, "cuIpcOpenMemHandle", code)?;
        let held = Held::new(self, Resource::Opened(base));
        let size = CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        let size = self.pointer_attribute(DevicePtr(base), size)?;
        if end.is_none_or(|end| end > size) {
            let text = format!("{what}: {size} bytes, not {len} at {}", handle.offset);
            return Err(CudaError::Argument(text));
        }
        Ok(IpcMemory { address: base + handle.offset, len, held })
    }
}

impl IpcMemory {
    /// First byte in a kernel of this process.
    #[must_use]
    pub fn device(&self) -> DevicePtr {
        DevicePtr(self.address)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `bytes` to `offset`, and waits for that.
    ///
    /// # Errors
    /// As [`DeviceMemory::write`].
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        self.span().write(self.held.device(), offset, bytes)
    }

    /// Copies from `offset` into `bytes`, and waits for that.
    ///
    /// # Errors
    /// As [`DeviceMemory::write`].
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.span().read(self.held.device(), offset, bytes)
    }

    pub(super) fn gpu(&self) -> &Arc<CudaDevice> {
        self.held.device()
    }

    fn span(&self) -> Span {
        Span { address: self.address, len: self.len }
    }
}

/// An event for another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcEventHandle([u8; HANDLE]);

impl IpcEventHandle {
    /// Length of [`IpcEventHandle::to_bytes`].
    pub const BYTES: usize = HANDLE;

    /// To be sent.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    /// As it was sent.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self(*bytes)
    }
}

/// A point in a stream that streams of several processes know.
pub struct SharedEvent {
    handle: CUevent,
    held: Held,
}

// SAFETY: a handle, which any thread may pass to the driver.
unsafe impl Send for SharedEvent {}
// SAFETY: as above.
unsafe impl Sync for SharedEvent {}

impl fmt::Debug for SharedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedEvent({:?})", self.held.device())
    }
}

impl SharedEvent {
    /// An event without a time, which counts as reached.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        let _entered = device.enter()?;
        let mut handle: CUevent = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            | CUevent_flags::CU_EVENT_INTERPROCESS as u32;
        // SAFETY: writes one handle.
        let code = unsafe { (device.api.cuEventCreate)(&raw mut handle, flags) };
        device.check("making an event for several processes", "cuEventCreate", code)?;
        Ok(Self { handle, held: Held::new(device, Resource::Event(handle)) })
    }

    /// A handle with which another process opens it, for as long as `self` lives.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn export(&self) -> Result<IpcEventHandle, CudaError> {
        let device = self.held.device();
        let mut handle = CUipcEventHandle { reserved: [0; HANDLE] };
        let _entered = device.enter()?;
        // SAFETY: an event that is alive; a handle is written.
        let code = unsafe { (device.api.cuIpcGetEventHandle)(&raw mut handle, self.handle) };
        device.check("exporting an event", "cuIpcGetEventHandle", code)?;
        Ok(IpcEventHandle(handle.reserved.map(|byte| byte as u8)))
    }

    /// Moves it to the end of `stream`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// `stream` belongs to the event's device.
    pub unsafe fn record(&self, stream: RawStream) -> Result<(), CudaError> {
        let device = self.held.device();
        let _entered = device.enter()?;
        let stream = std::ptr::with_exposed_provenance_mut(stream.handle() as usize);
        // SAFETY: both are alive.
        let code = unsafe { (device.api.cuEventRecord)(self.handle, stream) };
        device.check("recording an event", "cuEventRecord", code)
    }

    /// What is put on `stream` from now on starts when the event was reached where it is now.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// `stream` belongs to the event's device.
    pub unsafe fn make_wait(&self, stream: RawStream) -> Result<(), CudaError> {
        let device = self.held.device();
        let _entered = device.enter()?;
        let stream = std::ptr::with_exposed_provenance_mut(stream.handle() as usize);
        // SAFETY: both are alive.
        let code = unsafe { (device.api.cuStreamWaitEvent)(stream, self.handle, 0) };
        device.check("making a stream wait", "cuStreamWaitEvent", code)
    }

    /// Whether everything before it is done.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        let device = self.held.device();
        let _entered = device.enter()?;
        // SAFETY: an event that is alive.
        match unsafe { (device.api.cuEventQuery)(self.handle) } {
            ErrorCode::NOT_READY => Ok(false),
            code => device.check("asking for an event", "cuEventQuery", code).map(|()| true),
        }
    }
}

impl CudaDevice {
    /// Opens another process's event.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// The other process keeps the event until the result was dropped, and after that until no
    /// executor of this device is started.
    pub unsafe fn open_event(
        self: &Arc<Self>,
        handle: &IpcEventHandle,
    ) -> Result<SharedEvent, CudaError> {
        let raw = CUipcEventHandle { reserved: handle.0.map(|byte| byte as c_char) };
        let mut event: CUevent = std::ptr::null_mut();
        let _entered = self.enter()?;
        // SAFETY: a handle is written.
        let code = unsafe { (self.api.cuIpcOpenEventHandle)(&raw mut event, raw) };
        self.check("opening another process's event", "cuIpcOpenEventHandle", code)?;
        Ok(SharedEvent { handle: event, held: Held::new(self, Resource::Event(event)) })
    }
}
