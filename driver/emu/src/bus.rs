//! The software controller from the driver's view.

use std::{fmt, sync::Arc};

use nvme_driver::{Bus, DmaSpace, DoorbellPage, Gone, Interrupt, InterruptError, ResetError};

use crate::emu::Emu;

/// A [`Bus`] with a software controller on it.
///
/// An unplugged controller reads as all ones, like a function behind a dead PCIe link: the bus
/// knows no more than a real one, so drivers must detect the removal themselves.
pub struct EmuBus {
    emu: Arc<Emu>,
    dma: Arc<dyn DmaSpace>,
}

impl EmuBus {
    pub(crate) fn new(emu: Arc<Emu>) -> Self {
        let dma = emu.domain().clone();
        Self { emu, dma }
    }

    /// Returns the controller.
    #[must_use]
    pub fn emu(&self) -> &Arc<Emu> {
        &self.emu
    }
}

impl fmt::Debug for EmuBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EmuBus({})", self.emu.id())
    }
}

impl Bus for EmuBus {
    fn id(&self) -> &str {
        self.emu.id()
    }

    fn read32(&self, offset: u32) -> Result<u32, Gone> {
        Ok(self.emu.read32(offset))
    }

    fn write32(&self, offset: u32, value: u32) -> Result<(), Gone> {
        self.emu.write32(offset, value);
        Ok(())
    }

    fn doorbells(&self) -> DoorbellPage {
        self.emu.doorbells().page()
    }

    fn dma(&self) -> &Arc<dyn DmaSpace> {
        &self.dma
    }

    fn pci_id(&self) -> Option<(u16, u16)> {
        self.emu.pci_id()
    }

    fn numa_node(&self) -> Option<u32> {
        None
    }

    fn requested(&self) -> bool {
        self.emu.requested()
    }

    fn interrupt(&self, vector: u16) -> Result<Interrupt, InterruptError> {
        self.emu.interrupts().listen(self.emu.id(), vector)
    }

    fn reset(&self) -> Result<(), ResetError> {
        if !self.emu.reset_function() {
            return Err(ResetError::Unsupported { bus: self.emu.id().into() });
        }
        Ok(())
    }

    fn pcie_error(&self) -> bool {
        self.emu.take_pcie_error()
    }
}
