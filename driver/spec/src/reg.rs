//! Controller registers (Base, "Controller Properties"; PCIe Transport, doorbells).

use core::fmt;

use crate::dwords::{field, with_field};

/// Controller Capabilities, 64 bits.
pub const CAP: u32 = 0x00;
/// Version, 32 bits.
pub const VS: u32 = 0x08;
/// Interrupt Mask Set, 32 bits (not with MSI-X).
pub const INTMS: u32 = 0x0c;
/// Interrupt Mask Clear, 32 bits (not with MSI-X).
pub const INTMC: u32 = 0x10;
/// Controller Configuration, 32 bits.
pub const CC: u32 = 0x14;
/// Controller Status, 32 bits.
pub const CSTS: u32 = 0x1c;
/// NVM Subsystem Reset, 32 bits.
pub const NSSR: u32 = 0x20;
/// Value written to NSSR to reset the subsystem: "NVMe".
pub const NSSR_NVME: u32 = 0x4e56_4d65;
/// Admin Queue Attributes, 32 bits.
pub const AQA: u32 = 0x24;
/// Admin Submission Queue base address, 64 bits.
pub const ASQ: u32 = 0x28;
/// Admin Completion Queue base address, 64 bits.
pub const ACQ: u32 = 0x30;
/// Controller Ready Timeouts, 32 bits (if CAP.CRMS is not 0).
pub const CRTO: u32 = 0x68;
/// First doorbell: the admin submission queue's tail.
pub const DOORBELLS: u32 = 0x1000;

/// Value of every register of an absent function.
pub const ALL_ONES: u32 = 0xffff_ffff;

macro_rules! register_fields {
    ($name:ident($int:ty) {
        $($(#[$meta:meta])* $get:ident / $with:ident: $ty:ty = $lo:literal, $width:literal;)*
    }) => {
        impl $name {
            $(
                $(#[$meta])*
                #[must_use]
                pub const fn $get(self) -> $ty {
                    field(self.0 as u64, $lo, $width) as $ty
                }

                #[doc = concat!("This value with `", stringify!($get), "` replaced.")]
                #[must_use]
                pub const fn $with(self, to: $ty) -> Self {
                    Self(with_field(self.0 as u64, $lo, $width, to as u64) as $int)
                }
            )*
        }
    };
}

/// Controller Capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cap(pub u64);

register_fields!(Cap(u64) {
    /// Maximum Queue Entries Supported, zero-based.
    mqes_z / with_mqes_z: u16 = 0, 16;
    /// Contiguous Queues Required: 1 = queues are physically contiguous.
    cqr / with_cqr: u8 = 16, 1;
    /// Arbitration Mechanism Supported.
    ams / with_ams: u8 = 17, 2;
    /// Timeout for CSTS.RDY changes, in units of 500 milliseconds.
    to_500ms / with_to_500ms: u8 = 24, 8;
    /// Doorbell Stride: doorbells are `4 << dstrd` bytes apart.
    dstrd / with_dstrd: u8 = 32, 4;
    /// NVM Subsystem Reset Supported.
    nssrs / with_nssrs: u8 = 36, 1;
    /// Command Sets Supported: bit 0 = NVM, bit 6 = I/O command sets, bit 7 = none.
    css / with_css: u8 = 37, 8;
    /// Smallest memory page: `4096 << mpsmin` bytes.
    mpsmin / with_mpsmin: u8 = 48, 4;
    /// Largest memory page: `4096 << mpsmax` bytes.
    mpsmax / with_mpsmax: u8 = 52, 4;
    /// Controller Ready Modes Supported: bit 0 = with media, bit 1 = independent of media.
    crms / with_crms: u8 = 59, 2;
});

/// Controller Configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cc(pub u32);

register_fields!(Cc(u32) {
    /// Enable.
    en / with_en: u8 = 0, 1;
    /// I/O Command Set Selected: 0 = NVM, 6 = all supported.
    css / with_css: u8 = 4, 3;
    /// Memory Page Size: `4096 << mps` bytes.
    mps / with_mps: u8 = 7, 4;
    /// Arbitration Mechanism Selected.
    ams / with_ams: u8 = 11, 3;
    /// Shutdown Notification, see [`ShutdownNotification`].
    shn / with_shn: u8 = 14, 2;
    /// I/O Submission Queue Entry Size, log2 of bytes (6).
    iosqes / with_iosqes: u8 = 16, 4;
    /// I/O Completion Queue Entry Size, log2 of bytes (4).
    iocqes / with_iocqes: u8 = 20, 4;
});

/// Controller Status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Csts(pub u32);

register_fields!(Csts(u32) {
    /// Ready.
    rdy / with_rdy: u8 = 0, 1;
    /// Controller Fatal Status.
    cfs / with_cfs: u8 = 1, 1;
    /// Shutdown Status, see [`ShutdownStatus`].
    shst / with_shst: u8 = 2, 2;
    /// NVM Subsystem Reset Occurred.
    nssro / with_nssro: u8 = 4, 1;
    /// Processing Paused.
    pp / with_pp: u8 = 5, 1;
});

impl Csts {
    /// Returns whether all bits are set: no function answers at this address any more.
    #[must_use]
    pub const fn is_gone(self) -> bool {
        self.0 == ALL_ONES
    }
}

/// Controller Ready Timeouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Crto(pub u32);

register_fields!(Crto(u32) {
    /// Timeout of a controller that becomes ready with media, in units of 500 milliseconds.
    crwmt_500ms / with_crwmt_500ms: u16 = 0, 16;
});

/// Admin Queue Attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Aqa(pub u32);

register_fields!(Aqa(u32) {
    /// Admin Submission Queue Size in entries, zero-based.
    asqs_z / with_asqs_z: u16 = 0, 12;
    /// Admin Completion Queue Size in entries, zero-based.
    acqs_z / with_acqs_z: u16 = 16, 12;
});

/// Version: major.minor.tertiary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Version(pub u32);

impl Version {
    /// Builds a version.
    #[must_use]
    pub const fn new(major: u16, minor: u8, tertiary: u8) -> Self {
        Self((major as u32) << 16 | (minor as u32) << 8 | tertiary as u32)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 >> 16, (self.0 >> 8) & 0xff)?;
        match self.0 & 0xff {
            0 => Ok(()),
            tertiary => write!(f, ".{tertiary}"),
        }
    }
}

open_enum! {
    /// CC.SHN.
    ShutdownNotification: u8 {
        /// No notification.
        NONE = 0,
        /// Normal shutdown.
        NORMAL = 1,
        /// Abrupt shutdown.
        ABRUPT = 2,
    }
}

open_enum! {
    /// CSTS.SHST.
    ShutdownStatus: u8 {
        /// Normal operation.
        NORMAL = 0,
        /// Shutdown processing is under way.
        OCCURRING = 1,
        /// Shutdown processing is complete.
        COMPLETE = 2,
    }
}
