//! Address space of the software controllers: a software IOMMU.
//!
//! # Lifetimes
//!
//! A mapping ends in two steps. Dropping its last [`DmaMemory`] handle removes the range from the
//! table, under the write lock: accesses in progress (under the read lock) have then ended, and no
//! new access finds the range. The memory itself is freed with its last [`SgList`]: an asynchronous
//! medium holds these, so bytes in flight never land in freed memory. For imported memory,
//! "unmapped" in the sense of [`ExternalMemory`] is this second step, when its owner is dropped.
//!
//! No code here touches memory without one of the two, and only the table hands out addresses.
#![allow(unsafe_code, reason = "reads and writes memory by address, on a device's behalf")]

use std::{
    cell::Cell,
    fmt,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak},
    time::{Duration, Instant},
};

use nvme_driver::{
    CopyEngine, DevicePtr, DmaError, DmaMemory, DmaSpace, ExternalMemory, Iova, IovaRange,
    platform::mmio,
};

use crate::{
    bounce::Copies,
    memory::{self, HostMap, page_bytes, page_ceil},
    sg_list::{Backing, Owner, Side},
};

pub use crate::sg_list::{SgEntry, SgList};

/// First address allocated: above 4 GiB, so that a truncated upper half is noticed.
const IOVA_FIRST: u64 = 0x1_0000_0000;
/// End of allocated addresses (64 TiB), below the addresses that Linux gives to programs and
/// mappings on x86-64: a host address used as an I/O address by mistake is never mapped.
const IOVA_END: u64 = 0x4000_0000_0000;
/// Minimum of unmapped bytes after each mapping.
const GUARD_BYTES: u64 = 1 << 16;
/// Alignment of mappings, like that of large pages in a real IOMMU.
const ALIGN_BYTES: u64 = 1 << 16;

/// The software IOMMU; several controllers may share one.
pub struct EmuDomain {
    name: String,
    this: Weak<EmuDomain>,
    table: RwLock<Table>,
    refusals: Mutex<Refusals>,
    /// Access to GPU memory, if supported.
    copies: Option<Copies>,
}

/// Mapped ranges, ascending: addresses only grow, so a new range is appended.
struct Table {
    regions: Vec<Region>,
    next: u64,
}

struct Region {
    start: u64,
    len: u64,
    backing: Arc<Backing>,
}

impl EmuDomain {
    /// Creates an empty address space.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Arc<Self> {
        Self::make(name.into(), None)
    }

    /// Creates an empty address space that can also map memory which only a GPU can address.
    /// `engine` copies the data of reads and writes there. Queues, PRP lists, SGL segments and data
    /// of admin commands in such memory are refused ([`DmaFaultKind::DeviceOnly`]).
    #[must_use]
    pub fn with_copies(name: impl Into<String>, engine: Arc<dyn CopyEngine>) -> Arc<Self> {
        Self::make(name.into(), Some(Copies::new(engine)))
    }

    fn make(name: String, copies: Option<Copies>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            name,
            this: this.clone(),
            table: RwLock::new(Table { regions: Vec::new(), next: IOVA_FIRST }),
            refusals: Mutex::new(Refusals::default()),
            copies,
        })
    }

    pub(crate) fn copies(&self) -> Option<&Copies> {
        self.copies.as_ref()
    }

    /// Locks the table for access to mapped memory. Nothing is unmapped while the guard lives, so
    /// take one per command or per batch, never two in one thread, and drop it before waiting.
    #[must_use]
    #[inline]
    pub fn access(&self) -> DmaAccess<'_> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        DmaAccess { domain: self, table, last: Cell::new(0) }
    }

    /// Returns the number of refused accesses.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refusals().total
    }

    /// Returns the currently mapped ranges.
    #[must_use]
    pub fn mapped(&self) -> Vec<IovaRange> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let range = |region: &Region| IovaRange { iova: Iova(region.start), len: region.len };
        table.regions.iter().map(range).collect()
    }

    fn map(&self, side: Side, len: usize, owner: Owner) -> Result<EmuMemory, DmaError> {
        let no_iova = || DmaError::NoIova { space: self.name.clone(), len };
        let bytes = u64::try_from(len).map_err(|_| no_iova())?;
        let backing = Arc::new(Backing { side, _owner: owner });
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let start = table.next;
        let end = start.checked_add(bytes).filter(|end| *end <= IOVA_END).ok_or_else(no_iova)?;
        table.next = (end + GUARD_BYTES).next_multiple_of(ALIGN_BYTES);
        table.regions.push(Region { start, len: bytes, backing: backing.clone() });
        let domain = self.this.upgrade().ok_or_else(no_iova)?;
        let segments = [IovaRange { iova: Iova(start), len: bytes }];
        let (host, device) = match side {
            Side::Host(host) => (Some(host), None),
            Side::Device(device) => (None, Some(device)),
        };
        Ok(EmuMemory { domain, host, device, len, segments, _backing: backing })
    }

    fn unmap(&self, start: u64) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let region = match table.regions.binary_search_by_key(&start, |region| region.start) {
            Ok(index) => Some(table.regions.remove(index)),
            Err(_) => None,
        };
        // The memory (and an owner's arbitrary drop code) must not be dropped under the lock.
        drop(table);
        drop(region);
    }

    fn unreachable(&self, len: usize, device: Option<DevicePtr>) -> DmaError {
        let (what, hint) = match device {
            Some(_) => (
                "that only a GPU addresses",
                "the software controller has no way there: make its address space with a copy \
                 engine of that GPU (EmuDomain::with_copies), or map the memory into the process \
                 and offer that address too",
            ),
            None => ("without any address", "offer an address in this process or on a GPU"),
        };
        let what = format!("{len} bytes of memory {what}");
        DmaError::Unsupported { space: self.name.clone(), what, hint: hint.into() }
    }

    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cold]
    fn refuse(&self, iova: Iova, len: usize, kind: DmaFaultKind) -> DmaFault {
        let fault = DmaFault { iova, len, kind };
        self.refusals().note(&self.name, &fault);
        fault
    }
}

impl fmt::Debug for EmuDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmuDomain").field("name", &self.name).finish_non_exhaustive()
    }
}

impl DmaSpace for EmuDomain {
    fn name(&self) -> &str {
        &self.name
    }

    fn alloc_on(&self, len: usize, _node: Option<u32>) -> Result<Arc<dyn DmaMemory>, DmaError> {
        let os = |source| DmaError::Os {
            space: self.name.clone(),
            len,
            source,
            hint: "ask for less memory, or raise the limit on address space (ulimit -v)".into(),
        };
        let map = HostMap::anonymous(len).map_err(os)?;
        let (host, len) = (map.ptr(), map.len());
        Ok(Arc::new(self.map(Side::Host(host), len, Owner::Map(map))?))
    }

    fn import(&self, memory: ExternalMemory) -> Result<Arc<dyn DmaMemory>, DmaError> {
        let (host, device, len, owner) = memory.into_parts();
        // Prefer the CPU's address: a copy by the CPU needs neither an engine nor a wait.
        let (side, address) = match (host, device) {
            (Some(host), _) => (Side::Host(host), host.as_ptr().expose_provenance() as u64),
            (None, Some(device)) if self.copies.is_some() => (Side::Device(device), device.0),
            _ => return Err(self.unreachable(len, device)),
        };
        if !address.is_multiple_of(page_bytes() as u64) || page_ceil(len) != Some(len) {
            return Err(DmaError::Unaligned { address, len, page: page_bytes() });
        }
        let mut mapped = self.map(side, len, Owner::External(owner))?;
        mapped.device = device;
        Ok(Arc::new(mapped))
    }
}

/// A mapping as held by its user.
struct EmuMemory {
    domain: Arc<EmuDomain>,
    host: Option<NonNull<u8>>,
    device: Option<DevicePtr>,
    len: usize,
    segments: [IovaRange; 1],
    _backing: Arc<Backing>,
}

// SAFETY: addresses only; see `Backing`.
unsafe impl Send for EmuMemory {}
// SAFETY: as above.
unsafe impl Sync for EmuMemory {}

// SAFETY: all fields are fixed at construction; `_backing` keeps the bytes allocated, and the table
// entry stays until the drop below; this crate creates no references into mapped memory, and
// importers promise the same.
unsafe impl DmaMemory for EmuMemory {
    fn len(&self) -> usize {
        self.len
    }
    fn host(&self) -> Option<NonNull<u8>> {
        self.host
    }
    fn device(&self) -> Option<DevicePtr> {
        self.device
    }
    fn segments(&self) -> &[IovaRange] {
        &self.segments
    }
}

impl Drop for EmuMemory {
    fn drop(&mut self) {
        self.domain.unmap(self.segments[0].iova.0);
    }
}

impl fmt::Debug for EmuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [range] = self.segments;
        write!(f, "EmuMemory({}, {} + {:#x})", self.domain.name, range.iova, range.len)
    }
}

/// Guard for access to mapped memory; see [`EmuDomain::access`].
///
/// Every method refuses ranges that are not entirely inside one mapping. A refusal is counted and,
/// at a bounded rate, logged.
pub struct DmaAccess<'a> {
    domain: &'a EmuDomain,
    table: RwLockReadGuard<'a, Table>,
    /// Index of the region found last: consecutive accesses mostly hit the same region.
    last: Cell<usize>,
}

impl fmt::Debug for DmaAccess<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DmaAccess({}, {} regions)", self.domain.name, self.table.regions.len())
    }
}

impl DmaAccess<'_> {
    /// Copies from mapped memory.
    ///
    /// # Errors
    /// Returns [`DmaFault`], without copying, if the range is not mapped.
    #[inline]
    pub fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), DmaFault> {
        let from = self.host(iova, to.len())?;
        // SAFETY: `host` checked the range against a mapping that the guard keeps; `to` is Rust's
        // own memory and cannot overlap memory that has no references into it.
        unsafe { memory::copy(from, NonNull::from(&mut *to).cast(), to.len()) };
        Ok(())
    }

    /// Copies into mapped memory.
    ///
    /// # Errors
    /// Returns [`DmaFault`], without copying, if the range is not mapped.
    #[inline]
    pub fn write(&self, iova: Iova, from: &[u8]) -> Result<(), DmaFault> {
        let to = self.host(iova, from.len())?;
        // SAFETY: as in `read`.
        unsafe { memory::copy(NonNull::from(from).cast(), to, from.len()) };
        Ok(())
    }

    /// Sets mapped memory to `byte`.
    ///
    /// # Errors
    /// Returns [`DmaFault`], without writing, if the range is not mapped.
    pub fn fill(&self, iova: Iova, byte: u8, len: usize) -> Result<(), DmaFault> {
        let to = self.host(iova, len)?;
        // SAFETY: as in `read`.
        unsafe { to.write_bytes(byte, len) };
        Ok(())
    }

    /// Reads a little-endian dword.
    ///
    /// # Errors
    /// Returns [`DmaFault`] if it is not mapped.
    pub fn read_u32(&self, iova: Iova) -> Result<u32, DmaFault> {
        let mut bytes = [0; 4];
        self.read(iova, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads a little-endian quadword.
    ///
    /// # Errors
    /// Returns [`DmaFault`] if it is not mapped.
    pub fn read_u64(&self, iova: Iova) -> Result<u64, DmaFault> {
        let mut bytes = [0; 8];
        self.read(iova, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Stores a little-endian dword.
    ///
    /// # Errors
    /// Returns [`DmaFault`] if it is not mapped.
    pub fn write_u32(&self, iova: Iova, value: u32) -> Result<(), DmaFault> {
        self.write(iova, &value.to_le_bytes())
    }

    /// Loads an aligned dword; later accesses are not reordered before it.
    ///
    /// # Errors
    /// Returns [`DmaFault`] if it is not mapped or not aligned.
    #[inline]
    pub fn load_acquire32(&self, iova: Iova) -> Result<u32, DmaFault> {
        let dword = self.dword(iova)?;
        // SAFETY: `dword` checked range and alignment; the guard keeps the mapping.
        Ok(u32::from_le(unsafe { mmio::load_acquire32(dword) }))
    }

    /// Stores an aligned dword; earlier accesses are not reordered after it. This is how the dword
    /// with the phase of a completion entry is stored, last.
    ///
    /// # Errors
    /// Returns [`DmaFault`] if it is not mapped or not aligned.
    #[inline]
    pub fn store_release32(&self, iova: Iova, value: u32) -> Result<(), DmaFault> {
        let dword = self.dword(iova)?;
        // SAFETY: as in `load_acquire32`.
        unsafe { mmio::store_release32(dword, value.to_le()) };
        Ok(())
    }

    /// Checks that `len` bytes at `iova` are mapped and returns their address. For many ranges of
    /// one command, use [`DmaAccess::push`].
    ///
    /// # Errors
    /// Returns [`DmaFault`] if the range is not mapped.
    pub fn resolve(&self, iova: Iova, len: usize) -> Result<SgEntry, DmaFault> {
        let host = self.host(iova, len)?;
        Ok(SgEntry { host: Some(host), len })
    }

    /// Appends `len` bytes at `iova` to `sg_list`, which keeps their memory alive. Merges
    /// consecutive ranges into one entry. This is the only access that also works for GPU memory.
    ///
    /// # Errors
    /// Returns [`DmaFault`], without changing `sg_list`, if the range is not mapped.
    #[inline]
    pub fn push(&self, sg_list: &mut SgList, iova: Iova, len: usize) -> Result<(), DmaFault> {
        let (backing, offset) = self.find(iova, len)?;
        match backing.side {
            // SAFETY: `find` checked that the bytes are inside the mapping.
            Side::Host(base) => sg_list.append(unsafe { base.add(offset) }, len, backing),
            Side::Device(base) => {
                sg_list.append_device(DevicePtr(base.0 + offset as u64), len, backing);
            }
        }
        Ok(())
    }

    fn dword(&self, iova: Iova) -> Result<NonNull<u32>, DmaFault> {
        if !iova.0.is_multiple_of(4) {
            return Err(self.domain.refuse(iova, 4, DmaFaultKind::Misaligned));
        }
        let host = self.host(iova, 4)?;
        // Mappings are page aligned on both sides, so the host address is as aligned as the IOVA.
        Ok(host.cast())
    }

    /// Returns the address in this process of `len` bytes at `iova`.
    #[inline]
    fn host(&self, iova: Iova, len: usize) -> Result<NonNull<u8>, DmaFault> {
        let (backing, offset) = self.find(iova, len)?;
        match backing.side {
            // SAFETY: `find` checked that the bytes are inside the mapping.
            Side::Host(base) => Ok(unsafe { base.add(offset) }),
            Side::Device(_) => Err(self.domain.refuse(iova, len, DmaFaultKind::DeviceOnly)),
        }
    }

    /// Returns the mapping that contains `len` bytes at `iova`, and the offset in it.
    #[inline]
    fn find(&self, iova: Iova, len: usize) -> Result<(&Arc<Backing>, usize), DmaFault> {
        let regions = &self.table.regions;
        let mut index = self.last.get();
        let inside = |region: &Region| iova.0.wrapping_sub(region.start) < region.len;
        if !regions.get(index).is_some_and(inside) {
            let above = regions.partition_point(|region| region.start <= iova.0);
            index = above.wrapping_sub(1);
            if !regions.get(index).is_some_and(inside) {
                return Err(self.domain.refuse(iova, len, DmaFaultKind::Unmapped));
            }
            self.last.set(index);
        }
        let region = &regions[index];
        let offset = iova.0 - region.start;
        if len as u64 > region.len - offset {
            return Err(self.domain.refuse(iova, len, DmaFaultKind::PastEnd));
        }
        // Below the region's length, which was a usize.
        Ok((&region.backing, usize::try_from(offset).unwrap_or(0)))
    }
}

/// A refused access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("DMA of {len} bytes at {iova} refused: {kind}")]
pub struct DmaFault {
    /// First byte requested.
    pub iova: Iova,
    /// Bytes requested.
    pub len: usize,
    /// The cause.
    pub kind: DmaFaultKind,
}

/// Reasons for which an access is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaFaultKind {
    /// The first byte is not mapped.
    #[error("the address is not mapped")]
    Unmapped,
    /// The range starts in a mapping and ends past it.
    #[error("the range ends past the mapping it starts in")]
    PastEnd,
    /// A dword access is not aligned to 4.
    #[error("the address is not a multiple of 4")]
    Misaligned,
    /// The memory is on a GPU. Only data of reads and writes is copied there; queues, descriptors
    /// and data of other commands need memory mapped in this process.
    #[error(
        "only a GPU addresses the memory, and only data of reads and writes is copied there; keep \
         queues, PRP lists, SGL segments and admin data in memory that this process reaches"
    )]
    DeviceOnly,
}

/// Counts refusals and limits the log if a device causes millions.
#[derive(Default)]
struct Refusals {
    total: u64,
    window: Option<Instant>,
    logged: u32,
    silent: u64,
}

impl Refusals {
    const PER_WINDOW: u32 = 8;
    const WINDOW: Duration = Duration::from_secs(1);

    fn note(&mut self, domain: &str, fault: &DmaFault) {
        self.total += 1;
        if self.window.is_none_or(|start| start.elapsed() >= Self::WINDOW) {
            if self.silent > 0 {
                tracing::warn!(domain, count = self.silent, "further DMA faults were not logged");
            }
            *self = Self { total: self.total, window: Some(Instant::now()), logged: 0, silent: 0 };
        }
        if self.logged < Self::PER_WINDOW {
            self.logged += 1;
            tracing::warn!(domain, iova = %fault.iova, len = fault.len, "{}", fault.kind);
        } else {
            self.silent += 1;
        }
    }
}

#[cfg(test)]
mod tests;
