//! Identify, features, log pages, Format NVM.

use nvme_spec::{
    admin::{
        FeatureCapabilities, FeatureId, FeatureSelect, FormatNvm, GetFeatures, GetLogPage,
        LogPageId, SetFeatures,
    },
    identify::{ActiveNamespaces, IdentifyController, IdentifyNamespace},
    log::{ErrorLogEntry, FirmwareSlotLog, SmartLog},
};

use super::*;

fn set(fid: FeatureId, value: u32) -> Sqe {
    let mut sqe = command(AdminOpcode::SET_FEATURES, 0);
    SetFeatures { fid, save: false, value }.write_to(&mut sqe);
    sqe
}

fn get(fid: FeatureId, select: FeatureSelect) -> Sqe {
    let mut sqe = command(AdminOpcode::GET_FEATURES, 0);
    GetFeatures { fid, select }.write_to(&mut sqe);
    sqe
}

fn log(lid: LogPageId, bytes: u32, offset: u64, memory: Iova) -> Sqe {
    let mut sqe = command(AdminOpcode::GET_LOG_PAGE, u32::MAX).with_prps(memory.0, 0);
    GetLogPage { lid, numd_z: bytes / 4 - 1, offset, ..GetLogPage::default() }.write_to(&mut sqe);
    sqe
}

fn format(nsid: u32, lbaf: u8) -> Sqe {
    let mut sqe = command(AdminOpcode::FORMAT_NVM, nsid);
    FormatNvm { lbaf, ..FormatNvm::default() }.write_to(&mut sqe);
    sqe
}

#[test]
fn identify_tells_the_truth() {
    let mut host = Host::enabled(|config| config.namespace(media(1 << 22), 4096));
    let page = host.identify(1, 0).unwrap();
    let data = IdentifyController::read_from_bytes(&page).unwrap();
    assert_eq!((data.serial(), data.firmware()), ("RIPIENO-emu0", "1.0"));
    assert_eq!((data.mdts, data.nn, data.sqes, data.cqes, data.cntrltype), (7, 2, 0x66, 0x44, 1));
    assert!(data.sgls.bit_bucket());
    assert_eq!(data.ver, host.controller.read32(reg::VS, Nanos(0)));
    let page = host.identify(0, 2).unwrap();
    let data = IdentifyNamespace::read_from_bytes(&page).unwrap();
    assert_eq!((data.nsze, data.active_format().unwrap().lbads()), (1024, 12));
    let page = host.identify(0, 1).unwrap();
    let data = IdentifyNamespace::read_from_bytes(&page).unwrap();
    assert_eq!((data.nsze, data.active_format().unwrap().lbads()), (2048, 9));
    let list = |host: &mut Host, above| {
        let page = host.identify(2, above).unwrap();
        ActiveNamespaces::read_from_bytes(&page).unwrap().nsids[..3].to_vec()
    };
    assert_eq!(list(&mut host, 0), [1, 2, 0]);
    assert_eq!(list(&mut host, 1), [2, 0, 0]);
    assert_eq!(list(&mut host, 7), [0, 0, 0]);
    let one = host.identify(3, 1).unwrap();
    assert_eq!(one[..4], [1, 8, 0, 0]);
    assert_ne!(one, host.identify(3, 2).unwrap());
    for nsid in [0, 3, u32::MAX] {
        assert_eq!(host.identify(0, nsid), Err(Status::INVALID_NAMESPACE));
        assert_eq!(host.identify(3, nsid), Err(Status::INVALID_NAMESPACE));
    }
    assert_eq!(host.identify(2, u32::MAX - 1), Err(Status::INVALID_NAMESPACE));
    // NSTAT: ready. In no endurance group.
    let ready = host.identify(0x08, 1).unwrap();
    assert_eq!(ready.iter().position(|byte| *byte != 0), Some(14));
    assert_eq!(ready[14], 1);
    assert!(host.identify(0x05, 1).unwrap().iter().all(|byte| *byte == 0));
    for cns in [0x05, 0x08] {
        assert_eq!(host.identify(cns, 9), Err(Status::INVALID_NAMESPACE));
    }
    assert_eq!(host.identify(0x77, 1), Err(Status::INVALID_FIELD));
}

#[test]
fn admin_commands_are_checked() {
    let mut host = Host::enabled(|config| config);
    for opcode in [AdminOpcode::NAMESPACE_MANAGEMENT, AdminOpcode::SANITIZE, AdminOpcode(0xee)] {
        assert_eq!(host.admin_status(command(opcode, 0)), Status::INVALID_OPCODE);
    }
    let fused = Sqe { flags: 2, ..command(AdminOpcode::KEEP_ALIVE, 0) };
    assert_eq!(host.admin_status(fused), Status::INVALID_FIELD);
    assert_eq!(host.admin_status(command(AdminOpcode::KEEP_ALIVE, 0)), Status::SUCCESS);
    let nowhere = Sqe { cdw10: 1, ..command(AdminOpcode::IDENTIFY, 0).with_prps(0x5000, 0) };
    assert_eq!(host.admin_status(nowhere), Status::DATA_TRANSFER_ERROR);
    let page = host.alloc(2 * PAGE);
    let odd = Sqe { cdw10: 1, ..command(AdminOpcode::IDENTIFY, 0).with_prps(at(&page).0 + 2, 0) };
    assert_eq!(host.admin_status(odd), Status::INVALID_PRP_OFFSET);
    // A buffer across two pages.
    let prps = (at(&page).0 + 4, at(&page).0 + 4096);
    let across = Sqe { cdw10: 1, ..command(AdminOpcode::IDENTIFY, 0).with_prps(prps.0, prps.1) };
    assert_eq!(host.admin_status(across), Status::SUCCESS);
    let expected = host.identify(1, 0).unwrap();
    assert_eq!(host.read(at(&page).offset(4), PAGE), expected);
}

#[test]
fn features_have_values_and_traits() {
    let mut host = Host::enabled(|config| config);
    for (fid, value, default, traits) in [
        (FeatureId::ARBITRATION, 0x0102_0304, 3, 0b101),
        (FeatureId::TEMPERATURE_THRESHOLD, 350, 343, 0b101),
        (FeatureId::ERROR_RECOVERY, 9, 0, 0b110),
        (FeatureId::VOLATILE_WRITE_CACHE, 0, 1, 0b101),
        (FeatureId::INTERRUPT_COALESCING, 0x0102, 0, 0b101),
        (FeatureId::WRITE_ATOMICITY, 1, 0, 0b100),
        (FeatureId::ASYNC_EVENT_CONFIG, 0x103, 0, 0b100),
    ] {
        let (local, nsid) = (traits & 2 != 0, traits >> 1 & 1);
        let get = |fid, select| Sqe { nsid, ..get(fid, select) };
        let set = |fid, value| Sqe { nsid, ..set(fid, value) };
        assert_eq!(host.admin(get(fid, FeatureSelect::CURRENT)).dw0, default, "{fid}");
        assert_eq!(host.admin_status(set(fid, value)), Status::SUCCESS, "{fid}");
        assert_eq!(host.admin(get(fid, FeatureSelect::CURRENT)).dw0, value, "{fid}");
        assert_eq!(host.admin(get(fid, FeatureSelect::DEFAULT)).dw0, default, "{fid}");
        assert_eq!(host.admin(get(fid, FeatureSelect::SAVED)).dw0, default, "{fid}");
        let dw0 = host.admin(get(fid, FeatureSelect::SUPPORTED)).dw0;
        assert_eq!(dw0, FeatureCapabilities::from_dword(traits).to_dword(), "{fid}");
        assert_eq!(host.admin_status(get(fid, FeatureSelect(5))), Status::INVALID_FIELD);
        let mut save = set(fid, value);
        save.cdw10 |= 1 << 31;
        let saveable = traits & 1 != 0;
        let status = if saveable { Status::SUCCESS } else { Status::FEATURE_NOT_SAVEABLE };
        assert_eq!(host.admin_status(save), status, "{fid}");
        let here = Sqe { nsid: 1, ..set(fid, value) };
        let status = if local { Status::SUCCESS } else { Status::FEATURE_NOT_NAMESPACE_SPECIFIC };
        assert_eq!(host.admin_status(here), status, "{fid}");
        host.disable();
        host.enable(8, 8);
        let after = if saveable { value } else { default };
        assert_eq!(host.admin(get(fid, FeatureSelect::CURRENT)).dw0, after, "{fid}");
    }
}

#[test]
fn features_of_namespaces_need_one() {
    let mut host = Host::enabled(|config| config);
    let (fid, select) = (FeatureId::ERROR_RECOVERY, FeatureSelect::CURRENT);
    for (nsid, gets, sets) in [
        (1, Status::SUCCESS, Status::SUCCESS),
        // A per-namespace value can be set for all namespaces but not read.
        (u32::MAX, Status::INVALID_NAMESPACE, Status::SUCCESS),
        (0, Status::INVALID_NAMESPACE, Status::INVALID_NAMESPACE),
        (2, Status::INVALID_NAMESPACE, Status::INVALID_NAMESPACE),
        (0x1234, Status::INVALID_NAMESPACE, Status::INVALID_NAMESPACE),
    ] {
        assert_eq!(host.admin_status(Sqe { nsid, ..get(fid, select) }), gets, "get, {nsid:#x}");
        assert_eq!(host.admin_status(Sqe { nsid, ..set(fid, 9) }), sets, "set, {nsid:#x}");
    }
    // Other features ignore the namespace.
    let elsewhere = Sqe { nsid: 2, ..get(FeatureId::ARBITRATION, select) };
    assert_eq!(host.admin_status(elsewhere), Status::SUCCESS);
}

#[test]
fn features_are_checked() {
    let mut host = Host::enabled(|config| EmuConfig { vwc: false, ..config });
    for (fid, value) in [
        (FeatureId(0x7d), 0),
        (FeatureId::VOLATILE_WRITE_CACHE, 1),
        (FeatureId::POWER_MANAGEMENT, 1),
        (FeatureId::TEMPERATURE_THRESHOLD, 1 << 16),
        (FeatureId::TEMPERATURE_THRESHOLD, 2 << 20),
        (FeatureId::ERROR_RECOVERY, 1 << 16),
        (FeatureId::INTERRUPT_VECTOR_CONFIG, 5),
    ] {
        let sqe = Sqe { nsid: u32::from(fid == FeatureId::ERROR_RECOVERY), ..set(fid, value) };
        assert_eq!(host.admin_status(sqe), Status::INVALID_FIELD, "{fid} {value:x}");
    }
    let vector = |vector| Sqe {
        cdw11: vector,
        ..get(FeatureId::INTERRUPT_VECTOR_CONFIG, FeatureSelect::CURRENT)
    };
    assert_eq!(host.admin(vector(0)).dw0, 1 << 16);
    assert_eq!(host.admin(vector(4)).dw0, 0);
    assert_eq!(host.admin_status(vector(5)), Status::INVALID_FIELD);
}

#[test]
fn smart_counts_what_happened() {
    let mut host = Host::plain();
    let buffer = host.alloc(PAGE);
    for _ in 0..3 {
        host.io(nvm(NvmOpcode::WRITE, 0, 8).with_prps(at(&buffer).0, 0));
    }
    host.io(nvm(NvmOpcode::READ, 0, 8).with_prps(at(&buffer).0, 0));
    host.io(nvm(NvmOpcode::READ, 5000, 8).with_prps(at(&buffer).0, 0));
    host.controller.power_loss(host.now);
    host.enable(8, 8);
    let cqe = host.admin(log(LogPageId::SMART, 512, 0, at(&buffer)));
    assert_eq!(cqe.status(), Status::SUCCESS);
    let smart = SmartLog::read_from_bytes(&host.read(at(&buffer), 512)).unwrap();
    let wide = |field: [u8; 16]| u128::from_le_bytes(field);
    assert_eq!((wide(smart.host_reads), wide(smart.host_writes)), (1, 3));
    assert_eq!((wide(smart.data_units_read), wide(smart.data_units_written)), (1, 1));
    assert_eq!((wide(smart.power_cycles), wide(smart.unsafe_shutdowns)), (2, 1));
    assert_eq!((wide(smart.error_log_entries), smart.critical_warning), (1, 0));
}

#[test]
fn log_pages_have_limits() {
    let mut host = Host::ready(|config| EmuConfig { mdts_bytes: Some(8192), ..config });
    let buffer = host.alloc(4 * PAGE);
    let base = at(&buffer);
    for (sqe, status) in [
        (log(LogPageId(0x44), 512, 0, base), Status::INVALID_LOG_PAGE),
        (log(LogPageId::SMART, 512, 2, base), Status::INVALID_FIELD),
        (log(LogPageId::SMART, 512, 516, base), Status::INVALID_FIELD),
        (log(LogPageId::SMART, 8196, 0, base), Status::INVALID_FIELD),
        (Sqe { nsid: 1, ..log(LogPageId::SMART, 512, 0, base) }, Status::INVALID_FIELD),
        (Sqe { nsid: 0, ..log(LogPageId::SMART, 512, 0, base) }, Status::SUCCESS),
    ] {
        assert_eq!(host.admin_status(sqe), status);
    }
    // Bytes past the end of the page read as zeroes.
    host.write(base, &[0xcc; PAGE]);
    host.admin(log(LogPageId::FIRMWARE_SLOT, 1024, 0, base));
    let bytes = host.read(base, 1028);
    let slots = FirmwareSlotLog::read_from_bytes(&bytes[..512]).unwrap();
    assert_eq!((slots.active, &slots.revisions[0]), (1, b"1.0     "));
    assert_eq!((&bytes[512..1024], &bytes[1024..]), (&[0; 512][..], &[0xcc; 4][..]));
    host.admin(log(LogPageId::FIRMWARE_SLOT, 8, 8, base));
    assert_eq!(host.read(base, 8), b"1.0     ");
    host.admin(log(LogPageId::COMMANDS_SUPPORTED, 4096, 0, base));
    let bytes = host.read(base, PAGE);
    let effects = |page: usize, opcode: u8| bytes[page + 4 * usize::from(opcode)];
    assert_eq!((effects(0, 0x06), effects(0, 0x84)), (1, 0));
    assert_eq!((effects(1024, 0x01), effects(1024, 0x05)), (3, 0));
    host.admin(log(LogPageId::SUPPORTED_LOG_PAGES, 1024, 0, base));
    let pages = host.read(base, 1024);
    for (lid, supported) in pages.chunks(4).enumerate() {
        let sqe = log(LogPageId(lid as u8), 4, 0, base);
        let works = host.admin_status(sqe) == Status::SUCCESS;
        assert_eq!(works, supported[0] == 1, "page {lid}");
    }
}

#[test]
fn errors_are_logged_newest_first() {
    let mut host = Host::plain();
    let buffer = host.alloc(PAGE);
    let mut cid = 0;
    for _ in 0..70 {
        cid = host.run(1, nvm(NvmOpcode::VERIFY, 0, 1)).cid;
    }
    host.admin(log(LogPageId::ERROR, 4096, 0, at(&buffer)));
    let bytes = host.read(at(&buffer), PAGE);
    let entries: Vec<_> =
        bytes.chunks(64).map(|entry| ErrorLogEntry::read_from_bytes(entry).unwrap()).collect();
    assert_eq!(entries.len(), 64);
    let first = entries[0];
    assert_eq!((first.error_count, first.sqid, first.cid, first.nsid), (70, 1, cid, 1));
    assert_eq!(Status(first.status_phase >> 1).code(), Status::INVALID_OPCODE);
    assert_eq!(first.csi_opcode[1], NvmOpcode::VERIFY.0);
    assert!(entries.windows(2).all(|pair| pair[0].error_count == pair[1].error_count + 1));
}

#[test]
fn format_changes_blocks_and_erases() {
    let mut host = Host::plain();
    host.media.poke(0, &pattern(1 << 20, 3)).unwrap();
    host.admin(set(FeatureId::ASYNC_EVENT_CONFIG, 1 << 8));
    host.send(0, command(AdminOpcode::ASYNC_EVENT_REQUEST, 0));
    for (sqe, status) in [
        (format(0, 1), Status::INVALID_NAMESPACE),
        (format(2, 1), Status::INVALID_NAMESPACE),
        (format(1, 2), Status::INVALID_FORMAT),
        (format(1, 63), Status::INVALID_FORMAT),
        (Sqe { cdw10: 1 | 1 << 4, ..format(1, 1) }, Status::INVALID_FORMAT),
        (Sqe { cdw10: 1 | 1 << 5, ..format(1, 1) }, Status::INVALID_FORMAT),
        (Sqe { cdw10: 1 | 2 << 9, ..format(1, 1) }, Status::INVALID_FIELD),
    ] {
        assert_eq!(host.admin_status(sqe), status, "{sqe:?}");
    }
    assert_eq!(host.stored(0, 1 << 20), pattern(1 << 20, 3));
    host.send(0, format(1, 1));
    let done = host.reap_all(0);
    assert_eq!(done.len(), 2, "the format and a notice: {done:?}");
    assert_eq!(done[1].dw0, 0x0004_0002);
    assert_eq!(host.stored(0, 1 << 20), vec![0; 1 << 20]);
    let page = host.identify(0, 1).unwrap();
    let data = IdentifyNamespace::read_from_bytes(&page).unwrap();
    assert_eq!((data.nsze, data.active_format().unwrap().lbads()), (256, 12));
    let buffer = host.alloc(PAGE);
    let past = nvm(NvmOpcode::READ, 256, 1).with_prps(at(&buffer).0, 0);
    assert_eq!(host.io(past), Status::LBA_OUT_OF_RANGE);
    host.admin(log(LogPageId::CHANGED_NAMESPACES, 4096, 0, at(&buffer)));
    assert_eq!(host.read(at(&buffer), 8), [1, 0, 0, 0, 0, 0, 0, 0]);
    host.admin(log(LogPageId::CHANGED_NAMESPACES, 4096, 0, at(&buffer)));
    assert_eq!(host.read(at(&buffer), 8), [0; 8], "reading clears it");
    assert_eq!(host.admin_status(format(u32::MAX, 0)), Status::SUCCESS);
}

#[test]
fn a_format_is_refused_during_io_and_refuses_io() {
    use crate::media::{Latency, SimMedia, SimOptions};
    let fixed = |ns| Latency { min_ns: ns, mean_ns: ns, tail_ns: ns, tail_ppm: 0 };
    let options = SimOptions { read: fixed(1000), write: fixed(1000), ..SimOptions::default() };
    let mut host = Host::ready(|mut config| {
        config.namespaces.clear();
        config.namespace(SimMedia::new(media(1 << 20), options), 512)
    });
    let buffer = host.alloc(PAGE);
    let read = nvm(NvmOpcode::READ, 0, 8).with_prps(at(&buffer).0, 0);
    host.send(1, read);
    assert_eq!(host.admin_status(format(1, 1)), Status::COMMAND_SEQUENCE_ERROR);
    host.now = Nanos(1000);
    host.step();
    assert_eq!(host.reap_all(1).len(), 1);
    let formatting = host.send(0, format(1, 1));
    assert!(host.reap(0).is_none());
    let status = host.run(1, read).status();
    assert_eq!((status.code(), status.dnr()), (Status::FORMAT_IN_PROGRESS, false));
    assert_eq!(host.admin_status(format(1, 1)), Status::FORMAT_IN_PROGRESS);
    host.now = Nanos(2000);
    host.step();
    assert_eq!(host.reap_all(0)[0].cid, formatting);
    // Blocks are eight times larger now.
    host.send(1, nvm(NvmOpcode::READ, 0, 1).with_prps(at(&buffer).0, 0));
    host.now = Nanos(3000);
    host.step();
    assert_eq!(host.reap_all(1)[0].status().code(), Status::SUCCESS);
}
