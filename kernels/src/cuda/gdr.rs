#![allow(unsafe_code, reason = "calls libgdrapi, which maps memory of the GPU into this process")]
//! GDRCopy: memory of the GPU with an address in this process.
//!
//! The mapping goes through the GPU's BAR, so that other PCIe devices reach it as well: a VFIO
//! container maps it for drives that read and write GPU memory directly. The library is opened at
//! run time, like libcuda; names and types used here are those of its header.
//!
//! A mapping is undone in a fixed order: the mapping, the pin, the memory. Nothing revokes the
//! mapping when memory is freed beneath it, so [`GdrMapping`] owns the memory it maps, and if one
//! of the first two steps fails, it leaks the rest.

use std::{
    any::Any,
    ffi::{c_int, c_uint, c_ulong, c_void},
    fmt,
    mem::ManuallyDrop,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys::CUpointer_attribute;
use libloading::Library;
use nvme_driver::{DevicePtr, ExternalMemory};

use super::{
    device::CudaDevice,
    error::{CudaError, ErrorCode},
    memory::GPU_PAGE,
};

/// The library's name, with version 2 of its interface.
const LIBRARY: &str = "libgdrapi.so.2";
/// Device file of its kernel module.
const DEVICE: &str = "/dev/gdrdrv";
/// `GDR_PIN_FLAG_FORCE_PCIE`: maps over PCIe on platforms that have another path.
const FORCE_PCIE: u32 = 1;

/// GDRCopy cannot be used at all, or not for this memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GdrError {
    /// The library was not found.
    #[error(
        "GDRCopy's library is not there ({cause}); install libgdrapi (2.4 or later), or use the \
         staged path"
    )]
    NoLibrary {
        /// The loader's message.
        cause: String,
    },
    /// Library, driver or system refused the memory, or to work at all. Has cause and remedy.
    #[error("{0}")]
    Refused(String),
    /// A CUDA call failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// `gdr_mh_t`, a struct of one number, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Pinned {
    handle: c_ulong,
}

/// `gdr_info_v2_t`, filled in by the library.
#[derive(Default)]
#[repr(C)]
struct Info {
    va: u64,
    mapped_size: u64,
    page_size: u32,
    tm_cycles: u64,
    cycles_per_ms: u32,
    /// Two bits, `mapped` and `wc_mapping`.
    bits: c_uint,
    mapping_type: c_int,
}

const _: () = assert!(size_of::<Info>() == 48);

type Handle = *mut c_void;

/// The library's functions. They return 0 or an errno.
struct Api {
    open: unsafe extern "C" fn() -> Handle,
    close: unsafe extern "C" fn(Handle) -> c_int,
    pin: unsafe extern "C" fn(Handle, c_ulong, usize, u64, u32, *mut Pinned) -> c_int,
    /// Since 2.5.
    pin_v2: Option<unsafe extern "C" fn(Handle, c_ulong, usize, u32, *mut Pinned) -> c_int>,
    unpin: unsafe extern "C" fn(Handle, Pinned) -> c_int,
    info: unsafe extern "C" fn(Handle, Pinned, *mut Info) -> c_int,
    map: unsafe extern "C" fn(Handle, Pinned, *mut *mut c_void, usize) -> c_int,
    unmap: unsafe extern "C" fn(Handle, Pinned, *mut c_void, usize) -> c_int,
    library_version: unsafe extern "C" fn(*mut c_int, *mut c_int),
    driver_version: unsafe extern "C" fn(Handle, *mut c_int, *mut c_int) -> c_int,
    _library: Library,
}

impl Api {
    /// # Safety
    /// The library is libgdrapi, whose functions have these arguments.
    unsafe fn look_up(library: Library) -> Result<Self, &'static str> {
        macro_rules! get {
            ($name:literal) => {
                // SAFETY: the caller's promise; the types are those of gdrapi.h, and the struct
                // keeps the library loaded as long as the function.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(|_| $name)?
            };
        }
        Ok(Self {
            open: get!("gdr_open"),
            close: get!("gdr_close"),
            pin: get!("gdr_pin_buffer"),
            // SAFETY: as above.
            pin_v2: unsafe { library.get(b"gdr_pin_buffer_v2\0") }.ok().map(|found| *found),
            unpin: get!("gdr_unpin_buffer"),
            info: get!("gdr_get_info_v2"),
            map: get!("gdr_map"),
            unmap: get!("gdr_unmap"),
            library_version: get!("gdr_runtime_get_version"),
            driver_version: get!("gdr_driver_get_version"),
            _library: library,
        })
    }

    fn version(&self) -> String {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { (self.library_version)(&raw mut major, &raw mut minor) };
        format!("{major}.{minor}")
    }
}

/// A connection to GDRCopy's driver. Closed when it and its mappings are dropped.
struct Connection {
    api: Api,
    handle: NonNull<c_void>,
    /// Serializes calls: the library's list has no lock.
    one_at_a_time: Mutex<()>,
}

// SAFETY: the handle is only used under the lock, and is not bound to a thread.
unsafe impl Send for Connection {}
// SAFETY: as above.
unsafe impl Sync for Connection {}

impl Connection {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: opened by the library; every mapping would keep `self` alive, and was dropped.
        let closed = errno(unsafe { (self.api.close)(self.handle.as_ptr()) });
        if let Err(cause) = closed {
            tracing::error!(cause, "closing GDRCopy's driver");
        }
    }
}

/// GDRCopy: library and driver.
#[derive(Clone)]
pub struct Gdr {
    connection: Arc<Connection>,
    library: String,
    driver: String,
}

impl fmt::Debug for Gdr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gdr({self})")
    }
}

impl fmt::Display for Gdr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GDRCopy {} with driver {}", self.library, self.driver)
    }
}

impl Gdr {
    /// Opens the library and its driver.
    ///
    /// # Errors
    /// Returns [`GdrError::NoLibrary`] or [`GdrError::Refused`].
    pub fn open() -> Result<Self, GdrError> {
        // SAFETY: opens libgdrapi if present; its initialisers are trusted as the library is.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|error| GdrError::NoLibrary { cause: error.to_string() })?;
        // SAFETY: the library was found under libgdrapi's name.
        let api = unsafe { Api::look_up(library) };
        let api = api.map_err(|lacks| {
            let why = format!(
                "GDRCopy's library ({LIBRARY}) lacks {lacks}; install version 2.4 or later"
            );
            GdrError::Refused(why)
        })?;
        let library = api.version();
        // SAFETY: takes no argument, and returns null or a handle.
        let Some(handle) = NonNull::new(unsafe { (api.open)() }) else {
            let cause = why_no_driver();
            let why = format!(
                "GDRCopy {library} did not open its driver: {cause}; or use the staged path"
            );
            return Err(GdrError::Refused(why));
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: an open handle; writes two numbers.
        let code = unsafe { (api.driver_version)(handle.as_ptr(), &raw mut major, &raw mut minor) };
        let driver = match code {
            0 => format!("{major}.{minor}"),
            _ => "of an unknown version".into(),
        };
        let connection = Connection { api, handle, one_at_a_time: Mutex::default() };
        Ok(Self { connection: Arc::new(connection), library, driver })
    }

    /// Maps memory of a GPU into this process, including the rest of its first and last GPU page
    /// (64 KiB). Call it before an executor starts: it is not known whether the driver waits for
    /// kernels.
    ///
    /// Memory that begins at a host page can be mapped for a drive: memory of
    /// [`super::CudaDevice::allocate`] always does. Pass an engine's own pool as [`ExternalMemory`]
    /// with its address on `device` and an owner that frees it.
    ///
    /// # Errors
    /// Returns [`GdrError`]; the memory's owner is dropped then.
    pub fn map(
        &self,
        device: &Arc<CudaDevice>,
        memory: ExternalMemory,
    ) -> Result<GdrMapping, GdrError> {
        let (_, address, len, owner) = memory.into_parts();
        let Some(address) = address else {
            let text = format!("GDRCopy: {len} bytes to map have no address on the GPU");
            return Err(CudaError::Argument(text).into());
        };
        let mapped = self.try_map(device, address, len)?;
        let (connection, owner) = (self.connection.clone(), ManuallyDrop::new(owner));
        Ok(GdrMapping { mapped, connection, address, len, owner })
    }

    fn try_map(
        &self,
        device: &CudaDevice,
        DevicePtr(address): DevicePtr,
        len: usize,
    ) -> Result<Mapped, GdrError> {
        let memory = format!("{len} bytes of GPU memory at {address:#x}");
        let refused =
            |cause: String| GdrError::Refused(format!("GDRCopy: mapping {memory} failed: {cause}"));
        let page = GPU_PAGE as u64;
        let start = address / page * page;
        let end =
            address.checked_add(len as u64).and_then(|end| end.checked_next_multiple_of(page));
        let whole = end.and_then(|end| usize::try_from(end - start).ok()).filter(|_| len > 0);
        let whole = whole.ok_or_else(|| refused("there are no such bytes".into()))?;
        sync_memops(device, address)?;
        let _one = self.connection.lock();
        // Drives' writes into a pool and into queues are ordered only if all take the same path.
        let over_pcie = device.report().is_coherent;
        let pin = self.connection.pin(start, whole, over_pcie).map_err(|cause| {
            let hint = if over_pcie { COHERENT.into() } else { why_no_pin(device, address, len) };
            GdrError::Refused(format!("GDRCopy: pinning {memory} was refused: {cause}; {hint}"))
        })?;
        let mapped = self.connection.map(pin, whole).and_then(|at| {
            let found = self.connection.find(pin, whole, (address, len));
            let found = found.and_then(|(offset, kind)| match kind {
                MappingKind::Cached if over_pcie => Err(format!("it is not over PCIe; {COHERENT}")),
                _ => Ok((offset, kind)),
            });
            let (offset, kind) = found.inspect_err(|_| {
                if let Err(cause) = self.connection.unmap(pin, (at, whole)) {
                    tracing::error!(cause, "a mapping of GPU memory is left");
                }
            })?;
            // SAFETY: inside the mapping.
            let host = unsafe { at.cast::<u8>().add(offset) };
            Ok(Mapped { pin, at, whole, host, kind })
        });
        mapped.map_err(|cause| {
            if let Err(cause) = self.connection.unpin(pin) {
                tracing::error!(cause, "GPU memory stays pinned");
            }
            refused(cause)
        })
    }
}

/// The library's calls, as results. The caller holds the lock.
impl Connection {
    fn pin(&self, start: u64, whole: usize, over_pcie: bool) -> Result<Pinned, String> {
        let (handle, mut pin) = (self.handle.as_ptr(), Pinned { handle: 0 });
        let start = c_ulong::try_from(start).map_err(|error| error.to_string())?;
        if over_pcie {
            let found = "the library has no gdr_pin_buffer_v2";
            let pin_v2 = self.api.pin_v2.ok_or(found)?;
            // SAFETY: as below.
            let code = unsafe { pin_v2(handle, start, whole, FORCE_PCIE, &raw mut pin) };
            return errno(code).map(|()| pin);
        }
        // SAFETY: an open handle; the driver checks that the range can be pinned; a handle is
        // written.
        errno(unsafe { (self.api.pin)(handle, start, whole, 0, 0, &raw mut pin) }).map(|()| pin)
    }

    fn unpin(&self, pin: Pinned) -> Result<(), String> {
        // SAFETY: a pin that is not mapped, released once.
        errno(unsafe { (self.api.unpin)(self.handle.as_ptr(), pin) })
    }

    fn map(&self, pin: Pinned, whole: usize) -> Result<NonNull<c_void>, String> {
        let mut at: *mut c_void = std::ptr::null_mut();
        // SAFETY: a pin of that many bytes, mapped once; an address is written.
        errno(unsafe { (self.api.map)(self.handle.as_ptr(), pin, &raw mut at, whole) })?;
        NonNull::new(at).ok_or_else(|| "it was mapped at 0".into())
    }

    fn unmap(&self, pin: Pinned, (at, whole): (NonNull<c_void>, usize)) -> Result<(), String> {
        // SAFETY: mapped by `map`, unmapped once, and no longer used.
        errno(unsafe { (self.api.unmap)(self.handle.as_ptr(), pin, at.as_ptr(), whole) })
    }

    /// Returns the offset of `len` bytes at `address` in the mapping, and its kind.
    fn find(
        &self,
        pin: Pinned,
        whole: usize,
        (address, len): (u64, usize),
    ) -> Result<(usize, MappingKind), String> {
        let mut info = Info::default();
        // SAFETY: a pin that is mapped; fills in a struct of the library's own layout.
        errno(unsafe { (self.api.info)(self.handle.as_ptr(), pin, &raw mut info) })?;
        let offset = address.checked_sub(info.va).and_then(|offset| usize::try_from(offset).ok());
        let end = offset.and_then(|offset| offset.checked_add(len));
        match (offset, end) {
            (Some(offset), Some(end)) if end <= whole && info.mapped_size >= whole as u64 => {
                Ok((offset, MappingKind::new(info.mapping_type)))
            }
            _ => {
                let Info { va, mapped_size, .. } = info;
                Err(format!("{mapped_size} bytes at {va:#x} were mapped instead"))
            }
        }
    }
}

/// Advice for a GPU that is coherent with the host.
const COHERENT: &str = "this GPU is coherent with the host, and drives need its memory mapped over \
                        PCIe, as GDRCopy 2.5 or later does (library and gdrdrv); or use the staged \
                        path";
/// CU_CTX_SYNC_MEMOPS.
const CTX_SYNC_MEMOPS: u32 = 0x80;

/// Makes CUDA's synchronous copies of this memory complete when they return, also for readers
/// through the BAR. Memory of cuMemCreate does not support the attribute: in that case the flag is
/// set for the whole context.
fn sync_memops(device: &CudaDevice, address: u64) -> Result<(), CudaError> {
    let _entered = device.enter()?;
    let (on, attribute) = (1u32, CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
    let set = device.api.cuPointerSetAttribute;
    // SAFETY: reads one number.
    let code = unsafe { set((&raw const on).cast(), attribute, address) };
    let what = "preparing GPU memory for a mapping";
    let (ErrorCode::NOT_SUPPORTED, Some(get), Some(set)) =
        (code, device.api.cuCtxGetFlags, device.api.cuCtxSetFlags)
    else {
        return device.check(what, "cuPointerSetAttribute", code);
    };
    let mut flags = 0u32;
    // SAFETY: writes one number.
    device.check(what, "cuCtxGetFlags", unsafe { get(&raw mut flags) })?;
    if flags & CTX_SYNC_MEMOPS != 0 {
        return Ok(());
    }
    tracing::debug!("memory of cuMemCreate: CU_CTX_SYNC_MEMOPS for the GPU's primary context");
    // SAFETY: takes a number: the context's flags plus one more.
    device.check(what, "cuCtxSetFlags", unsafe { set(flags | CTX_SYNC_MEMOPS) })
}

/// Returns advice on a driver that could not be opened.
fn why_no_driver() -> String {
    use std::io::ErrorKind;
    match std::fs::OpenOptions::new().read(true).write(true).open(DEVICE) {
        Ok(_) => format!(
            "{DEVICE} is there, so library and kernel module do not fit together; install both \
             from one release (GDRCOPY_ENABLE_LOGGING=1 makes the library say more)"
        ),
        Err(error) => match error.kind() {
            ErrorKind::NotFound => {
                format!(
                    "{DEVICE} is not there; load its kernel module (modprobe gdrdrv), or install \
                     GDRCopy 2.6 on a driver for CUDA 13.3, which does without"
                )
            }
            ErrorKind::PermissionDenied => {
                format!("{DEVICE} may not be opened; give this user access to it")
            }
            _ => format!("{DEVICE}: {error}"),
        },
    }
}

/// Returns advice on memory that could not be pinned.
fn why_no_pin(device: &CudaDevice, address: u64, len: usize) -> String {
    let size = CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE;
    if let Ok(size) = pointer_attribute(device, address, size)
        && size < len as u64
    {
        return format!(
            "its first allocation is {size} bytes, and gdrdrv pins no more than one: the pool was \
             put together with cuMemMap (PyTorch's expandable segments are); make it one \
             allocation, or use the staged path"
        );
    }
    let capable = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE;
    match pointer_attribute(device, address, capable) {
        Ok(0) => "CUDA says that this memory cannot be reached by other devices: the GPU cannot, \
                  or whoever allocated it (with cuMemCreate, or from a pool) did not ask for \
                  gpuDirectRDMACapable; or use the staged path"
            .into(),
        _ => "the GPU's BAR1 may be full or small (nvidia-smi -q -d MEMORY; enable resizable BAR \
              in the firmware), or the driver may not allow it; or use the staged path"
            .into(),
    }
}

/// Queries an attribute of an address; a smaller value is in the lower bytes.
pub(super) fn pointer_attribute(
    device: &CudaDevice,
    address: u64,
    attribute: CUpointer_attribute,
) -> Result<u64, CudaError> {
    let _entered = device.enter()?;
    let mut value = 0u64;
    // SAFETY: writes at most eight bytes: all attributes queried here are a number or a flag.
    let code =
        unsafe { (device.api.cuPointerGetAttribute)((&raw mut value).cast(), attribute, address) };
    let what = format!("asking about the memory at {address:#x}");
    device.check(what, "cuPointerGetAttribute", code)?;
    Ok(u64::from_le(value))
}

/// Converts an errno to a result.
fn errno(code: c_int) -> Result<(), String> {
    match code {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code).to_string()),
    }
}

/// Memory type of the host's mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MappingKind {
    /// Writes are combined and may be delayed, reads are slow: a GPU behind PCIe.
    WriteCombining,
    /// Ordinary cached memory: a GPU that is coherent with the host.
    Cached,
    /// Device memory: accesses are not combined.
    Device,
    /// A type unknown to this version.
    Unknown(i32),
}

impl MappingKind {
    fn new(number: c_int) -> Self {
        match number {
            1 => Self::WriteCombining,
            2 => Self::Cached,
            3 => Self::Device,
            other => Self::Unknown(other),
        }
    }
}

impl fmt::Display for MappingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WriteCombining => f.write_str("write-combining"),
            Self::Cached => f.write_str("cached"),
            Self::Device => f.write_str("device"),
            Self::Unknown(number) => write!(f, "unknown ({number})"),
        }
    }
}

/// A pinned and mapped range.
#[derive(Clone, Copy)]
struct Mapped {
    pin: Pinned,
    at: NonNull<c_void>,
    whole: usize,
    host: NonNull<u8>,
    kind: MappingKind,
}

/// Memory of the GPU that also has an address in this process. Drop unmaps and unpins it
/// immediately, then drops the memory's owner.
pub struct GdrMapping {
    mapped: Mapped,
    connection: Arc<Connection>,
    address: DevicePtr,
    len: usize,
    owner: ManuallyDrop<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: addresses and handles; the library is called under a lock.
unsafe impl Send for GdrMapping {}
// SAFETY: as above; the memory is accessed through the owner of the address.
unsafe impl Sync for GdrMapping {}

impl fmt::Debug for GdrMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mapped: Mapped { host, kind, .. }, address, len, .. } = self;
        write!(f, "GdrMapping({len} bytes of GPU memory at {:#x}, {kind} at {host:p})", address.0)
    }
}

impl GdrMapping {
    /// Returns the first byte's address in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.mapped.host
    }

    /// Returns the first byte's address in a kernel.
    #[must_use]
    pub fn device(&self) -> DevicePtr {
        self.address
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

    /// Returns the memory type of the host's mapping.
    #[must_use]
    pub fn kind(&self) -> MappingKind {
        self.mapped.kind
    }

    /// Converts the mapping to memory that a [`nvme_driver::DmaSpace`] imports: with an address in
    /// this process, which VFIO maps for its devices, and one on the GPU.
    #[must_use]
    pub fn into_external(self) -> ExternalMemory {
        let (host, device, len) = (self.host(), self.device(), self.len());
        // SAFETY: allocated, pinned and mapped until `self`, the owner, is dropped, and no
        // reference into it is ever made.
        unsafe { ExternalMemory::new(Some(host), Some(device), len, Arc::new(self)) }
    }
}

impl Drop for GdrMapping {
    fn drop(&mut self) {
        let Mapped { pin, at, whole, .. } = self.mapped;
        let undone = {
            let _one = self.connection.lock();
            let unmapped = self.connection.unmap(pin, (at, whole));
            unmapped.and_then(|()| self.connection.unpin(pin))
        };
        if let Err(cause) = undone {
            // Freed while mapped, the memory could be reallocated and still be reached.
            tracing::error!(cause, memory = ?self, "still mapped: it leaks");
            return;
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.owner) };
    }
}
