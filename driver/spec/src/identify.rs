//! Identify data structures (Base, "Identify command"; NVM Command Set, "Identify Namespace").

use core::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

bitflags::bitflags! {
    /// Optional admin commands (OACS).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Oacs: u16 {
        /// Security Send and Receive.
        const SECURITY = 1;
        /// Format NVM.
        const FORMAT = 1 << 1;
        /// Firmware commit and download.
        const FIRMWARE = 1 << 2;
        /// Namespace management.
        const NAMESPACE_MANAGEMENT = 1 << 3;
        /// Doorbell Buffer Config.
        const DOORBELL_BUFFER = 1 << 8;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// Optional NVM commands (ONCS).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Oncs: u16 {
        /// Compare.
        const COMPARE = 1;
        /// Write Uncorrectable.
        const WRITE_UNCORRECTABLE = 1 << 1;
        /// Dataset Management.
        const DATASET_MANAGEMENT = 1 << 2;
        /// Write Zeroes.
        const WRITE_ZEROES = 1 << 3;
        /// Save and Select in features.
        const FEATURE_SAVE = 1 << 4;
        /// Reservations.
        const RESERVATIONS = 1 << 5;
        /// Verify.
        const VERIFY = 1 << 7;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// Controller attributes (CTRATT).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Ctratt: u32 {
        /// Endurance groups.
        const ENDURANCE_GROUPS = 1 << 4;
        /// Flexible Data Placement (FDPS).
        const FLEXIBLE_DATA_PLACEMENT = 1 << 19;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// Volatile write cache (VWC).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Vwc: u8 {
        /// A volatile write cache is present.
        const PRESENT = 1;
        /// Flush to all namespaces is supported (valid if bit 2 is set).
        const FLUSH_ALL = 1 << 1;
        /// Bit 1 is valid.
        const FLUSH_ALL_KNOWN = 1 << 2;
        const _ = !0;
    }
}

open_enum! {
    /// SGLS bits 1:0.
    SglSupport: u8 {
        /// No SGLs in NVM commands.
        NONE = 0,
        /// SGLs of any alignment and length.
        BYTE = 1,
        /// SGLs whose addresses and lengths are multiples of 4.
        DWORD = 2,
    }
}

/// SGL support (SGLS).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct Sgls(pub u32);

impl Sgls {
    /// Bit bucket descriptors are supported.
    pub const BIT_BUCKET: u32 = 1 << 16;
    /// An SGL longer than the data is allowed.
    pub const OVERSIZED: u32 = 1 << 18;
    /// MPTR may point to an SGL.
    pub const MPTR_SGL: u32 = 1 << 19;
    /// Addresses may be offsets.
    pub const OFFSET: u32 = 1 << 20;

    /// Returns the level of SGL support.
    #[must_use]
    pub const fn support(self) -> SglSupport {
        SglSupport(self.0 as u8 & 3)
    }

    /// Returns whether bit bucket descriptors are supported.
    #[must_use]
    pub const fn bit_bucket(self) -> bool {
        self.0 & Self::BIT_BUCKET != 0
    }

    /// Returns whether addresses may be offsets.
    #[must_use]
    pub const fn offset(self) -> bool {
        self.0 & Self::OFFSET != 0
    }
}

/// Identify Controller, 4096 bytes (CNS 01h).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IdentifyController {
    /// PCI vendor.
    pub vid: u16,
    /// PCI subsystem vendor.
    pub ssvid: u16,
    /// Serial number, ASCII padded with spaces.
    pub sn: [u8; 20],
    /// Model number, ASCII padded with spaces.
    pub mn: [u8; 40],
    /// Firmware revision, ASCII padded with spaces.
    pub fr: [u8; 8],
    /// Recommended arbitration burst, log2.
    pub rab: u8,
    /// IEEE OUI.
    pub ieee: [u8; 3],
    /// Multi-path and namespace sharing.
    pub cmic: u8,
    /// Maximum data transfer size: `2^mdts` minimum pages; 0 = no limit.
    pub mdts: u8,
    /// Controller identifier.
    pub cntlid: u16,
    /// Version.
    pub ver: u32,
    /// RTD3 resume latency in microseconds.
    pub rtd3r: u32,
    /// RTD3 entry latency in microseconds: the longest duration of a shutdown.
    pub rtd3e: u32,
    /// Optional asynchronous events.
    pub oaes: u32,
    /// Controller attributes, see [`Ctratt`].
    pub ctratt: u32,
    /// Read recovery levels.
    pub rrls: u16,
    /// Reserved.
    pub reserved102: [u8; 9],
    /// Controller type: 1 = I/O.
    pub cntrltype: u8,
    /// FRU identifier.
    pub fguid: [u8; 16],
    /// Command retry delay times in units of 100 milliseconds.
    pub crdt: [u16; 3],
    /// Reserved.
    pub reserved134: [u8; 122],
    /// Optional admin commands, see [`Oacs`].
    pub oacs: u16,
    /// Abort command limit, zero-based.
    pub acl_z: u8,
    /// Asynchronous event request limit, zero-based.
    pub aerl_z: u8,
    /// Firmware updates.
    pub frmw: u8,
    /// Log page attributes.
    pub lpa: u8,
    /// Error log page entries, zero-based.
    pub elpe_z: u8,
    /// Number of power states, zero-based.
    pub npss_z: u8,
    /// Admin vendor specific command format.
    pub avscc: u8,
    /// Autonomous power state transitions.
    pub apsta: u8,
    /// Warning temperature in kelvins.
    pub wctemp: u16,
    /// Critical temperature in kelvins.
    pub cctemp: u16,
    /// Maximum time for firmware activation in units of 100 milliseconds; 0 = not reported.
    pub mtfa: u16,
    /// Host memory buffer preferred size, in units of 4 KiB.
    pub hmpre: u32,
    /// Fields unused by this project (bytes 276 to 327).
    pub reserved276: [u8; 52],
    /// Sanitize capabilities: crypto erase, block erase and overwrite in bits 2:0.
    pub sanicap: u32,
    /// Fields unused by this project (bytes 332 to 339).
    pub reserved332: [u8; 8],
    /// Largest endurance group identifier.
    pub endgidmax: u16,
    /// Fields unused by this project (bytes 342 to 511).
    pub reserved342: [u8; 170],
    /// Submission queue entry size: bits 3:0 required, 7:4 maximum, log2 of bytes.
    pub sqes: u8,
    /// Completion queue entry size: bits 3:0 required, 7:4 maximum, log2 of bytes.
    pub cqes: u8,
    /// Maximum outstanding commands; 0 = not reported.
    pub maxcmd: u16,
    /// Largest namespace identifier.
    pub nn: u32,
    /// Optional NVM commands, see [`Oncs`].
    pub oncs: u16,
    /// Fused operations.
    pub fuses: u16,
    /// Format NVM attributes.
    pub fna: u8,
    /// Volatile write cache, see [`Vwc`].
    pub vwc: u8,
    /// Atomic write unit normal in LBAs, zero-based.
    pub awun_z: u16,
    /// Atomic write unit power fail in LBAs, zero-based.
    pub awupf_z: u16,
    /// I/O command set vendor specific command format.
    pub icsvscc: u8,
    /// Namespace write protection.
    pub nwpc: u8,
    /// Atomic compare and write unit, zero-based.
    pub acwu_z: u16,
    /// Copy descriptor formats.
    pub cdfs: u16,
    /// SGL support.
    pub sgls: Sgls,
    /// Maximum number of allowed namespaces.
    pub mnan: u32,
    /// Fields unused by this project (bytes 544 to 767).
    pub reserved544: [u8; 224],
    /// NVM subsystem qualified name, UTF-8, zero-terminated.
    pub subnqn: [u8; 256],
    /// Fields unused by this project (bytes 1024 to 2047).
    pub reserved1024: [u8; 1024],
    /// Power state descriptors.
    pub psd: [[u8; 32]; 32],
    /// Vendor specific.
    pub vendor: [u8; 1024],
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<IdentifyController>() == 4096);
    assert!(offset_of!(IdentifyController, hmpre) == 272);
    assert!(offset_of!(IdentifyController, sanicap) == 328);
    assert!(offset_of!(IdentifyController, mdts) == 77);
    assert!(offset_of!(IdentifyController, ver) == 80);
    assert!(offset_of!(IdentifyController, cntrltype) == 111);
    assert!(offset_of!(IdentifyController, crdt) == 128);
    assert!(offset_of!(IdentifyController, oacs) == 256);
    assert!(offset_of!(IdentifyController, cctemp) == 268);
    assert!(offset_of!(IdentifyController, ctratt) == 96);
    assert!(offset_of!(IdentifyController, endgidmax) == 340);
    assert!(offset_of!(IdentifyController, sqes) == 512);
    assert!(offset_of!(IdentifyController, vwc) == 525);
    assert!(offset_of!(IdentifyController, sgls) == 536);
    assert!(offset_of!(IdentifyController, subnqn) == 768);
    assert!(offset_of!(IdentifyController, psd) == 2048);
};

impl Default for IdentifyController {
    fn default() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }
}

impl fmt::Debug for IdentifyController {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentifyController")
            .field("model", &self.model())
            .field("serial", &self.serial())
            .field("firmware", &self.firmware())
            .field("mdts", &self.mdts)
            .field("sgls", &self.sgls)
            .field("nn", &self.nn)
            .finish_non_exhaustive()
    }
}

/// Strips the padding of ASCII text; empty if `bytes` is not text.
fn text(bytes: &[u8]) -> &str {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    core::str::from_utf8(&bytes[..end]).unwrap_or("").trim()
}

impl IdentifyController {
    /// Returns the model number without padding.
    #[must_use]
    pub fn model(&self) -> &str {
        text(&self.mn)
    }

    /// Returns the serial number without padding.
    #[must_use]
    pub fn serial(&self) -> &str {
        text(&self.sn)
    }

    /// Returns the firmware revision without padding.
    #[must_use]
    pub fn firmware(&self) -> &str {
        text(&self.fr)
    }

    /// Returns the controller attributes.
    #[must_use]
    pub const fn attributes(&self) -> Ctratt {
        Ctratt::from_bits_retain(self.ctratt)
    }

    /// Returns the optional admin commands.
    #[must_use]
    pub const fn admin_commands(&self) -> Oacs {
        Oacs::from_bits_retain(self.oacs)
    }

    /// Returns the NVM subsystem's qualified name.
    #[must_use]
    pub fn subsystem(&self) -> &str {
        text(&self.subnqn)
    }

    /// Returns whether the NVM subsystem may have other controllers: CMIC has bits for more ports,
    /// more controllers and SR-IOV.
    #[must_use]
    pub const fn may_have_peers(&self) -> bool {
        self.cmic & 0b111 != 0
    }

    /// Returns the optional NVM commands.
    #[must_use]
    pub const fn nvm_commands(&self) -> Oncs {
        Oncs::from_bits_retain(self.oncs)
    }

    /// Returns the volatile write cache field.
    #[must_use]
    pub const fn write_cache(&self) -> Vwc {
        Vwc::from_bits_retain(self.vwc)
    }
}

/// An LBA format: metadata bytes in 15:0, log2 of the LBA size in 23:16, relative performance in
/// 25:24.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct LbaFormat(pub u32);

impl LbaFormat {
    /// Creates a format of `1 << lbads` data bytes and `ms` metadata bytes.
    #[must_use]
    pub const fn new(lbads: u8, ms: u16) -> Self {
        Self(ms as u32 | (lbads as u32) << 16)
    }

    /// Returns the metadata bytes per LBA.
    #[must_use]
    pub const fn ms(self) -> u16 {
        self.0 as u16
    }

    /// Returns log2 of the data bytes per LBA; 0 = the format is not available.
    #[must_use]
    pub const fn lbads(self) -> u8 {
        (self.0 >> 16) as u8
    }
}

/// Identify Namespace, 4096 bytes (CNS 00h, NVM command set).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IdentifyNamespace {
    /// Size in LBAs.
    pub nsze: u64,
    /// Capacity in LBAs.
    pub ncap: u64,
    /// LBAs in use.
    pub nuse: u64,
    /// Features, see [`IdentifyNamespace::OPTPERF`].
    pub nsfeat: u8,
    /// Number of LBA formats, zero-based.
    pub nlbaf_z: u8,
    /// Format in use: index in bits 3:0 and 6:5, metadata at the end of the data in bit 4.
    pub flbas: u8,
    /// Metadata capabilities.
    pub mc: u8,
    /// Protection capabilities.
    pub dpc: u8,
    /// Protection in use.
    pub dps: u8,
    /// Multi-path and sharing.
    pub nmic: u8,
    /// Reservation capabilities.
    pub rescap: u8,
    /// Format progress: remaining percentage in bits 6:0.
    pub fpi: u8,
    /// Deallocate features: bits 2:0 = value that a deallocated block reads as (1 = zeroes).
    pub dlfeat: u8,
    /// Atomic write unit normal, zero-based.
    pub nawun_z: u16,
    /// Atomic write unit power fail, zero-based.
    pub nawupf_z: u16,
    /// Atomic compare and write unit, zero-based.
    pub nacwu_z: u16,
    /// Atomic boundary size normal.
    pub nabsn: u16,
    /// Atomic boundary offset.
    pub nabo: u16,
    /// Atomic boundary size power fail.
    pub nabspf: u16,
    /// Optimal I/O boundary in LBAs; 0 = not reported.
    pub noiob: u16,
    /// NVM capacity in bytes.
    pub nvmcap: [u8; 16],
    /// Preferred write granularity in LBAs, zero-based.
    pub npwg_z: u16,
    /// Preferred write alignment in LBAs, zero-based.
    pub npwa_z: u16,
    /// Preferred deallocate granularity in LBAs, zero-based.
    pub npdg_z: u16,
    /// Preferred deallocate alignment in LBAs, zero-based.
    pub npda_z: u16,
    /// Optimal write size in LBAs, zero-based.
    pub nows_z: u16,
    /// Fields unused by this project (bytes 74 to 98).
    pub reserved74: [u8; 25],
    /// Namespace attributes: bit 0 = write protected.
    pub nsattr: u8,
    /// Fields unused by this project (bytes 100 and 101).
    pub reserved100: [u8; 2],
    /// Endurance group; 0 = not reported.
    pub endgid: u16,
    /// Namespace globally unique identifier.
    pub nguid: [u8; 16],
    /// IEEE extended unique identifier.
    pub eui64: [u8; 8],
    /// LBA formats.
    pub lbaf: [LbaFormat; 64],
    /// Vendor specific.
    pub vendor: [u8; 3712],
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<IdentifyNamespace>() == 4096);
    assert!(offset_of!(IdentifyNamespace, nsfeat) == 24);
    assert!(offset_of!(IdentifyNamespace, dlfeat) == 33);
    assert!(offset_of!(IdentifyNamespace, nvmcap) == 48);
    assert!(offset_of!(IdentifyNamespace, nows_z) == 72);
    assert!(offset_of!(IdentifyNamespace, npdg_z) == 68);
    assert!(offset_of!(IdentifyNamespace, nsattr) == 99);
    assert!(offset_of!(IdentifyNamespace, endgid) == 102);
    assert!(offset_of!(IdentifyNamespace, nguid) == 104);
    assert!(offset_of!(IdentifyNamespace, lbaf) == 128);
};

impl Default for IdentifyNamespace {
    fn default() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }
}

impl fmt::Debug for IdentifyNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentifyNamespace")
            .field("nsze", &self.nsze)
            .field("ncap", &self.ncap)
            .field("flbas", &self.flbas)
            .field("format", &self.active_format())
            .finish_non_exhaustive()
    }
}

impl IdentifyNamespace {
    /// NSFEAT bit 4 (OPTPERF): NPWG, NPWA, NPDG, NPDA and NOWS are reported.
    pub const OPTPERF: u8 = 1 << 4;

    /// Returns whether several controllers may have the namespace attached (NMIC bit 0).
    #[must_use]
    pub const fn may_be_shared(&self) -> bool {
        self.nmic & 1 != 0
    }

    /// Returns the index of the format in use: bits 3:0 are the low part, bits 6:5 the high part.
    #[must_use]
    pub const fn format_index(&self) -> usize {
        (self.flbas & 0xf) as usize | (self.flbas as usize >> 5 & 3) << 4
    }

    /// Returns the format in use, if the index is valid.
    #[must_use]
    pub fn active_format(&self) -> Option<LbaFormat> {
        let index = self.format_index();
        (index <= self.nlbaf_z as usize).then(|| self.lbaf.get(index).copied()).flatten()
    }
}

/// Identify Controller of the NVM command set, 4096 bytes (CNS 06h, CSI 00h): limits of commands.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IdentifyNvmController {
    /// Verify size limit: `2^vsl` minimum pages; 0 = no limit.
    pub vsl: u8,
    /// Write Zeroes size limit: `2^wzsl` minimum pages; 0 = no limit.
    pub wzsl: u8,
    /// Write Uncorrectable size limit: `2^wusl` minimum pages; 0 = no limit.
    pub wusl: u8,
    /// Number of ranges of a Dataset Management command; 0 = no limit.
    pub dmrl: u8,
    /// Number of LBAs per range; 0 = no limit.
    pub dmrsl: u32,
    /// Number of LBAs of all ranges together; 0 = no limit.
    pub dmsl: u64,
    /// Fields unused by this project.
    pub reserved16: [u8; 4080],
}

const _: () = assert!(size_of::<IdentifyNvmController>() == 4096);

impl Default for IdentifyNvmController {
    fn default() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }
}

open_enum! {
    /// Command Set Identifier (CSI): the I/O command set of a namespace.
    CommandSet: u8 {
        /// NVM: an array of logical blocks.
        NVM = 0,
        /// Key Value.
        KEY_VALUE = 1,
        /// Zoned Namespace.
        ZONED = 2,
        /// Subsystem Local Memory.
        LOCAL_MEMORY = 3,
        /// Computational Programs.
        PROGRAMS = 4,
    }
}

/// Namespace Identification Descriptor list, 4096 bytes (CNS 03h): type, length, two reserved
/// bytes, and the identifier; terminated by a length of 0.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct NamespaceDescriptors(pub [u8; 4096]);

impl NamespaceDescriptors {
    /// Type of a descriptor that holds the I/O command set.
    pub const COMMAND_SET: u8 = 4;

    /// Returns the first identifier of a type, if it is there and whole.
    #[must_use]
    pub fn find(&self, kind: u8) -> Option<&[u8]> {
        let mut rest: &[u8] = &self.0;
        loop {
            let (head, after) = rest.split_first_chunk::<4>()?;
            let (found, len) = (head[0], usize::from(head[1]));
            let (id, next) = after.split_at_checked(len).filter(|_| len > 0)?;
            if found == kind {
                return Some(id);
            }
            rest = next;
        }
    }

    /// Returns the I/O command set; a namespace without such a descriptor has the NVM command set.
    #[must_use]
    pub fn command_set(&self) -> CommandSet {
        self.find(Self::COMMAND_SET).map_or(CommandSet::NVM, |id| CommandSet(id[0]))
    }
}

/// Active namespace list, 4096 bytes (CNS 02h): ascending identifiers, terminated by 0.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ActiveNamespaces {
    /// The identifiers.
    pub nsids: [u32; 1024],
}

const _: () = assert!(size_of::<ActiveNamespaces>() == 4096);

impl Default for ActiveNamespaces {
    fn default() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }
}
