#![allow(unsafe_code, reason = "calls libgdrapi, which maps memory of the GPU into this process")]
//! GDRCopy: memory of the GPU with an address in this process.
//!
//! The mapping goes through the GPU's BAR, so that other PCIe devices reach it as well: it is what
//! a VFIO container is given for drives that read and write GPU memory directly. The library is
//! opened at run time, as libcuda is; its header is the source of names and types used here.
//!
//! What is mapped is undone in one order: the mapping, the pin, the memory. Nothing revokes the
//! mapping when memory is freed below it, so [`GdrMapping`] owns what it maps; and when one of the
//! first two steps fails, it leaks the rest.

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

/// The library's name: version 2 of its interface.
const LIBRARY: &str = "libgdrapi.so.2";
/// The device of its kernel module.
const DEVICE: &str = "/dev/gdrdrv";
/// `GDR_PIN_FLAG_FORCE_PCIE`: mapped over PCIe, on platforms with another way.
const FORCE_PCIE: u32 = 1;

/// GDRCopy cannot be used, or not for this memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GdrError {
    /// There is no library.
    #[error(
        "GDRCopy's library is not there ({cause}); install libgdrapi (2.4 or later), or use the \
         staged path"
    )]
    NoLibrary {
        /// The loader's message.
        cause: String,
    },
    /// The library lacks functions.
    #[error("GDRCopy's library ({LIBRARY}) lacks {lacks}; install version 2.4 or later")]
    OldLibrary {
        /// What is missing.
        lacks: &'static str,
    },
    /// The library finds no kernel module.
    #[error("GDRCopy {library} did not open its driver: {cause}; or use the staged path")]
    NoDriver {
        /// The library's version.
        library: String,
        /// Why, as far as can be told, and what to do.
        cause: String,
    },
    /// The memory was not pinned.
    #[error(
        "GDRCopy: pinning {len} bytes of GPU memory at {address:#x} was refused: {cause}; {hint}"
    )]
    Pin {
        /// Its address on the GPU.
        address: u64,
        /// Its length in bytes.
        len: usize,
        /// The system's error.
        cause: String,
        /// What to check.
        hint: String,
    },
    /// The memory was not mapped.
    #[error("GDRCopy: mapping {len} bytes of GPU memory at {address:#x} failed: {cause}")]
    Map {
        /// Its address on the GPU.
        address: u64,
        /// Its length in bytes.
        len: usize,
        /// The system's error, or what was found wrong.
        cause: String,
    },
    /// CUDA refused something that belongs to it.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// `gdr_mh_t`, a struct of one number that is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Pinned {
    handle: c_ulong,
}

/// `gdr_info_v2_t`, which the library fills in.
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
                // keeps the library loaded beside the function.
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
    /// The library keeps a list without a lock of its own.
    one_at_a_time: Mutex<()>,
}

// SAFETY: the handle is used under the lock only, and belongs to no thread.
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
        // SAFETY: opened by the library; every mapping, which would keep `self`, was dropped.
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
    /// [`GdrError::NoLibrary`], [`GdrError::OldLibrary`], [`GdrError::NoDriver`].
    pub fn open() -> Result<Self, GdrError> {
        // SAFETY: opens libgdrapi if there is one, whose initialisers are as good as it is.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|error| GdrError::NoLibrary { cause: error.to_string() })?;
        // SAFETY: the library was found by the name of libgdrapi.
        let api = unsafe { Api::look_up(library) };
        let api = api.map_err(|lacks| GdrError::OldLibrary { lacks })?;
        let library = api.version();
        // SAFETY: takes nothing, and returns null or a handle.
        let Some(handle) = NonNull::new(unsafe { (api.open)() }) else {
            return Err(GdrError::NoDriver { library, cause: why_no_driver() });
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

    /// Maps memory of a GPU into this process: all of it, with the GPU pages (64 KiB) that it
    /// begins and ends in. Done before an executor starts: it is not known whether the driver waits
    /// for kernels.
    ///
    /// A drive can be given what begins at a page of the host: memory of
    /// [`super::CudaDevice::allocate`] always does. An engine's own pool comes as
    /// [`ExternalMemory`] with its address on `device`, and an owner that frees it.
    ///
    /// # Errors
    /// [`GdrError`]; the memory's owner is dropped then.
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
        let refused = |cause| GdrError::Map { address, len, cause };
        let page = GPU_PAGE as u64;
        let start = address / page * page;
        let end =
            address.checked_add(len as u64).and_then(|end| end.checked_next_multiple_of(page));
        let whole = end.and_then(|end| usize::try_from(end - start).ok()).filter(|_| len > 0);
        let whole = whole.ok_or_else(|| refused("there are no such bytes".into()))?;
        sync_memops(device, address)?;
        let _one = self.connection.lock();
        // What drives write into a pool and into queues is in order on one way only.
        let over_pcie = device.report().is_coherent;
        let pin = self.connection.pin(start, whole, over_pcie).map_err(|cause| GdrError::Pin {
            address,
            len,
            cause,
            hint: if over_pcie { COHERENT.into() } else { why_no_pin(device, address, len) },
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

/// The library's calls, as results. The lock is held.
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
        // SAFETY: an open handle; the driver says whether the range can be pinned; a handle is
        // written.
        errno(unsafe { (self.api.pin)(handle, start, whole, 0, 0, &raw mut pin) }).map(|()| pin)
    }

    fn unpin(&self, pin: Pinned) -> Result<(), String> {
        // SAFETY: a pin that is not mapped, given back once.
        errno(unsafe { (self.api.unpin)(self.handle.as_ptr(), pin) })
    }

    fn map(&self, pin: Pinned, whole: usize) -> Result<NonNull<c_void>, String> {
        let mut at: *mut c_void = std::ptr::null_mut();
        // SAFETY: a pin of so many bytes, mapped once; an address is written.
        errno(unsafe { (self.api.map)(self.handle.as_ptr(), pin, &raw mut at, whole) })?;
        NonNull::new(at).ok_or_else(|| "it was mapped at 0".into())
    }

    fn unmap(&self, pin: Pinned, (at, whole): (NonNull<c_void>, usize)) -> Result<(), String> {
        // SAFETY: mapped by `map`, given back once, and not used any more.
        errno(unsafe { (self.api.unmap)(self.handle.as_ptr(), pin, at.as_ptr(), whole) })
    }

    /// Where in the mapping `len` bytes at `address` are, and what it is like.
    fn find(
        &self,
        pin: Pinned,
        whole: usize,
        (address, len): (u64, usize),
    ) -> Result<(usize, MappingKind), String> {
        let mut info = Info::default();
        // SAFETY: a pin that is mapped; a struct of the library's own layout is filled in.
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

/// What to do about a GPU that is coherent with the host.
const COHERENT: &str = "this GPU is coherent with the host, and drives need its memory mapped over \
                        PCIe, as GDRCopy 2.5 or later does (library and gdrdrv); or use the staged \
                        path";
/// CU_CTX_SYNC_MEMOPS.
const CTX_SYNC_MEMOPS: u32 = 0x80;

/// From now on CUDA's synchronous copies of this memory are done when they return, also for those
/// who read it through the BAR. Memory of cuMemCreate does not have the attribute for that: there
/// the whole context gets the flag, for all memory.
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
    // SAFETY: takes a number: the flags that the context has, and one more.
    device.check(what, "cuCtxSetFlags", unsafe { set(flags | CTX_SYNC_MEMOPS) })
}

/// What to do about a driver that was not opened.
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

/// What to do about memory that was not pinned.
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

/// What the driver knows of an address; a smaller value is in the lower bytes.
fn pointer_attribute(
    device: &CudaDevice,
    address: u64,
    attribute: CUpointer_attribute,
) -> Result<u64, CudaError> {
    let _entered = device.enter()?;
    let mut value = 0u64;
    // SAFETY: writes at most eight bytes: all of the attributes that are asked for here are a
    // number or a flag.
    let code =
        unsafe { (device.api.cuPointerGetAttribute)((&raw mut value).cast(), attribute, address) };
    let what = format!("asking about the memory at {address:#x}");
    device.check(what, "cuPointerGetAttribute", code)?;
    Ok(u64::from_le(value))
}

/// An errno as a result.
fn errno(code: c_int) -> Result<(), String> {
    match code {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code).to_string()),
    }
}

/// What the host's accesses through a mapping are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MappingKind {
    /// Writes are gathered and may come late, reads are slow: a GPU behind PCIe.
    WriteCombining,
    /// As memory: a GPU that is coherent with the host.
    Cached,
    /// Every access by itself.
    Device,
    /// Something new.
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

/// What was pinned and mapped.
#[derive(Clone, Copy)]
struct Mapped {
    pin: Pinned,
    at: NonNull<c_void>,
    whole: usize,
    host: NonNull<u8>,
    kind: MappingKind,
}

/// Memory of the GPU that has an address in this process, too. When it is dropped, mapping and pin
/// are undone at once, and the memory's owner is dropped after that.
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
    /// First byte in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.mapped.host
    }

    /// First byte in a kernel.
    #[must_use]
    pub fn device(&self) -> DevicePtr {
        self.address
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

    /// What accesses of the host are like.
    #[must_use]
    pub fn kind(&self) -> MappingKind {
        self.mapped.kind
    }

    /// As memory that a [`nvme_driver::DmaSpace`] imports: with an address in this process, which
    /// VFIO maps for its devices, and one on the GPU.
    #[must_use]
    pub fn into_external(self) -> ExternalMemory {
        let (host, device, len) = (self.host(), self.device(), self.len());
        // SAFETY: allocated, pinned and mapped until `self`, the owner, is dropped, and nothing
        // ever makes a reference into it.
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
            // Freed below a mapping, the memory would be somebody else's and still be reached.
            tracing::error!(cause, memory = ?self, "still mapped: it leaks");
            return;
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.owner) };
    }
}
