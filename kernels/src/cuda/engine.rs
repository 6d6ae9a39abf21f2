#![allow(unsafe_code, reason = "takes an engine's word for memory of the GPU")]
//! Memory of the GPU that somebody else allocated: the engine's KV pool.
//!
//! The engine lends it with an owner, and has it back when the owner is dropped. Everything that
//! is made of the memory holds the owner, and lets go of it only after its own mapping is undone:
//! an engine that frees in the owner's drop, or waits for it, frees nothing that is still mapped.

use std::{any::Any, fmt, sync::Arc};

use cudarc::driver::sys::CUpointer_attribute;
use nvme_driver::{DevicePtr, ExternalMemory};

use super::{
    device::CudaDevice,
    error::CudaError,
    ipc::IpcMemory,
    memory::{DeviceMemory, Span},
};

/// CU_MEMORYTYPE_DEVICE.
const TYPE_DEVICE: u64 = 2;

/// Memory of the GPU that an engine lent.
pub struct EngineMemory {
    address: u64,
    len: usize,
    device: Arc<CudaDevice>,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for EngineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, len, device, .. } = self;
        write!(f, "EngineMemory({len} bytes at {address:#x} of {device:?})")
    }
}

impl CudaDevice {
    /// Borrows `len` bytes at `at` from an engine, until `owner` was dropped by everything that is
    /// made of them. Waits for nothing.
    ///
    /// # Errors
    /// [`CudaError::Argument`] for what is not memory of this GPU, or not all of it, as far as the
    /// driver can tell.
    ///
    /// # Safety
    /// The bytes stay allocated until `owner` was dropped, and the engine uses no part of them that
    /// an operation under way moves.
    pub unsafe fn adopt(
        self: &Arc<Self>,
        at: DevicePtr,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<EngineMemory, CudaError> {
        let wrong = |why: String| {
            CudaError::Argument(format!(
                "{len} bytes at {:#x}, offered as memory of GPU {}: {why}",
                at.0,
                self.report().ordinal
            ))
        };
        let ask = |attribute| self.pointer_attribute(at, attribute);
        match ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
            Ok(TYPE_DEVICE) => {}
            Ok(_) => return Err(wrong("it is memory of the host; give its staging path".into())),
            Err(error) => {
                self.healthy()?;
                return Err(wrong(format!("CUDA does not know it ({error})")));
            }
        }
        // A 32-bit number.
        let ordinal = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)? as u32;
        if ordinal != self.report().ordinal {
            return Err(wrong(format!("it is memory of GPU {ordinal}")));
        }
        let start = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?;
        let size = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?;
        let left = size.saturating_sub(at.0.saturating_sub(start));
        if len == 0 || len as u64 > left {
            return Err(wrong(format!("{left} bytes are allocated there")));
        }
        Ok(EngineMemory { address: at.0, len, device: self.clone(), _owner: owner })
    }

    /// What the driver knows of an address; a smaller value is in the lower bytes.
    pub(super) fn pointer_attribute(
        &self,
        at: DevicePtr,
        attribute: CUpointer_attribute,
    ) -> Result<u64, CudaError> {
        let _entered = self.enter()?;
        let mut value = 0u64;
        // SAFETY: writes at most eight bytes: all of the attributes that are asked for here are a
        // number or an address.
        let code =
            unsafe { (self.api.cuPointerGetAttribute)((&raw mut value).cast(), attribute, at.0) };
        let what = format!("asking about the memory at {:#x}", at.0);
        self.check(what, "cuPointerGetAttribute", code)?;
        Ok(u64::from_le(value))
    }
}

impl EngineMemory {
    /// First byte in a kernel.
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
        self.span().write(&self.device, offset, bytes)
    }

    /// Copies from `offset` into `bytes`, and waits for that.
    ///
    /// # Errors
    /// As [`DeviceMemory::write`].
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.span().read(&self.device, offset, bytes)
    }

    fn span(&self) -> Span {
        Span { address: self.address, len: self.len }
    }
}

/// Memory of a GPU, whoever allocated it.
#[derive(Debug)]
pub enum GpuMemory {
    /// Allocated here.
    Own(DeviceMemory),
    /// Lent by an engine in this process.
    Engine(EngineMemory),
    /// Of another process.
    Opened(IpcMemory),
}

impl GpuMemory {
    /// First byte in a kernel.
    #[must_use]
    pub fn device(&self) -> DevicePtr {
        match self {
            Self::Own(memory) => memory.device(),
            Self::Engine(memory) => memory.device(),
            Self::Opened(memory) => memory.device(),
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Own(memory) => memory.len(),
            Self::Engine(memory) => memory.len(),
            Self::Opened(memory) => memory.len(),
        }
    }

    /// Whether there are no bytes at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<CudaDevice> {
        match self {
            Self::Own(memory) => memory.gpu(),
            Self::Engine(memory) => &memory.device,
            Self::Opened(memory) => memory.gpu(),
        }
    }

    /// As memory that a [`nvme_driver::DmaSpace`] imports. It has an address on the GPU only, and
    /// is kept as long as something is mapped.
    #[must_use]
    pub fn into_external(self) -> ExternalMemory {
        let (device, len) = (self.device(), self.len());
        // SAFETY: the memory stays allocated until `self`, the owner, is dropped; no reference into
        // memory that the process cannot reach exists.
        unsafe { ExternalMemory::new(None, Some(device), len, Arc::new(self)) }
    }
}

impl From<DeviceMemory> for GpuMemory {
    fn from(memory: DeviceMemory) -> Self {
        Self::Own(memory)
    }
}

impl From<EngineMemory> for GpuMemory {
    fn from(memory: EngineMemory) -> Self {
        Self::Engine(memory)
    }
}

impl From<IpcMemory> for GpuMemory {
    fn from(memory: IpcMemory) -> Self {
        Self::Opened(memory)
    }
}
