//! Known deviations of drives from what they report.
//!
//! Each row names its source.

use crate::clock::Nanos;

/// Delay of [`Quirks::DELAY_BEFORE_READY_CHECK`] (Linux, `NVME_QUIRK_DELAY_AMOUNT`).
pub(crate) const READY_CHECK_DELAY: Nanos = Nanos::from_millis(2_300);

bitflags::bitflags! {
    /// Workarounds for a drive.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Quirks: u32 {
        /// After clearing CC.EN, CSTS must not be read for a while.
        const DELAY_BEFORE_READY_CHECK = 1;
        /// SGLs are advertised but do not work.
        const NO_SGL = 1 << 1;
        /// SGLs do not work in Dataset Management.
        const NO_SGL_FOR_DSM = 1 << 2;
        /// Write Zeroes is advertised but does not work.
        const NO_WRITE_ZEROES = 1 << 3;
    }
}

/// A row: PCI vendor, device (`None`: all of them), quirks, and source.
type Row = (u16, Option<u16>, Quirks, &'static str);

const LINUX: &str = "Linux, drivers/nvme/host/pci.c, nvme_id_table";
const SPDK: &str = "SPDK, lib/nvme/nvme_quirks.c";

const ROWS: &[Row] = &[
    // HGST adapter.
    (0x1c58, Some(0x0003), Quirks::DELAY_BEFORE_READY_CHECK, LINUX),
    // Seagate Nytro Flash Storage.
    (0x1bb1, Some(0x0100), Quirks::DELAY_BEFORE_READY_CHECK, LINUX),
    // Memblaze Pblaze4.
    (0x1c5f, Some(0x0540), Quirks::DELAY_BEFORE_READY_CHECK, SPDK),
    // Samsung PM1725 and PM1725a.
    (0x144d, Some(0xa821), Quirks::DELAY_BEFORE_READY_CHECK, SPDK),
    (0x144d, Some(0xa822), Quirks::DELAY_BEFORE_READY_CHECK, SPDK),
    // Samsung, a later model.
    (0x144d, Some(0xa826), Quirks::DELAY_BEFORE_READY_CHECK, SPDK),
    // Huawei.
    (0x19e5, None, Quirks::NO_SGL, SPDK),
    // Intel D7-P55xx.
    (0x8086, Some(0x0b60), Quirks::NO_SGL_FOR_DSM, SPDK),
    // Samsung PM9B1 and MZALQ256HBJD.
    (0x144d, Some(0xa80b), Quirks::NO_WRITE_ZEROES, LINUX),
    (0x144d, Some(0xa809), Quirks::NO_WRITE_ZEROES, LINUX),
];

impl Quirks {
    /// Returns the quirks of a function by its PCI vendor and device, or of a controller by its
    /// reported vendor (Identify, VID).
    #[must_use]
    pub fn of(vendor: u16, device: Option<u16>) -> Self {
        let is = |row: &&Row| row.0 == vendor && (row.1.is_none() || row.1 == device);
        ROWS.iter().filter(is).fold(Self::empty(), |all, (_, _, quirks, source)| {
            tracing::info!(vendor, device, ?quirks, source, "known drive");
            all | *quirks
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_of_a_device_or_of_a_vendor() {
        assert_eq!(Quirks::of(0x144d, Some(0xa822)), Quirks::DELAY_BEFORE_READY_CHECK);
        assert_eq!(Quirks::of(0x144d, None), Quirks::empty(), "not of all their drives");
        assert_eq!(Quirks::of(0x19e5, None), Quirks::NO_SGL);
        assert_eq!(Quirks::of(0x19e5, Some(0x0123)), Quirks::NO_SGL);
        assert_eq!(Quirks::of(0x1af4, Some(0x0010)), Quirks::empty());
    }
}
