//! Admin commands (Base, "Admin Command Set"): opcodes and typed views of their dwords.

use crate::ids::QueueId;

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
        /// Doorbell Buffer Config.
        DOORBELL_BUFFER_CONFIG = 0x7c,
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

command_dwords! {
    /// Create I/O Completion Queue: CDW10 and CDW11. PRP1 is the queue's address.
    CreateIoCq {
        /// Queue identifier.
        qid: QueueId = cdw10[0, 16];
        /// Entries, zero-based.
        qsize_z: u16 = cdw10[16, 16];
        /// Physically contiguous (PC).
        contiguous: bool = cdw11[0, 1];
        /// Interrupts enabled (IEN).
        interrupts: bool = cdw11[1, 1];
        /// Interrupt vector (IV).
        vector: u16 = cdw11[16, 16];
    }
}

command_dwords! {
    /// Create I/O Submission Queue: CDW10 and CDW11. PRP1 is the queue's address.
    CreateIoSq {
        /// Queue identifier.
        qid: QueueId = cdw10[0, 16];
        /// Entries, zero-based.
        qsize_z: u16 = cdw10[16, 16];
        /// Physically contiguous (PC).
        contiguous: bool = cdw11[0, 1];
        /// Priority class, 0 = urgent (QPRIO; weighted round robin only).
        priority: u8 = cdw11[1, 2];
        /// Completion queue to use.
        cqid: QueueId = cdw11[16, 16];
    }
}

command_dwords! {
    /// Delete I/O Submission or Completion Queue: CDW10.
    DeleteQueue {
        /// Queue identifier.
        qid: QueueId = cdw10[0, 16];
    }
}

command_dwords! {
    /// Abort: CDW10. Completion DW0 bit 0: 0 = the command was aborted.
    Abort {
        /// Submission queue of the command.
        sqid: QueueId = cdw10[0, 16];
        /// The command's identifier.
        cid: u16 = cdw10[16, 16];
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
        /// A namespace's data structure for an I/O command set.
        COMMAND_SET_NAMESPACE = 0x05,
        /// The controller's data structure for an I/O command set.
        COMMAND_SET_CONTROLLER = 0x06,
        /// A namespace's data structure that is the same for all I/O command sets.
        INDEPENDENT_NAMESPACE = 0x08,
    }
}

command_dwords! {
    /// Identify: CDW10 and CDW11.
    Identify {
        /// Data structure to return.
        cns: Cns = cdw10[0, 8];
        /// Controller identifier, for structures that need one.
        cntid: u16 = cdw10[16, 16];
        /// Command set identifier (CSI), for structures of a command set; 0 = NVM.
        csi: u8 = cdw11[24, 8];
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
        /// Autonomous Power State Transition.
        AUTONOMOUS_POWER_STATE_TRANSITION = 0x0c,
        /// Host Memory Buffer.
        HOST_MEMORY_BUFFER = 0x0d,
        /// Host Behavior Support; byte 0 of its data enables retry delays (ACRE).
        HOST_BEHAVIOR_SUPPORT = 0x16,
        /// Flexible Data Placement, of the endurance group in CDW11 bits 15:0.
        FLEXIBLE_DATA_PLACEMENT = 0x1d,
    }
}

open_enum! {
    /// Get Features, Select.
    FeatureSelect: u8 {
        /// The current value.
        CURRENT = 0,
        /// The value after a reset if none was saved.
        DEFAULT = 1,
        /// The saved value.
        SAVED = 2,
        /// Capabilities of the feature, see [`FeatureCapabilities`].
        SUPPORTED = 3,
    }
}

command_dwords! {
    /// Set Features: CDW10 (CDW11 is the value).
    SetFeatures {
        /// Feature identifier.
        fid: FeatureId = cdw10[0, 8];
        /// Save across resets and power cycles (SV).
        save: bool = cdw10[31, 1];
        /// The value (CDW11).
        value: u32 = cdw11[0, 32];
    }
}

command_dwords! {
    /// Get Features: CDW10.
    GetFeatures {
        /// Feature identifier.
        fid: FeatureId = cdw10[0, 8];
        /// Value to return.
        select: FeatureSelect = cdw10[8, 3];
    }
}

dword! {
    /// Result of Get Features with [`FeatureSelect::SUPPORTED`] (completion DW0).
    FeatureCapabilities {
        /// The feature can be saved.
        saveable: bool = 0, 1;
        /// The feature is per namespace.
        namespace_specific: bool = 1, 1;
        /// The feature can be changed.
        changeable: bool = 2, 1;
    }
}

dword! {
    /// Number of Queues: the value requested (CDW11) and granted (completion DW0).
    NumberOfQueues {
        /// I/O submission queues, zero-based.
        nsq_z: u16 = 0, 16;
        /// I/O completion queues, zero-based.
        ncq_z: u16 = 16, 16;
    }
}

dword! {
    /// Flexible Data Placement: the value of the feature (completion DW0).
    FdpMode {
        /// Enabled in the endurance group (FDPE).
        enabled: bool = 0, 1;
        /// Index of the configuration in use (FDPCIDX).
        configuration: u8 = 8, 8;
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
        /// FDP Configurations of the endurance group in LSI.
        FDP_CONFIGURATIONS = 0x20,
        /// Sanitize Status.
        SANITIZE_STATUS = 0x81,
    }
}

command_dwords! {
    /// Get Log Page: CDW10 to CDW13.
    GetLogPage {
        /// Log page identifier.
        lid: LogPageId = cdw10[0, 8];
        /// Log specific.
        lsp: u8 = cdw10[8, 7];
        /// Retain Asynchronous Event: 1 = do not clear the event.
        rae: bool = cdw10[15, 1];
        /// Dwords to return, zero-based (NUMDL and NUMDU).
        numd_z: u32 = cdw10[16, 16] cdw11[0, 16];
        /// Log specific identifier (LSI).
        lsi: u16 = cdw11[16, 16];
        /// Offset in bytes (LPOL and LPOU), a multiple of 4.
        offset: u64 = cdw12[0, 32] cdw13[0, 32];
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

dword! {
    /// An asynchronous event: completion DW0 of an Asynchronous Event Request.
    AsyncEvent {
        /// Type.
        kind: AsyncEventKind = 0, 3;
        /// Information; its meaning depends on the type.
        info: u8 = 8, 8;
        /// The log page to read, which also clears the event.
        log_page: LogPageId = 16, 8;
    }
}

command_dwords! {
    /// Format NVM: CDW10.
    FormatNvm {
        /// LBA format index (LBAFL and LBAFU).
        lbaf: u8 = cdw10[0, 4] cdw10[12, 2];
        /// Metadata settings (MSET).
        mset: u8 = cdw10[4, 1];
        /// Protection information (PI).
        pi: u8 = cdw10[5, 3];
        /// Secure erase settings (SES): 0 none, 1 user data, 2 cryptographic.
        ses: u8 = cdw10[9, 3];
    }
}
