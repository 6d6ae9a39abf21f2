//! The transport of a controller: a PCIe function behind VFIO, or the software controller.

use std::{any::Any, fmt, io, os::fd::OwnedFd, ptr::NonNull, sync::Arc};

use crate::dma::{DevicePtr, DmaSpace};

/// The device no longer answers: surprise removal, a lost link, or a register read of all ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the controller no longer answers on its bus (removed, powered off or link lost)")]
pub struct Gone;

/// Registers, doorbells, DMA and interrupts of one controller.
///
/// Control registers are methods, because only host code touches them. Doorbells are memory,
/// because a GPU cannot call a trait.
pub trait Bus: Send + Sync + fmt::Debug {
    /// Returns the function's display name, such as `0000:65:00.0` or `emu0`.
    fn id(&self) -> &str;

    /// Reads a 32-bit register at `offset` bytes into BAR0.
    ///
    /// # Errors
    /// Returns [`Gone`] if the function is known to be absent. An all-ones value is returned as it
    /// is: only the caller knows for which registers that value is impossible.
    fn read32(&self, offset: u32) -> Result<u32, Gone>;

    /// Writes a 32-bit register at `offset` bytes into BAR0. After a reset of the NVM subsystem
    /// (NSSR) the function may be absent for a while, which does not count as removal.
    ///
    /// # Errors
    /// Returns [`Gone`] if the function is known to be absent.
    fn write32(&self, offset: u32, value: u32) -> Result<(), Gone>;

    /// Returns the doorbell registers as memory.
    fn doorbells(&self) -> DoorbellPage;

    /// Returns the address space of this controller's DMA. Controllers of one container share it:
    /// memory mapped once has the same [`crate::Iova`] for all of them.
    fn dma(&self) -> &Arc<dyn DmaSpace>;

    /// Returns the PCI vendor and device of the function, or `None` for a software controller.
    fn pci_id(&self) -> Option<(u16, u16)>;

    /// Returns the nearest NUMA node, or `None` if the machine has only one or does not report it.
    fn numa_node(&self) -> Option<u32>;

    /// Returns true once the host wants the function back: its driver is being unbound, or it is
    /// about to be unplugged. The function still works, and the request blocks until this bus is
    /// dropped: end the I/O, shut the controller down, drop it. Once `true`, it stays `true`.
    fn requested(&self) -> bool;

    /// Returns interrupt `vector` as an eventfd.
    ///
    /// # Errors
    /// Returns [`InterruptError`] if the function has no such vector or the kernel refuses.
    fn interrupt(&self, vector: u16) -> Result<Interrupt, InterruptError>;

    /// Resets the function (Function Level Reset or the platform's substitute). Works even if
    /// clearing CC.EN no longer does.
    ///
    /// Afterwards the controller is disabled, its registers have their power-on values, all its
    /// queues are gone, and it does no DMA until it is enabled again. Everything else stays: the
    /// doorbell page, memory and its I/O virtual addresses, interrupt vectors, and bus mastering.
    /// No doorbell may be rung during the reset.
    ///
    /// # Errors
    /// Returns [`ResetError`] if the function is absent, has no reset, or the platform refuses. The
    /// function may or may not have been reset. One that is absent now may be back later.
    fn reset(&self) -> Result<(), ResetError>;

    /// Returns whether the platform saw an uncorrectable PCIe error (AER, DPC) of the function
    /// since the last call. It resets the link, which takes a while and clears the function's BARs.
    /// Data may be lost; reset the controller.
    fn pcie_error(&self) -> bool;
}

/// Failure to reset a function.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// The function is absent.
    #[error(transparent)]
    Gone(#[from] Gone),
    /// The function has no reset of its own.
    #[error("{bus}: the function has no reset of its own; power cycle the drive")]
    Unsupported {
        /// The function.
        bus: String,
    },
    /// The operating system refused.
    #[error("{bus}: resetting the function failed: {source}; try again, or power cycle the drive")]
    Os {
        /// The function.
        bus: String,
        /// The cause.
        source: io::Error,
    },
}

/// The doorbell registers (offset 1000h of BAR0) as each side addresses them.
///
/// Doorbell `2 * qid` is the submission tail and `2 * qid + 1` the completion head of queue `qid`,
/// `stride` bytes apart (4 << CAP.DSTRD). The addresses stay valid as long as one clone of the page
/// lives, even after the bus is dropped.
#[derive(Debug, Clone)]
pub struct DoorbellPage {
    host: NonNull<u32>,
    device: Option<DevicePtr>,
    stride: u32,
    len: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl DoorbellPage {
    /// Describes `len` bytes of doorbells at `host` (and at `device` for a GPU kernel), `stride`
    /// bytes apart.
    ///
    /// # Safety
    /// As long as `owner` lives, both addresses must map `len` bytes of doorbell registers (or of
    /// memory that is watched as such), aligned to 4. They may be written to at any time, and no
    /// Rust reference to them may exist.
    #[must_use]
    #[allow(unsafe_code, reason = "a bus vouches for the addresses its doorbells are written to")]
    pub unsafe fn new(
        host: NonNull<u32>,
        device: Option<DevicePtr>,
        stride: u32,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { host, device, stride, len, _owner: owner }
    }

    /// Returns the address in this process.
    #[must_use]
    pub const fn host(&self) -> NonNull<u32> {
        self.host
    }

    /// Returns the address in a GPU kernel, if the page is mapped there.
    #[must_use]
    pub const fn device(&self) -> Option<DevicePtr> {
        self.device
    }

    /// Returns the distance between doorbells in bytes.
    #[must_use]
    pub const fn stride(&self) -> u32 {
        self.stride
    }

    /// Returns the mapped length in bytes, from the first doorbell on.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a page without doorbells is no page")]
    pub const fn len(&self) -> usize {
        self.len
    }
}

// SAFETY: addresses and their owner (Send + Sync); every access goes through platform::mmio.
#[allow(unsafe_code, reason = "an address that crosses threads; accesses are in platform::mmio")]
unsafe impl Send for DoorbellPage {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "an address that crosses threads; accesses are in platform::mmio")]
unsafe impl Sync for DoorbellPage {}

/// One interrupt vector: an eventfd that the bus signals.
#[derive(Debug, Clone)]
pub struct Interrupt {
    /// Readable after the vector fired; read it to acknowledge.
    pub eventfd: Arc<OwnedFd>,
    /// The vector's number.
    pub vector: u16,
}

/// Failure to set up an interrupt vector.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterruptError {
    /// The function has fewer vectors.
    #[error("{bus}: interrupt vector {vector} was asked for, the function has {available}")]
    NoSuchVector {
        /// The function.
        bus: String,
        /// The requested vector.
        vector: u16,
        /// Number of vectors.
        available: u16,
    },
    /// The operating system refused.
    #[error("{bus}: setting up interrupt vector {vector} failed: {source}")]
    Os {
        /// The function.
        bus: String,
        /// The requested vector.
        vector: u16,
        /// The cause.
        source: io::Error,
    },
}
