//! Flexible Data Placement (Base, "Flexible Data Placement"; first ratified as TP4146).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

open_enum! {
    /// Data to return from an I/O Management Receive (MO).
    ManagementOperation: u8 {
        /// Nothing.
        NONE = 0,
        /// [`RuhStatusHeader`] and a [`RuhStatus`] for each Placement Identifier.
        RECLAIM_UNIT_HANDLE_STATUS = 1,
    }
}

command_dwords! {
    /// I/O Management Receive: CDW10 and CDW11.
    IoManagementReceive {
        /// Management operation.
        operation: ManagementOperation = cdw10[0, 8];
        /// Management operation specific (MOS).
        specific: u16 = cdw10[16, 16];
        /// Dwords to return, zero-based (NUMD).
        numd_z: u32 = cdw11[0, 32];
    }
}

/// Header of the Reclaim Unit Handle Status, 16 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RuhStatusHeader {
    /// Reserved.
    pub reserved0: [u8; 14],
    /// Descriptors that follow (NRUHSD): placement handles of the namespace times reclaim groups.
    pub descriptors: u16,
}

const _: () = assert!(size_of::<RuhStatusHeader>() == 16);

/// Descriptor of the Reclaim Unit Handle Status, 32 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RuhStatus {
    /// Placement Identifier, for use in writes.
    pub pid: u16,
    /// The reclaim unit handle.
    pub ruhid: u16,
    /// Estimated active reclaim unit time remaining; 0 = not reported.
    pub earutr: u32,
    /// LBAs available in the reclaim unit.
    pub ruamw: u64,
    /// Reserved.
    pub reserved16: [u8; 16],
}

const _: () = assert!(size_of::<RuhStatus>() == 32);

/// Header of the log page FDP Configurations, 16 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct FdpConfigurationsHeader {
    /// Number of configurations that follow, zero-based (NUMFDPC).
    pub configurations_z: u16,
    /// Version of the page: 0.
    pub version: u8,
    /// Reserved.
    pub reserved3: u8,
    /// Size of the page in bytes, including this header.
    pub size: u32,
    /// Reserved.
    pub reserved8: [u8; 8],
}

const _: () = assert!(size_of::<FdpConfigurationsHeader>() == 16);

/// One FDP configuration, 64 bytes. One dword per reclaim unit handle follows it, with the type of
/// the handle in the lowest byte, then vendor specific bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FdpConfiguration {
    /// Size of this configuration in bytes, including the bytes that follow it (DSZE).
    pub size: u16,
    /// Attributes: number of Placement Identifier bits for the reclaim group in bits 3:0 (RGIF),
    /// [`FdpConfiguration::VALID`].
    pub attributes: u8,
    /// Number of vendor specific bytes at the end.
    pub vendor_bytes: u8,
    /// Number of reclaim groups (NRG).
    pub reclaim_groups: u32,
    /// Number of reclaim unit handles (NRUH).
    pub reclaim_unit_handles: u16,
    /// Largest number of Placement Identifiers of a namespace, zero-based (MAXPIDS).
    pub placement_ids_max_z: u16,
    /// Largest number of namespaces of the endurance group (NNSS).
    pub namespaces_max: u32,
    /// Bytes of a reclaim unit (RUNS).
    pub reclaim_unit_bytes: u64,
    /// Estimated reclaim unit time limit; 0 = not reported.
    pub erutl: u32,
    /// Reserved.
    pub reserved28: [u8; 36],
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<FdpConfiguration>() == 64);
    assert!(offset_of!(FdpConfiguration, reclaim_unit_handles) == 8);
    assert!(offset_of!(FdpConfiguration, reclaim_unit_bytes) == 16);
    assert!(offset_of!(FdpConfiguration, erutl) == 24);
};

impl Default for FdpConfiguration {
    fn default() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }
}

impl FdpConfiguration {
    /// Attribute: the configuration is usable.
    pub const VALID: u8 = 1 << 7;
    /// Type of a reclaim unit handle: data that the controller moves may mix with that of others.
    pub const INITIALLY_ISOLATED: u32 = 1;
}
