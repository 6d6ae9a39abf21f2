#![allow(unsafe_code, reason = "memory that host and GPU share is allocated and registered here")]
//! Memory shared by host and GPU, and memory of the GPU.

use std::{ffi::c_void, fmt, ptr::NonNull, sync::Arc};

use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_IOMEMORY, CU_MEMHOSTREGISTER_PORTABLE, CUdeviceptr,
};
use nvme_driver::{Bus, DevicePtr, DmaMemory, ExternalMemory, platform::mmio};

use super::{
    device::{CudaDevice, Held, Pinned, Range, Registration, Resource},
    error::CudaError,
};

/// Alignment required by `SharedMemory` and queues; lengths are rounded up to it.
const ALIGN: usize = 4096;

/// Zeroed host memory, page aligned, pinned, and mapped into the GPU. Freed after drop, once no
/// executor of the device runs any more.
pub struct PinnedMemory {
    pinned: Pinned,
    held: Held,
}

// SAFETY: addresses; the memory is accessed through the owner of the addresses.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pinned { len, address, .. } = self.pinned;
        let device = self.held.device();
        write!(f, "PinnedMemory({len} bytes at {address:#x} of {device:?})")
    }
}

impl PinnedMemory {
    /// Returns the first byte's address in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.pinned.host
    }

    /// Returns the first byte's address in a kernel.
    #[must_use]
    pub fn device(&self) -> DevicePtr {
        DevicePtr(self.pinned.address)
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pinned.len
    }

    /// Returns true if the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pinned.len == 0
    }

    /// Converts the memory to a form that a [`nvme_driver::DmaSpace`] imports: queues and pools
    /// made in it have an address in the kernel.
    #[must_use]
    pub fn into_external(self) -> ExternalMemory {
        let (host, device, len) = (self.host(), self.device(), self.len());
        // SAFETY: the memory stays allocated until `self`, the owner, is dropped, and no reference
        // into it is ever made.
        unsafe { ExternalMemory::new(Some(host), Some(device), len, Arc::new(self)) }
    }
}

impl CudaDevice {
    /// Allocates `len` zeroed bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if `len` is too large, or [`CudaError::Call`].
    pub fn pinned(self: &Arc<Self>, len: usize) -> Result<PinnedMemory, CudaError> {
        if let Some(memory) = self.pinned_again(len) {
            return Ok(memory);
        }
        let what = || format!("allocating {len} bytes of pinned memory");
        let rounded = len.max(1).checked_next_multiple_of(ALIGN);
        let whole = rounded.and_then(|rounded| Some((rounded, rounded.checked_add(ALIGN)?)));
        let (rounded, whole) = whole
            .filter(|(_, whole)| isize::try_from(*whole).is_ok())
            .ok_or_else(|| CudaError::Argument(format!("{}: too many", what())))?;
        Ok(self.zeroed(self.pin(rounded, whole, &what())?))
    }

    /// Same as [`CudaDevice::pinned`], but only reuses parked memory, without a driver call.
    pub(super) fn pinned_again(self: &Arc<Self>, len: usize) -> Option<PinnedMemory> {
        let rounded = len.max(1).checked_next_multiple_of(ALIGN)?;
        Some(self.zeroed(self.recycled(rounded)?))
    }

    fn zeroed(self: &Arc<Self>, pinned: Pinned) -> PinnedMemory {
        // SAFETY: `len` bytes of the allocation, which nothing else uses.
        unsafe { pinned.host.as_ptr().write_bytes(0, pinned.len) };
        PinnedMemory { pinned, held: Held::new(self, Resource::Pinned(pinned)) }
    }

    /// Allocates `whole` bytes, of which `len` are aligned: the driver promises no alignment.
    fn pin(&self, len: usize, whole: usize, what: &str) -> Result<Pinned, CudaError> {
        let entered = self.enter()?;
        let mut base: *mut c_void = std::ptr::null_mut();
        let flags = CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: writes one address.
        let code = unsafe { (self.api.cuMemHostAlloc)(&raw mut base, whole, flags) };
        self.check(what, "cuMemHostAlloc", code)?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(CudaError::Argument(format!("{what}: cuMemHostAlloc returned null")));
        };
        let mapped = self.mapped(base, what);
        let address = match mapped {
            Ok(address) => address,
            Err(error) => {
                // SAFETY: allocated above, and not given out.
                let code = unsafe { (self.api.cuMemFreeHost)(base.as_ptr().cast()) };
                if let Err(error) = self.check(what, "cuMemFreeHost", code) {
                    tracing::error!(%error, "pinned memory leaks");
                }
                return Err(error);
            }
        };
        drop(entered);
        let offset = base.as_ptr().align_offset(ALIGN);
        // SAFETY: below ALIGN, by which the allocation is longer.
        let host = unsafe { base.add(offset) };
        Ok(Pinned { base, host, address: address + offset as u64, len })
    }

    /// Returns the kernel's address of the host address `host`. The context must be current.
    fn mapped(&self, host: NonNull<u8>, what: &str) -> Result<u64, CudaError> {
        let mut address: CUdeviceptr = 0;
        // SAFETY: writes one address.
        let code = unsafe {
            (self.api.cuMemHostGetDevicePointer_v2)(&raw mut address, host.as_ptr().cast(), 0)
        };
        self.check(what, "cuMemHostGetDevicePointer", code)?;
        Ok(address)
    }
}

/// Kind of memory that holds doorbells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DoorbellKind {
    /// Ordinary memory of the software controller.
    Memory,
    /// Registers of a PCIe function, mapped by VFIO.
    Io,
}

impl CudaDevice {
    /// Maps memory of a DMA space into the GPU and keeps it mapped for the devices.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if the host cannot reach the memory, or [`CudaError::Call`].
    pub fn register_memory(
        self: &Arc<Self>,
        memory: &Arc<dyn DmaMemory>,
    ) -> Result<Arc<Registration>, CudaError> {
        let Some(host) = memory.host() else {
            let text = "registering memory: it has no address in this process".into();
            return Err(CudaError::Argument(text));
        };
        let flags = CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE;
        self.register(host, memory.len(), flags, Arc::new(memory.clone()), "memory")
    }

    /// Maps a controller's doorbells into the GPU.
    ///
    /// # Errors
    /// Returns [`CudaError::Call`]; 800: the NVIDIA module lets only an administrator map another
    /// PCIe function's registers (its option PeerMappingOverride); 801: the system cannot. Returns
    /// [`CudaError::Doorbells`] for 1, which drivers before 570.133.07 return on Linux 6.12.
    pub fn register_doorbells(
        self: &Arc<Self>,
        bus: &Arc<dyn Bus>,
        kind: DoorbellKind,
    ) -> Result<Arc<Registration>, CudaError> {
        let page = bus.doorbells();
        let mut flags = CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE;
        if kind == DoorbellKind::Io {
            flags |= CU_MEMHOSTREGISTER_IOMEMORY;
            // VFIO populates pages at their first use, and the GPU driver needs pages that are
            // present. Reading a doorbell returns an undefined value, which is not used.
            for at in (0..page.len()).step_by(ALIGN) {
                // SAFETY: an aligned dword of the page, which stays mapped as long as it lives.
                let _ = unsafe { mmio::load_acquire32(page.host().byte_add(at)) };
            }
        }
        let what = format!("the doorbells of {}", bus.id());
        let mapped = self.register(page.host().cast(), page.len(), flags, Arc::new(page), &what);
        mapped.map_err(|error| {
            let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
            error.of_doorbells(release.unwrap_or_default().trim())
        })
    }

    pub(super) fn register(
        self: &Arc<Self>,
        host: NonNull<u8>,
        len: usize,
        flags: u32,
        owner: Arc<dyn std::any::Any + Send + Sync>,
        name: &str,
    ) -> Result<Arc<Registration>, CudaError> {
        let what = format!("mapping {name} ({len} bytes) into the GPU");
        let start = host.as_ptr().expose_provenance() as u64;
        let len = len.checked_next_multiple_of(ALIGN).filter(|len| *len > 0);
        let Some(len) = len.filter(|_| start.is_multiple_of(ALIGN as u64)) else {
            let text = format!("{what}: it does not begin at a page ({start:#x}), or is empty");
            return Err(CudaError::Argument(text));
        };
        let same = |range: &Range| {
            let same = range.start == start && range.len == len;
            if same { range.registration.upgrade() } else { None }
        };
        if let Some(registration) = self.find_range(same) {
            return Ok(registration);
        }
        let entered = self.enter()?;
        // SAFETY: the range is mapped as long as `owner` lives, and it lives until the range is
        // unregistered.
        let code = unsafe { (self.api.cuMemHostRegister_v2)(host.as_ptr().cast(), len, flags) };
        self.check(what.as_str(), "cuMemHostRegister", code)?;
        let held = Held::new(self, Resource::Registered { host, _owner: owner });
        let address = self.mapped(host, &what)?;
        drop(entered);
        let registration = Arc::new(Registration { address, len, held });
        let weak = Arc::downgrade(&registration);
        self.add_range(Range { start, len, registration: weak });
        Ok(registration)
    }

    /// Returns the kernel's address of the host address `host`, and its registration.
    pub(super) fn reach(&self, host: u64) -> Option<(u64, Arc<Registration>)> {
        self.find_range(|range| {
            let offset = host.checked_sub(range.start).filter(|at| *at < range.len as u64)?;
            let registration = range.registration.upgrade()?;
            Some((registration.address + offset, registration))
        })
    }
}

/// GPU page size, the granularity of mappings for the host and for other devices.
pub(super) const GPU_PAGE: usize = 64 << 10;

/// Memory of the GPU, in GPU pages of its own. Freed after drop, once no executor of the device
/// runs any more.
pub struct DeviceMemory {
    address: u64,
    len: usize,
    held: Held,
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, len, held, .. } = self;
        write!(f, "DeviceMemory({len} bytes at {address:#x} of {:?})", held.device())
    }
}

impl CudaDevice {
    /// Allocates `len` bytes of GPU memory, uninitialised, aligned to a GPU page (64 KiB). May wait
    /// for running kernels: call it before an executor starts.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if `len` is too large, or [`CudaError::Call`].
    pub fn allocate(self: &Arc<Self>, len: usize) -> Result<DeviceMemory, CudaError> {
        let what = || format!("allocating {len} bytes of GPU memory");
        // The driver guarantees less alignment.
        let whole = len.max(1).checked_next_multiple_of(GPU_PAGE);
        let whole = whole.and_then(|whole| whole.checked_add(GPU_PAGE));
        let whole = whole.filter(|whole| isize::try_from(*whole).is_ok());
        let whole = whole.ok_or_else(|| CudaError::Argument(format!("{}: too many", what())))?;
        let _entered = self.enter()?;
        let mut base: CUdeviceptr = 0;
        // SAFETY: writes one address.
        let code = unsafe { (self.api.cuMemAlloc_v2)(&raw mut base, whole) };
        self.check(what(), "cuMemAlloc", code)?;
        let held = Held::new(self, Resource::Memory(base));
        Ok(DeviceMemory { address: base.next_multiple_of(GPU_PAGE as u64), len, held })
    }
}

impl DeviceMemory {
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

    /// Converts the memory to a form that a [`nvme_driver::DmaSpace`] imports. It has only a GPU
    /// address, and stays allocated as long as anything is mapped.
    #[must_use]
    pub fn into_external(self) -> ExternalMemory {
        let (device, len) = (self.device(), self.len());
        // SAFETY: the memory stays allocated until `self`, the owner, is dropped; no reference into
        // it can exist, as the process cannot reach it.
        unsafe { ExternalMemory::new(None, Some(device), len, Arc::new(self)) }
    }

    /// Copies `bytes` to `offset`; returns when the copy is done.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if the range is out of bounds, or [`CudaError::Call`].
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.inside(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let device = self.held.device();
        let _entered = device.enter()?;
        let from = bytes.as_ptr().cast();
        // SAFETY: both ranges have this length.
        let code = unsafe { (device.api.cuMemcpyHtoD_v2)(to, from, bytes.len()) };
        device.check("copying to the GPU", "cuMemcpyHtoD", code)?;
        // The call returns once the driver has the bytes, possibly before they reach the GPU, and
        // other streams do not wait for that. A copy back does, and returns when it is done.
        self.read(offset + bytes.len() - 1, &mut [0])
    }

    /// Copies from `offset` into `bytes`; returns when the copy is done.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        let from = self.inside(offset, bytes.len())?;
        let device = self.held.device();
        let _entered = device.enter()?;
        let to = bytes.as_mut_ptr().cast();
        // SAFETY: both ranges have this length.
        let code = unsafe { (device.api.cuMemcpyDtoH_v2)(to, from, bytes.len()) };
        device.check("copying from the GPU", "cuMemcpyDtoH", code)
    }

    fn inside(&self, offset: usize, len: usize) -> Result<u64, CudaError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(self.address + offset as u64);
        }
        let total = self.len;
        Err(CudaError::Argument(format!("{len} bytes at {offset} of {total} bytes of GPU memory")))
    }
}
