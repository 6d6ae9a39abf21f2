//! Admin commands (Base, "Admin Command Set"): opcodes and typed views of their dwords.

use crate::{ids::QueueId, sqe::Sqe};

open_enum! {
    /// Opcodes of the admin queue.
    AdminOpcode: u8 {
        /// Delete I/O Submission Queue.
        DELETE_IO_SQ = 0x00,
        /// Create I/O Submission Queue.
        CREATE_IO_SQ = 0x01,
        /// Get Log Page.
        GET_LOG_PAGE = 0x02,
        /// Delete I/O Completion Queue.
        DELETE_IO_CQ = 0x04,
        /// Create I/O Completion Queue.
        CREATE_IO_CQ = 0x05,
        /// Identify.
        IDENTIFY = 0x06,
        /// Abort.
        ABORT = 0x08,
        /// Set Features.
        SET_FEATURES = 0x09,
        /// Get Features.
        GET_FEATURES = 0x0a,
        /// Asynchronous Event Request.
        ASYNC_EVENT_REQUEST = 0x0c,
        /// Namespace Management.
        NAMESPACE_MANAGEMENT = 0x0d,
        /// Firmware Commit.
        FIRMWARE_COMMIT = 0x10,
        /// Firmware Image Download.
        FIRMWARE_DOWNLOAD = 0x11,
        /// Namespace Attachment.
        NAMESPACE_ATTACHMENT = 0x15,
        /// Keep Alive.
        KEEP_ALIVE = 0x18,
        /// Format NVM.
        FORMAT_NVM = 0x80,
        /// Security Send.
        SECURITY_SEND = 0x81,
        /// Security Receive.
        SECURITY_RECEIVE = 0x82,
        /// Sanitize.
        SANITIZE = 0x84,
    }
}

/// Create I/O Completion Queue: CDW10 and CDW11. PRP1 is the queue's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CreateIoCq {
    /// Queue identifier.
    pub qid: QueueId,
    /// Entries, zero-based.
    pub qsize_z: u16,
    /// Physically contiguous (PC).
    pub contiguous: bool,
    /// Interrupts enabled (IEN).
    pub interrupts: bool,
    /// Interrupt vector (IV).
    pub vector: u16,
}

impl CreateIoCq {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self {
            qid: QueueId(sqe.cdw10 as u16),
            qsize_z: (sqe.cdw10 >> 16) as u16,
            contiguous: sqe.cdw11 & 1 != 0,
            interrupts: sqe.cdw11 & 2 != 0,
            vector: (sqe.cdw11 >> 16) as u16,
        }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.qid.0 as u32 | (self.qsize_z as u32) << 16;
        sqe.cdw11 =
            self.contiguous as u32 | (self.interrupts as u32) << 1 | (self.vector as u32) << 16;
    }
}

/// Create I/O Submission Queue: CDW10 and CDW11. PRP1 is the queue's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CreateIoSq {
    /// Queue identifier.
    pub qid: QueueId,
    /// Entries, zero-based.
    pub qsize_z: u16,
    /// Physically contiguous (PC).
    pub contiguous: bool,
    /// Priority class, 0 = urgent (QPRIO; weighted round robin only).
    pub priority: u8,
    /// Completion queue to use.
    pub cqid: QueueId,
}

impl CreateIoSq {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self {
            qid: QueueId(sqe.cdw10 as u16),
            qsize_z: (sqe.cdw10 >> 16) as u16,
            contiguous: sqe.cdw11 & 1 != 0,
            priority: (sqe.cdw11 >> 1) as u8 & 3,
            cqid: QueueId((sqe.cdw11 >> 16) as u16),
        }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.qid.0 as u32 | (self.qsize_z as u32) << 16;
        sqe.cdw11 =
            self.contiguous as u32 | (self.priority as u32 & 3) << 1 | (self.cqid.0 as u32) << 16;
    }
}

/// Delete I/O Submission or Completion Queue: CDW10.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeleteQueue {
    /// Queue identifier.
    pub qid: QueueId,
}

impl DeleteQueue {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self { qid: QueueId(sqe.cdw10 as u16) }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.qid.0 as u32;
    }
}

/// Abort: CDW10. Completion DW0 bit 0: 0 = the command was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Abort {
    /// Submission queue of the command.
    pub sqid: QueueId,
    /// The command's identifier.
    pub cid: u16,
}

impl Abort {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self { sqid: QueueId(sqe.cdw10 as u16), cid: (sqe.cdw10 >> 16) as u16 }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.sqid.0 as u32 | (self.cid as u32) << 16;
    }
}

open_enum! {
    /// Identify, Controller or Namespace Structure (CNS).
    Cns: u8 {
        /// A namespace's data structure.
        NAMESPACE = 0x00,
        /// The controller's data structure.
        CONTROLLER = 0x01,
        /// List of active namespaces above NSID.
        ACTIVE_NAMESPACES = 0x02,
        /// A namespace's identification descriptors.
        NAMESPACE_DESCRIPTORS = 0x03,
    }
}

/// Identify: CDW10 and CDW11.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identify {
    /// Which structure.
    pub cns: Cns,
    /// Controller identifier, where the structure wants one.
    pub cntid: u16,
}

impl Identify {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self { cns: Cns(sqe.cdw10 as u8), cntid: (sqe.cdw10 >> 16) as u16 }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.cns.0 as u32 | (self.cntid as u32) << 16;
    }
}

open_enum! {
    /// Feature identifiers.
    FeatureId: u8 {
        /// Arbitration.
        ARBITRATION = 0x01,
        /// Power Management.
        POWER_MANAGEMENT = 0x02,
        /// Temperature Threshold.
        TEMPERATURE_THRESHOLD = 0x04,
        /// Error Recovery (NVM).
        ERROR_RECOVERY = 0x05,
        /// Volatile Write Cache.
        VOLATILE_WRITE_CACHE = 0x06,
        /// Number of Queues.
        NUMBER_OF_QUEUES = 0x07,
        /// Interrupt Coalescing.
        INTERRUPT_COALESCING = 0x08,
        /// Interrupt Vector Configuration.
        INTERRUPT_VECTOR_CONFIG = 0x09,
        /// Write Atomicity Normal (NVM).
        WRITE_ATOMICITY = 0x0a,
        /// Asynchronous Event Configuration.
        ASYNC_EVENT_CONFIG = 0x0b,
    }
}

open_enum! {
    /// Get Features, Select.
    FeatureSelect: u8 {
        /// The value in force.
        CURRENT = 0,
        /// The value after a reset when none was saved.
        DEFAULT = 1,
        /// The saved value.
        SAVED = 2,
        /// What the feature can do, see [`FeatureCapabilities`].
        SUPPORTED = 3,
    }
}

/// Set Features: CDW10 (CDW11 is the value).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetFeatures {
    /// Which feature.
    pub fid: FeatureId,
    /// Save over resets and power cycles (SV).
    pub save: bool,
    /// The value (CDW11).
    pub value: u32,
}

impl SetFeatures {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self { fid: FeatureId(sqe.cdw10 as u8), save: sqe.cdw10 & 1 << 31 != 0, value: sqe.cdw11 }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.fid.0 as u32 | (self.save as u32) << 31;
        sqe.cdw11 = self.value;
    }
}

/// Get Features: CDW10.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GetFeatures {
    /// Which feature.
    pub fid: FeatureId,
    /// Which of its values.
    pub select: FeatureSelect,
}

impl GetFeatures {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self { fid: FeatureId(sqe.cdw10 as u8), select: FeatureSelect((sqe.cdw10 >> 8) as u8 & 7) }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.fid.0 as u32 | (self.select.0 as u32) << 8;
    }
}

/// Result of Get Features with [`FeatureSelect::SUPPORTED`] (completion DW0).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FeatureCapabilities {
    /// Can be saved.
    pub saveable: bool,
    /// Is per namespace.
    pub namespace_specific: bool,
    /// Can be changed.
    pub changeable: bool,
}

impl FeatureCapabilities {
    /// Reads completion DW0.
    #[must_use]
    pub const fn from_dw0(dw0: u32) -> Self {
        Self { saveable: dw0 & 1 != 0, namespace_specific: dw0 & 2 != 0, changeable: dw0 & 4 != 0 }
    }

    /// As completion DW0.
    #[must_use]
    pub const fn to_dw0(self) -> u32 {
        self.saveable as u32 | (self.namespace_specific as u32) << 1 | (self.changeable as u32) << 2
    }
}

/// Number of Queues: the value asked for (CDW11) and granted (completion DW0).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NumberOfQueues {
    /// I/O submission queues, zero-based.
    pub nsq_z: u16,
    /// I/O completion queues, zero-based.
    pub ncq_z: u16,
}

impl NumberOfQueues {
    /// Reads a dword.
    #[must_use]
    pub const fn from_dword(dword: u32) -> Self {
        Self { nsq_z: dword as u16, ncq_z: (dword >> 16) as u16 }
    }

    /// As a dword.
    #[must_use]
    pub const fn to_dword(self) -> u32 {
        self.nsq_z as u32 | (self.ncq_z as u32) << 16
    }
}

open_enum! {
    /// Log page identifiers.
    LogPageId: u8 {
        /// Supported Log Pages.
        SUPPORTED_LOG_PAGES = 0x00,
        /// Error Information.
        ERROR = 0x01,
        /// SMART / Health Information.
        SMART = 0x02,
        /// Firmware Slot Information.
        FIRMWARE_SLOT = 0x03,
        /// Changed Attached Namespace List.
        CHANGED_NAMESPACES = 0x04,
        /// Commands Supported and Effects.
        COMMANDS_SUPPORTED = 0x05,
    }
}

/// Get Log Page: CDW10 to CDW13.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GetLogPage {
    /// Which page.
    pub lid: LogPageId,
    /// Log specific.
    pub lsp: u8,
    /// Retain Asynchronous Event: 1 = do not clear the event.
    pub rae: bool,
    /// Dwords to return, zero-based (NUMDL and NUMDU).
    pub numd_z: u32,
    /// Offset in bytes (LPOL and LPOU), a multiple of 4.
    pub offset: u64,
}

impl GetLogPage {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self {
            lid: LogPageId(sqe.cdw10 as u8),
            lsp: (sqe.cdw10 >> 8) as u8 & 0x7f,
            rae: sqe.cdw10 & 1 << 15 != 0,
            numd_z: sqe.cdw10 >> 16 | (sqe.cdw11 & 0xffff) << 16,
            offset: sqe.cdw12 as u64 | (sqe.cdw13 as u64) << 32,
        }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.lid.0 as u32
            | (self.lsp as u32 & 0x7f) << 8
            | (self.rae as u32) << 15
            | self.numd_z << 16;
        sqe.cdw11 = self.numd_z >> 16;
        sqe.cdw12 = self.offset as u32;
        sqe.cdw13 = (self.offset >> 32) as u32;
    }
}

open_enum! {
    /// Asynchronous event type.
    AsyncEventKind: u8 {
        /// Error status.
        ERROR = 0,
        /// SMART / health status.
        SMART = 1,
        /// Notice.
        NOTICE = 2,
        /// Immediate.
        IMMEDIATE = 3,
        /// I/O command set specific.
        IO_COMMAND_SET = 6,
        /// Vendor specific.
        VENDOR = 7,
    }
}

/// An asynchronous event: completion DW0 of an Asynchronous Event Request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AsyncEvent {
    /// Type.
    pub kind: AsyncEventKind,
    /// Information; its meaning depends on the type.
    pub info: u8,
    /// The log page to read, which also clears the event.
    pub log_page: LogPageId,
}

impl AsyncEvent {
    /// Reads completion DW0.
    #[must_use]
    pub const fn from_dw0(dw0: u32) -> Self {
        Self {
            kind: AsyncEventKind(dw0 as u8 & 7),
            info: (dw0 >> 8) as u8,
            log_page: LogPageId((dw0 >> 16) as u8),
        }
    }

    /// As completion DW0.
    #[must_use]
    pub const fn to_dw0(self) -> u32 {
        self.kind.0 as u32 & 7 | (self.info as u32) << 8 | (self.log_page.0 as u32) << 16
    }
}

/// Format NVM: CDW10.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FormatNvm {
    /// LBA format index (LBAFL and LBAFU).
    pub lbaf: u8,
    /// Metadata settings (MSET).
    pub mset: u8,
    /// Protection information (PI).
    pub pi: u8,
    /// Secure erase settings (SES): 0 none, 1 user data, 2 cryptographic.
    pub ses: u8,
}

impl FormatNvm {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        let cdw10 = sqe.cdw10;
        Self {
            lbaf: (cdw10 & 0xf | cdw10 >> 8 & 0x30) as u8,
            mset: (cdw10 >> 4) as u8 & 1,
            pi: (cdw10 >> 5) as u8 & 7,
            ses: (cdw10 >> 9) as u8 & 7,
        }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = (self.lbaf as u32 & 0xf)
            | (self.mset as u32 & 1) << 4
            | (self.pi as u32 & 7) << 5
            | (self.ses as u32 & 7) << 9
            | (self.lbaf as u32 >> 4 & 3) << 12;
    }
}
