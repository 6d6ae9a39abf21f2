//! Where a controller lives: a PCIe function behind VFIO, or the software controller.

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
    /// What a person calls this function: `0000:65:00.0`, `emu0`.
    fn id(&self) -> &str;

    /// Reads a 32-bit register at `offset` bytes into BAR0.
    ///
    /// # Errors
    /// [`Gone`] when the function is known to be absent. A plain all-ones value is returned as it
    /// is: only the caller knows for which register that is impossible.
    fn read32(&self, offset: u32) -> Result<u32, Gone>;

    /// Writes a 32-bit register at `offset` bytes into BAR0. After a reset of the NVM subsystem
    /// (NSSR) the function may be absent for a while, which is not taken for a removal.
    ///
    /// # Errors
    /// [`Gone`] when the function is known to be absent.
    fn write32(&self, offset: u32, value: u32) -> Result<(), Gone>;

    /// The doorbell registers as memory.
    fn doorbells(&self) -> DoorbellPage;

    /// The address space this controller's DMA goes through. Controllers of one container share it:
    /// memory mapped once is then at the same [`crate::Iova`] for all of them.
    fn dma(&self) -> &Arc<dyn DmaSpace>;

    /// PCI vendor and device of the function; `None` where it is not one.
    fn pci_id(&self) -> Option<(u16, u16)>;

    /// The memory node nearest to the function; `None` when the machine has only one or does not
    /// say.
    fn numa_node(&self) -> Option<u32>;

    /// Whether somebody wants the function back: its driver is being unbound, or it is about to be
    /// unplugged. It still works, and the other side waits until this bus is dropped: end the I/O,
    /// shut the controller down, drop it. Once `true`, it stays so.
    fn requested(&self) -> bool;

    /// Interrupt `vector` as an eventfd.
    ///
    /// # Errors
    /// [`InterruptError`] when the function has no such vector or the kernel refuses.
    fn interrupt(&self, vector: u16) -> Result<Interrupt, InterruptError>;

    /// Resets the function (Function Level Reset, or what the platform has in its place). It works
    /// where CC.EN no longer does.
    ///
    /// Afterwards the controller is disabled, its registers are as after power-on, all its queues
    /// are gone, and it does no DMA until it is enabled again. Everything else stays: the doorbell
    /// page, memory and its I/O virtual addresses, interrupt vectors, and the right of the function
    /// to do DMA. No doorbell may be rung meanwhile.
    ///
    /// # Errors
    /// [`ResetError`] when the function is absent, has no reset, or the platform refuses. The
    /// function may or may not have been reset then.
    fn reset(&self) -> Result<(), ResetError>;

    /// Whether the platform saw an uncorrectable PCIe error (AER) of the function since the last
    /// call. Data may be lost; reset the controller.
    fn pcie_error(&self) -> bool;
}

/// A function could not be reset.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// It is absent.
    #[error(transparent)]
    Gone(#[from] Gone),
    /// There is no way to reset this function alone.
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
        /// Why.
        source: io::Error,
    },
}

/// The doorbell registers (offset 1000h of BAR0) as each side addresses them.
///
/// Doorbell `2 * qid` is the submission tail and `2 * qid + 1` the completion head of queue `qid`,
/// `stride` bytes apart (4 << CAP.DSTRD). The page keeps its mapping: its addresses are good as
/// long as one clone of it lives, even when the bus does not.
#[derive(Debug, Clone)]
pub struct DoorbellPage {
    host: NonNull<u32>,
    device: Option<DevicePtr>,
    stride: u32,
    len: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl DoorbellPage {
    /// `len` bytes of doorbells at `host` (and at `device` for a kernel on the GPU), `stride` bytes
    /// apart.
    ///
    /// # Safety
    /// As long as `owner` lives, both addresses are those of `len` mapped bytes of doorbell
    /// registers (or of memory that is watched as such), aligned to 4; they may be written to at
    /// any time, and no Rust reference to them exists.
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

    /// Address in this process.
    #[must_use]
    pub const fn host(&self) -> NonNull<u32> {
        self.host
    }

    /// Address in a kernel on the GPU, when the page is mapped there.
    #[must_use]
    pub const fn device(&self) -> Option<DevicePtr> {
        self.device
    }

    /// Bytes from one doorbell to the next.
    #[must_use]
    pub const fn stride(&self) -> u32 {
        self.stride
    }

    /// Bytes mapped from the first doorbell on.
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
    /// Readable when the vector fired; read it to acknowledge.
    pub eventfd: Arc<OwnedFd>,
    /// The vector's number.
    pub vector: u16,
}

/// An interrupt vector could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterruptError {
    /// The function has fewer vectors.
    #[error("{bus}: interrupt vector {vector} was asked for, the function has {available}")]
    NoSuchVector {
        /// The function.
        bus: String,
        /// What was asked for.
        vector: u16,
        /// How many there are.
        available: u16,
    },
    /// The operating system refused.
    #[error("{bus}: setting up interrupt vector {vector} failed: {source}")]
    Os {
        /// The function.
        bus: String,
        /// What was asked for.
        vector: u16,
        /// Why.
        source: io::Error,
    },
}
