//! The register file (Base, "Controller Properties"), without the effects of register writes.

use nvme_driver::Nanos;
use nvme_spec::reg::{self, Aqa, Cap, Cc, Version};

use crate::config::EmuConfig;

/// log2 of the largest memory page over 4 KiB (CAP.MPSMAX): 64 KiB.
const MPSMAX: u8 = 4;
/// Version in VS and the identify data.
pub(super) const VERSION: Version = Version::new(2, 0, 0);

/// Values written by the host, and constants.
#[derive(Debug)]
pub(super) struct Registers {
    pub cap: Cap,
    version: Version,
    pub cc: Cc,
    pub aqa: Aqa,
    pub asq: u64,
    pub acq: u64,
    /// Bit set of vectors masked by INTMS.
    pub masked: u32,
}

impl Registers {
    pub(super) fn new(config: &EmuConfig) -> Self {
        let half_seconds = config.ready_timeout.0.div_ceil(Nanos::from_millis(500).0).clamp(1, 255);
        let cap = Cap::default()
            // Ready as soon as its media are.
            .with_crms(1)
            .with_mqes_z(config.mqes - 1)
            .with_cqr(config.contiguous_queues.into())
            .with_to_500ms(half_seconds as u8)
            .with_dstrd(config.dstrd)
            .with_nssrs(config.subsystem_reset.into())
            .with_css(1)
            .with_mpsmax(MPSMAX);
        let version = config.drive.as_ref().map_or(VERSION, |drive| drive.version);
        Self { cap, version, cc: Cc(0), aqa: Aqa(0), asq: 0, acq: 0, masked: 0 }
    }

    /// Resets to power-on values.
    pub(super) fn clear(&mut self) {
        (self.cc, self.aqa, self.asq, self.acq, self.masked) = (Cc(0), Aqa(0), 0, 0, 0);
    }

    /// Returns the size of a memory page in bytes (CC.MPS).
    pub(super) fn page_bytes(&self) -> u64 {
        4096 << self.cc.mps()
    }

    /// Returns the largest depth of an I/O queue.
    pub(super) fn queue_entries_max(&self) -> u32 {
        u32::from(self.cap.mqes_z()) + 1
    }

    /// Reads a dword; reserved registers read as 0. CSTS is not here: it follows from the state.
    pub(super) fn read(&self, offset: u32) -> u32 {
        match offset {
            reg::CAP => self.cap.0 as u32,
            0x04 => (self.cap.0 >> 32) as u32,
            reg::VS => self.version.0,
            reg::INTMS | reg::INTMC => self.masked,
            reg::CC => self.cc.0,
            reg::AQA => self.aqa.0,
            reg::ASQ => self.asq as u32,
            0x2c => (self.asq >> 32) as u32,
            reg::ACQ => self.acq as u32,
            0x34 => (self.acq >> 32) as u32,
            reg::CRTO => u32::from(self.cap.to_500ms()),
            _ => 0,
        }
    }

    /// Writes a register that has no effect until the controller is enabled.
    pub(super) fn write(&mut self, offset: u32, value: u32) {
        // Bits 11:0 of the base addresses are reserved.
        let low = |old: u64| old & !0xffff_ffff | u64::from(value & !0xfff);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            reg::AQA => self.aqa = Aqa(value & 0x0fff_0fff),
            reg::ASQ => self.asq = low(self.asq),
            0x2c => self.asq = high(self.asq),
            reg::ACQ => self.acq = low(self.acq),
            0x34 => self.acq = high(self.acq),
            _ => {}
        }
    }

    /// Returns the reason for which the register values prevent enabling, if any.
    pub(super) fn refusal(&self) -> Option<&'static str> {
        // "Controller Configuration" and "Admin Queue Attributes": values that CAP does not
        // advertise, and queues of fewer than two entries, are invalid. Entry sizes may still be 0:
        // they are needed only when the first I/O queue is created.
        let (cc, page) = (self.cc, self.page_bytes());
        if cc.css() != 0 {
            Some("CC.CSS selects a command set that CAP.CSS does not have")
        } else if cc.mps() > MPSMAX {
            Some("CC.MPS is above CAP.MPSMAX")
        } else if cc.ams() != 0 {
            Some("CC.AMS selects an arbitration that CAP.AMS does not have")
        } else if !matches!(cc.iosqes(), 0 | 6) || !matches!(cc.iocqes(), 0 | 4) {
            Some("CC.IOSQES is not 6 or CC.IOCQES is not 4")
        } else if self.aqa.asqs_z() == 0 || self.aqa.acqs_z() == 0 {
            Some("AQA asks for an admin queue of one entry")
        } else if self.asq & (page - 1) != 0 || self.acq & (page - 1) != 0 {
            Some("ASQ or ACQ is not aligned to a memory page")
        } else {
            None
        }
    }
}
