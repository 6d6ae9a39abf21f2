//! Identify, log pages, features, Abort, Format NVM, and checks common to all admin commands.

use nvme_spec::{
    admin::{
        Abort, AdminOpcode, Cns, FeatureId, FeatureSelect, FormatNvm, GetFeatures, GetLogPage,
        Identify, LogPageId, NumberOfQueues, SetFeatures,
    },
    ids::{Nsid, QueueId},
    sgl::SglDescriptor,
    sqe::Sqe,
    status::Status,
};

use super::{Case, Found, io, status, works};
use crate::raw::{Raw, admin};

/// Bytes of an identify structure.
const PAGE: usize = 4096;
/// Feature and log page identifiers that no controller has.
const NO_FEATURE: FeatureId = FeatureId(0x7e);
const NO_LOG: LogPageId = LogPageId(0xbe);

pub(super) const CASES: &[Case] = &[
    status("admin opcode that does not exist", Status::INVALID_OPCODE, |raw| {
        raw.admin(&admin(AdminOpcode(0x7f)))
    }),
    status("admin command with an SGL", Status::INVALID_FIELD, |raw| {
        let memory = raw.alloc(PAGE)?;
        let sqe = identify(Cns::CONTROLLER, 0);
        raw.admin(&sqe.with_sgl(SglDescriptor::data_block(memory.iova().0, PAGE as u32)))
    }),
    works("identify controller", |raw| identify_page(raw, Cns::CONTROLLER, 0)),
    works("identify namespace", |raw| identify_page(raw, Cns::NAMESPACE, 1)),
    works("identify active namespaces", |raw| {
        let memory = raw.alloc(PAGE)?;
        raw.expect_ok(&identify(Cns::ACTIVE_NAMESPACES, 0).with_prps(memory.iova().0, 0))?;
        let mut list = [0; 12];
        memory.read(0, &mut list)?;
        let right = list == [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
        Ok(Found::wrong_unless(right, "not namespaces 1 and 2"))
    }),
    works("identify active namespaces above the first", |raw| {
        let memory = raw.alloc(PAGE)?;
        raw.expect_ok(&identify(Cns::ACTIVE_NAMESPACES, 1).with_prps(memory.iova().0, 0))?;
        let mut list = [0; 8];
        memory.read(0, &mut list)?;
        Ok(Found::wrong_unless(list == [2, 0, 0, 0, 0, 0, 0, 0], "not namespace 2 alone"))
    }),
    works("identify namespace descriptors", |raw| {
        identify_page(raw, Cns::NAMESPACE_DESCRIPTORS, 1)
    }),
    works("identify into two pages", |raw| {
        let memory = raw.alloc(3 * PAGE)?;
        let at = memory.iova().0;
        let sqe = identify(Cns::CONTROLLER, 0).with_prps(at + 1024, at + 2 * PAGE as u64);
        raw.expect_ok(&sqe)?;
        let mut split = [0; 2 * PAGE];
        memory.read(1024, &mut split[..PAGE - 1024])?;
        memory.read(2 * PAGE, &mut split[PAGE - 1024..PAGE])?;
        raw.expect_ok(&identify(Cns::CONTROLLER, 0).with_prps(at, 0))?;
        let mut whole = [0; PAGE];
        memory.read(0, &mut whole)?;
        Ok(Found::wrong_unless(split[..PAGE] == whole, "not the same bytes"))
    }),
    status("identify a structure that does not exist", Status::INVALID_FIELD, |raw| {
        identify_page(raw, Cns(0xfe), 1)
    }),
    status("identify namespace 0", Status::INVALID_NAMESPACE, |raw| {
        identify_page(raw, Cns::NAMESPACE, 0)
    }),
    status("identify a namespace that does not exist", Status::INVALID_NAMESPACE, |raw| {
        identify_page(raw, Cns::NAMESPACE, 0x1234)
    }),
    status("identify all namespaces without management", Status::INVALID_NAMESPACE, |raw| {
        identify_page(raw, Cns::NAMESPACE, Nsid::ALL.0)
    }),
    status("identify active namespaces above the last", Status::INVALID_NAMESPACE, |raw| {
        identify_page(raw, Cns::ACTIVE_NAMESPACES, Nsid::ALL.0)
    }),
    status("identify descriptors of no namespace", Status::INVALID_NAMESPACE, |raw| {
        identify_page(raw, Cns::NAMESPACE_DESCRIPTORS, 0x1234)
    }),
    status("identify to an odd address", Status::INVALID_PRP_OFFSET, |raw| {
        let memory = raw.alloc(2 * PAGE)?;
        raw.admin(&identify(Cns::CONTROLLER, 0).with_prps(memory.iova().0 + 1, 0))
    }),
    status("identify to unmapped memory", Status::DATA_TRANSFER_ERROR, |raw| {
        let at = raw.target.unmapped.0;
        raw.admin(&identify(Cns::CONTROLLER, 0).with_prps(at, 0))
    }),
    works("log: errors", |raw| log(raw, LogPageId::ERROR, 0, 64)),
    works("log: health", |raw| log(raw, LogPageId::SMART, 0, 512)),
    works("log: firmware slots", |raw| log(raw, LogPageId::FIRMWARE_SLOT, 0, 512)),
    works("log: commands supported", |raw| log(raw, LogPageId::COMMANDS_SUPPORTED, 0, 4096)),
    works("log: part of a page", |raw| {
        let memory = raw.alloc(PAGE)?;
        let at = memory.iova().0;
        raw.expect_ok(&get_log(LogPageId::COMMANDS_SUPPORTED, 0, 4096).with_prps(at, 0))?;
        let (mut all, mut part) = ([0; 4096], [0; 64]);
        memory.read(0, &mut all)?;
        raw.expect_ok(&get_log(LogPageId::COMMANDS_SUPPORTED, 1020, 64).with_prps(at, 0))?;
        memory.read(0, &mut part)?;
        let right = part == all[1020..1084] && part.iter().any(|byte| *byte != 0);
        Ok(Found::wrong_unless(right, "not the bytes of that offset"))
    }),
    status("log page that does not exist", Status::INVALID_LOG_PAGE, |raw| log(raw, NO_LOG, 0, 64)),
    status("log: offset past the end", Status::INVALID_FIELD, |raw| {
        log(raw, LogPageId::SMART, 1 << 20, 64)
    }),
    works("get feature: number of queues", |raw| {
        let sqe = get_feature(FeatureId::NUMBER_OF_QUEUES, FeatureSelect::CURRENT, 0);
        let found = NumberOfQueues::from_dword(raw.admin_result(&sqe)?);
        let last = raw.target.qid_max - 1;
        let right = found == NumberOfQueues { nsq_z: last, ncq_z: last };
        Ok(Found::wrong_unless(right, "not as many queues as there are"))
    }),
    works("set feature: number of queues, more than there are", |raw| {
        let asked = NumberOfQueues { nsq_z: 0xfffe, ncq_z: 0xfffe };
        let sqe = set_feature(FeatureId::NUMBER_OF_QUEUES, asked.to_dword(), false);
        let found = NumberOfQueues::from_dword(raw.admin_result(&sqe)?);
        let last = raw.target.qid_max - 1;
        let right = found == NumberOfQueues { nsq_z: last, ncq_z: last };
        Ok(Found::wrong_unless(right, "not as many queues as there are"))
    }),
    status("set feature: 65536 queues", Status::INVALID_FIELD, |raw| {
        raw.admin(&set_feature(FeatureId::NUMBER_OF_QUEUES, u32::MAX, false))
    }),
    status("set feature: queues after the first", Status::COMMAND_SEQUENCE_ERROR, |raw| {
        raw.create_cq(1, 4)?;
        raw.admin(&set_feature(FeatureId::NUMBER_OF_QUEUES, 0, false))
    }),
    works("set feature: a value comes back", |raw| {
        // Events about spare space and reliability.
        let (events, value) = (FeatureId::ASYNC_EVENT_CONFIG, 0b101);
        raw.expect_ok(&set_feature(events, value, false))?;
        let current = get_feature(events, FeatureSelect::CURRENT, 0);
        Ok(Found::wrong_unless(raw.admin_result(&current)? == value, "another value"))
    }),
    works("set feature: write cache off and on", |raw| {
        let cache = FeatureId::VOLATILE_WRITE_CACHE;
        let current = get_feature(cache, FeatureSelect::CURRENT, 0);
        for value in [0, 1] {
            raw.expect_ok(&set_feature(cache, value, false))?;
            if raw.admin_result(&current)? & 1 != value {
                return Ok(Found::Wrong("another value"));
            }
        }
        Ok(Found::OK)
    }),
    status("get feature that does not exist", Status::INVALID_FIELD, |raw| {
        raw.admin(&get_feature(NO_FEATURE, FeatureSelect::CURRENT, 0))
    }),
    status("set feature that does not exist", Status::INVALID_FIELD, |raw| {
        raw.admin(&set_feature(NO_FEATURE, 0, false))
    }),
    status("save a feature that cannot be saved", Status::FEATURE_NOT_SAVEABLE, |raw| {
        raw.admin(&set_feature(FeatureId::NUMBER_OF_QUEUES, 0, true))
    }),
    status("get feature of a namespace that does not exist", Status::INVALID_NAMESPACE, |raw| {
        let mut sqe = get_feature(FeatureId::ERROR_RECOVERY, FeatureSelect::CURRENT, 0);
        sqe.nsid = 0x1234;
        raw.admin(&sqe)
    }),
    works("abort of nothing", |raw| {
        let mut sqe = admin(AdminOpcode::ABORT);
        Abort { sqid: QueueId(0), cid: 0x7777 }.write_to(&mut sqe);
        Ok(Found::wrong_unless(raw.admin_result(&sqe)? & 1 == 1, "it says it aborted"))
    }),
    status("format to a format that does not exist", Status::INVALID_FORMAT, |raw| {
        raw.admin(&format(1, FormatNvm { lbaf: 15, ..Default::default() }))
    }),
    status("format with protection there is none of", Status::INVALID_FORMAT, |raw| {
        raw.admin(&format(1, FormatNvm { pi: 7, ..Default::default() }))
    }),
    status("format a namespace that does not exist", Status::INVALID_NAMESPACE, |raw| {
        raw.admin(&format(0x1234, FormatNvm::default()))
    }),
    works("format loses the data", |raw| {
        let ns = raw.target.namespaces[0];
        let memory = raw.alloc(PAGE)?;
        let at = memory.iova().0;
        io::fill(&memory, 0, &[0xa5; PAGE])?;
        io::expect_ok(raw, &io::write(&ns, 0, 8).with_prps(at, 0))?;
        raw.expect_ok(&format(ns.nsid, FormatNvm::default()))?;
        io::expect_ok(raw, &io::read(&ns, 0, 8).with_prps(at, 0))?;
        let zero = io::bytes(&memory, 0, PAGE)?.iter().all(|byte| *byte == 0);
        Ok(Found::wrong_unless(zero, "the data is still there"))
    }),
];

fn identify(cns: Cns, nsid: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::IDENTIFY);
    sqe.nsid = nsid;
    Identify { cns, ..Default::default() }.write_to(&mut sqe);
    sqe
}

fn identify_page(raw: &mut Raw<'_>, cns: Cns, nsid: u32) -> anyhow::Result<Found> {
    let memory = raw.alloc(PAGE)?;
    let found = raw.admin(&identify(cns, nsid).with_prps(memory.iova().0, 0))?;
    let empty = io::bytes(&memory, 0, PAGE)?.iter().all(|byte| *byte == 0);
    Ok(if found == Found::OK && empty { Found::Wrong("nothing delivered") } else { found })
}

pub(super) fn get_log(lid: LogPageId, offset: u64, bytes: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::GET_LOG_PAGE);
    sqe.nsid = Nsid::ALL.0;
    GetLogPage { lid, offset, numd_z: bytes / 4 - 1, ..Default::default() }.write_to(&mut sqe);
    sqe
}

fn log(raw: &mut Raw<'_>, lid: LogPageId, offset: u64, bytes: u32) -> anyhow::Result<Found> {
    let memory = raw.alloc(PAGE)?;
    raw.admin(&get_log(lid, offset, bytes).with_prps(memory.iova().0, 0))
}

pub(super) fn get_feature(fid: FeatureId, select: FeatureSelect, nsid: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::GET_FEATURES);
    sqe.nsid = nsid;
    GetFeatures { fid, select }.write_to(&mut sqe);
    sqe
}

fn set_feature(fid: FeatureId, value: u32, save: bool) -> Sqe {
    let mut sqe = admin(AdminOpcode::SET_FEATURES);
    SetFeatures { fid, save, value }.write_to(&mut sqe);
    sqe
}

fn format(nsid: u32, command: FormatNvm) -> Sqe {
    let mut sqe = admin(AdminOpcode::FORMAT_NVM);
    sqe.nsid = nsid;
    command.write_to(&mut sqe);
    sqe
}
