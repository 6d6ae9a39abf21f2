//! An NVMe controller behind VFIO as a [`Bus`].
#![allow(unsafe_code, reason = "vouches for the doorbells that a BAR holds")]

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use nvme_pci::{CLASS_NVME, Function, PciAddress, Root};
use nvme_spec::reg::{ALL_ONES, CAP, Cap};
use rustix::event::{EventfdFlags, eventfd};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_EVENTFD, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
};

use super::{
    bar::BarMap,
    capability::Area,
    container::Claim,
    device::{BUS_MASTER, Device, INTX_DISABLE, MEMORY_SPACE, Region},
    error::{Call, VfioError},
    space::VfioSpace,
    sys,
};
use crate::{
    bus::{Bus, DoorbellPage, Gone, Interrupt, InterruptError, ResetError},
    dma::DmaSpace,
};

/// Offset of the doorbells in BAR0.
const DOORBELLS: u64 = 0x1000;
/// Doorbells of all 65,536 queue pairs.
const DOORBELLS_MAX: u64 = 2 * 0x1_0000;
/// Command register bits that a function in use needs. Without DMA it could not even fetch a
/// command; without INTX_DISABLE a polled controller would assert its interrupt pin, perhaps on a
/// shared line, until the kernel disables the line. The kernel sets none of them.
const COMMAND: u16 = MEMORY_SPACE | BUS_MASTER | INTX_DISABLE;

/// Options of [`VfioBus::open`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BusOptions {
    /// Reset the function first, if it has a reset of its own, to clear the state left by its last
    /// user.
    pub reset: bool,
    /// MSI-X vectors to set up, cut to the function's limit. All are set up when the first one is
    /// requested. The driver's own queues use two.
    pub vectors: u16,
}

impl Default for BusOptions {
    fn default() -> Self {
        Self { reset: true, vectors: 16 }
    }
}

/// A PCI function with an NVMe controller. Ownership is exclusive.
///
/// Dropping it stops the function's DMA and interrupts, and releases the function.
#[derive(Debug)]
pub struct VfioBus {
    id: String,
    region: Region,
    doorbells: DoorbellPage,
    numa_node: Option<u32>,
    vectors: u16,
    irqs: Mutex<Vec<Interrupt>>,
    /// Signalled by the kernel when the host wants the function back.
    request: Option<OwnedFd>,
    requested: OnceLock<()>,
    /// Signalled by the kernel for uncorrectable PCIe errors.
    errors: Option<OwnedFd>,
    /// Set once the function is known to be absent for good.
    gone: OnceLock<()>,
    // In drop order: mappings of BAR0, the function, its address space.
    maps: Vec<Arc<BarMap>>,
    device: Arc<Device>,
    _claim: Claim,
    dma: Arc<dyn DmaSpace>,
}

impl VfioBus {
    /// Takes over the function at `address`, which must be bound to vfio-pci, in `space`.
    ///
    /// # Errors
    /// Returns [`VfioError`] with the obstacle (a driver, another process, the IOMMU, permissions)
    /// or the defect of the function.
    pub fn open(
        space: &Arc<VfioSpace>,
        address: PciAddress,
        options: &BusOptions,
    ) -> Result<Arc<Self>, VfioError> {
        let span = tracing::info_span!("open", ctrl = %address);
        let _entered = span.enter();
        let claim = space.container().claim(address)?;
        let device = Arc::new(Device::open(space.container(), address)?);
        let class = device.class().map_err(device.os(Call::Config))?;
        if class == ALL_ONES {
            return Err(VfioError::Gone { address });
        }
        if class >> 8 != CLASS_NVME {
            let what = format!("its class code is {:06x}, and not 010802", class >> 8);
            let hint = "name an NVMe I/O controller";
            return Err(VfioError::unsupported(address, what, hint));
        }
        if options.reset
            && let Err(error) = device.reset()
        {
            // Not fatal: the controller is disabled through its own registers next.
            tracing::warn!(%error, "the function could not be reset");
        }
        device.set_command(COMMAND, 0)?;
        let region = device.bar(0)?;
        let page = space.container().page();
        let maps = map_registers(&device, &region, page)?;
        let doorbells = find_doorbells(&device, &region, &maps)?;
        let vectors = vectors(&device, options.vectors);
        let request = watch(&device, VFIO_PCI_REQ_IRQ_INDEX, "a request to give it back");
        let errors = watch(&device, VFIO_PCI_ERR_IRQ_INDEX, "a PCIe error");
        let numa_node = Function::read(&Root::machine(), address).and_then(|found| found.numa);
        let group = device.group();
        tracing::info!(
            group,
            vectors,
            numa_node,
            bar_bytes = region.size,
            doorbell_bytes = doorbells.len(),
            "function opened"
        );
        claim.set_node(numa_node);
        Ok(Arc::new(Self {
            id: address.to_string(),
            region,
            doorbells,
            numa_node,
            vectors,
            irqs: Mutex::new(Vec::new()),
            request,
            requested: OnceLock::new(),
            errors,
            gone: OnceLock::new(),
            maps,
            device,
            _claim: claim,
            dma: space.clone(),
        }))
    }

    /// Returns the PCI address.
    #[must_use]
    pub fn address(&self) -> PciAddress {
        self.device.address()
    }

    /// Marks the function as absent: registers are no longer accessed. For owners that learn of a
    /// removal from elsewhere.
    pub fn set_gone(&self) {
        if self.gone.set(()).is_ok() {
            tracing::error!(ctrl = %self.id, "the function is gone");
        }
    }

    fn check(&self) -> Result<(), Gone> {
        if self.maps.iter().any(|map| map.is_revoked()) {
            self.set_gone();
        }
        if self.gone.get().is_some() { Err(Gone) } else { Ok(()) }
    }

    /// Reads a register, mapped or not; all ones if the function does not answer.
    fn read_register(&self, offset: u32) -> u32 {
        let at = u64::from(offset);
        self.maps.iter().find_map(|map| map.read(at)).unwrap_or_else(|| {
            let mut bytes = [0xFF; 4];
            if at + 4 <= self.region.size {
                // A part of BAR0 that cannot be mapped; a failure leaves all ones.
                let _ = self.device.file().read_exact_at(&mut bytes, self.region.offset + at);
            }
            u32::from_le_bytes(bytes)
        })
    }

    /// Returns whether a register that reads as all ones is worth another read: the function is
    /// present, and may have lost its BARs in a reset behind the kernel's back (of the NVM
    /// subsystem, or of the link after a PCIe error). The kernel restores them when memory space is
    /// enabled again. An absent function may still come back: only its owner knows for how long.
    fn is_back(&self) -> bool {
        if self.device.is_absent() {
            return false;
        }
        let enabled = self.device.set_command(COMMAND, 0);
        enabled.inspect_err(|error| tracing::warn!(ctrl = %self.id, %error, "not back")).is_ok()
    }

    /// Sets up all vectors together: the kernel cannot add to vectors in use.
    fn enable_vectors(&self) -> io::Result<Vec<Interrupt>> {
        let mut irqs = (0..self.vectors)
            .map(|vector| {
                let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
                Ok(Interrupt { eventfd: Arc::new(eventfd(0, flags)?), vector })
            })
            .collect::<io::Result<Vec<_>>>()?;
        loop {
            let fds: Vec<_> = irqs.iter().map(|irq| irq.eventfd.as_fd()).collect();
            match sys::set_irqs(self.device.file(), VFIO_PCI_MSIX_IRQ_INDEX, &fds)? {
                0 => return Ok(irqs),
                // Only that many are left on the machine, and nothing was set up.
                fewer if fewer < irqs.len() => {
                    let wanted = irqs.len();
                    tracing::warn!(ctrl = %self.id, wanted, fewer, "fewer vectors than wanted");
                    irqs.truncate(fewer);
                }
                odd => return Err(io::Error::other(format!("{odd} vectors could be had"))),
            }
        }
    }
}

impl Bus for VfioBus {
    fn id(&self) -> &str {
        &self.id
    }

    /// A register outside of BAR0 reads as all ones, like an unclaimed bus address.
    fn read32(&self, offset: u32) -> Result<u32, Gone> {
        self.check()?;
        let value = self.read_register(offset);
        let again = value == ALL_ONES && self.is_back();
        self.check()?;
        Ok(if again { self.read_register(offset) } else { value })
    }

    fn write32(&self, offset: u32, value: u32) -> Result<(), Gone> {
        self.check()?;
        let at = u64::from(offset);
        if self.maps.iter().find_map(|map| map.write(at, value)).is_none()
            && at + 4 <= self.region.size
        {
            let bytes = value.to_le_bytes();
            if let Err(error) = self.device.file().write_all_at(&bytes, self.region.offset + at) {
                tracing::error!(ctrl = %self.id, offset, %error, "a register was not written");
            }
        }
        Ok(())
    }

    fn doorbells(&self) -> DoorbellPage {
        self.doorbells.clone()
    }

    fn dma(&self) -> &Arc<dyn DmaSpace> {
        &self.dma
    }

    fn pci_id(&self) -> Option<(u16, u16)> {
        self.device.id()
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn requested(&self) -> bool {
        if self.requested.get().is_none() {
            if !is_signalled(self.request.as_ref()) {
                return false;
            }
            tracing::warn!(ctrl = %self.id, "somebody wants this function back");
            let _ = self.requested.set(());
        }
        true
    }

    fn interrupt(&self, vector: u16) -> Result<Interrupt, InterruptError> {
        let none =
            |available| InterruptError::NoSuchVector { bus: self.id.clone(), vector, available };
        if vector >= self.vectors {
            return Err(none(self.vectors));
        }
        let mut irqs = self.irqs.lock().unwrap_or_else(PoisonError::into_inner);
        if irqs.is_empty() {
            *irqs = self.enable_vectors().map_err(|source| InterruptError::Os {
                bus: self.id.clone(),
                vector,
                source,
            })?;
        }
        irqs.get(usize::from(vector)).cloned().ok_or_else(|| none(irqs.len() as u16))
    }

    /// Resets with `VFIO_DEVICE_RESET`: the kernel revokes mapped registers during the reset, and
    /// restores BARs, MSI-X and the command register after it. Mappings are refilled on access.
    fn reset(&self) -> Result<(), ResetError> {
        self.check()?;
        // The kernel would wait for a minute, and call it a success.
        if self.device.is_absent() {
            return Err(Gone.into());
        }
        let os = |source| ResetError::Os { bus: self.id.clone(), source };
        let reset = self.device.reset();
        // Even without a reset: BARs that were cleared with the link are restored here.
        match self.device.set_command(COMMAND, 0) {
            Ok(()) => {}
            Err(VfioError::Gone { .. }) => return Err(Gone.into()),
            Err(error) => return Err(os(io::Error::other(error))),
        }
        reset.map_err(|error| match error.kind() {
            io::ErrorKind::Unsupported => ResetError::Unsupported { bus: self.id.clone() },
            _ => os(error),
        })?;
        tracing::info!(ctrl = %self.id, "the function was reset");
        Ok(())
    }

    fn pcie_error(&self) -> bool {
        let seen = is_signalled(self.errors.as_ref());
        if seen {
            tracing::error!(ctrl = %self.id, "the platform reports an uncorrectable PCIe error");
        }
        seen
    }
}

impl Drop for VfioBus {
    fn drop(&mut self) {
        // DMA first: nothing that fails below leaves the function writing to memory.
        if self.gone.get().is_none()
            && let Err(error) = self.device.set_command(0, BUS_MASTER)
        {
            tracing::warn!(ctrl = %self.id, %error, "its DMA could not be switched off");
        }
        let irqs = self.irqs.get_mut().unwrap_or_else(PoisonError::into_inner);
        let used = [
            (VFIO_PCI_MSIX_IRQ_INDEX, !irqs.is_empty()),
            (VFIO_PCI_REQ_IRQ_INDEX, self.request.is_some()),
            (VFIO_PCI_ERR_IRQ_INDEX, self.errors.is_some()),
        ];
        for (index, _) in used.into_iter().filter(|(_, used)| *used) {
            if let Err(error) = sys::disable_irqs(self.device.file(), index) {
                tracing::warn!(ctrl = %self.id, index, %error, "interrupts could not be disabled");
            }
        }
    }
}

/// Maps control registers and doorbells, in one mapping if the kernel allows.
fn map_registers(
    device: &Arc<Device>,
    region: &Region,
    page: u64,
) -> Result<Vec<Arc<BarMap>>, VfioError> {
    let needed = |area: &&Area| area.offset < DOORBELLS + DOORBELLS_MAX * 4;
    let map = |area: &Area| {
        // A memory buffer after the doorbells is not needed.
        let len = area.len.min((DOORBELLS + DOORBELLS_MAX * 4).next_multiple_of(page));
        let area = Area { offset: area.offset, len };
        BarMap::new(device, region, area, page).map(Arc::new).map_err(device.os(Call::MapBar))
    };
    region.areas.iter().filter(needed).map(map).collect()
}

/// Returns the doorbells, as far as one mapping covers them.
fn find_doorbells(
    device: &Device,
    region: &Region,
    maps: &[Arc<BarMap>],
) -> Result<DoorbellPage, VfioError> {
    let none = |what, hint| VfioError::unsupported(device.address(), what, hint);
    let other = "name another function";
    if region.size < DOORBELLS + 8 {
        let what = "BAR 0 is too small for the registers of an NVMe controller";
        return Err(none(what, other));
    }
    let map = maps.iter().find(|map| map.dword(DOORBELLS).is_some());
    let map = map.ok_or_else(|| {
        let what = "the kernel does not let the doorbells of BAR 0 be mapped into a process";
        none(what, "a newer one may")
    })?;
    let mut cap = [0; 4];
    device
        .file()
        .read_exact_at(&mut cap, region.offset + u64::from(CAP) + 4)
        .map_err(device.os(Call::Config))?;
    // DSTRD is in the upper half; an absent controller reads as all ones.
    let stride = 4u32 << Cap(u64::from(u32::from_le_bytes(cap)) << 32).dstrd();
    let area = map.area();
    let len = (area.offset + area.len - DOORBELLS).min(DOORBELLS_MAX * u64::from(stride));
    map.touch(DOORBELLS, len);
    let host = map.dword(DOORBELLS).ok_or_else(|| none("BAR 0 has no doorbells", other))?;
    // SAFETY: these are `len` bytes of `map` from the doorbells on; they are only stored to.
    Ok(unsafe { DoorbellPage::new(host, None, stride, len as usize, map.clone()) })
}

/// Returns the number of MSI-X vectors to set up.
fn vectors(device: &Device, wanted: u16) -> u16 {
    match sys::irq_info(device.file(), VFIO_PCI_MSIX_IRQ_INDEX) {
        Ok(info) if info.flags & VFIO_IRQ_INFO_EVENTFD != 0 => {
            wanted.min(u16::try_from(info.count).unwrap_or(u16::MAX))
        }
        Ok(_) => 0,
        Err(error) => {
            tracing::warn!(ctrl = %device.address(), %error, "no word about MSI-X; poll instead");
            0
        }
    }
}

/// Returns an eventfd that the kernel signals for an event of the function.
fn watch(device: &Device, index: u32, what: &str) -> Option<OwnedFd> {
    let set_up = || {
        if sys::irq_info(device.file(), index)?.count == 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        sys::set_irqs(device.file(), index, &[eventfd.as_fd()])?;
        Ok::<_, io::Error>(eventfd)
    };
    set_up()
        .inspect_err(|error| {
            tracing::warn!(ctrl = %device.address(), %error, "{what} will not be reported");
        })
        .ok()
}

fn is_signalled(eventfd: Option<&OwnedFd>) -> bool {
    let mut count = [0; 8];
    matches!(eventfd.map(|eventfd| rustix::io::read(eventfd, &mut count)), Some(Ok(8)))
}
