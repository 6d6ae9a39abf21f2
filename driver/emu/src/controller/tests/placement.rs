//! Flexible Data Placement byte by byte, as in the specification: the driver and the controller
//! share types, so a round trip between them would not find a wrong layout.

use nvme_spec::ids::Nsid;

use super::*;
use crate::PlacementConfig;

const HANDLES: u16 = 3;
const RECLAIM_UNIT: u64 = 6 << 20;

fn host() -> Host {
    Host::ready(|mut config| {
        config.namespaces[0].deallocate_bytes = Some(16 << 10);
        let placement = PlacementConfig { handles: HANDLES, reclaim_unit_bytes: RECLAIM_UNIT };
        EmuConfig { placement: Some(placement), ..config }
    })
}

fn le(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn with_dwords(mut sqe: Sqe, dwords: [u32; 4]) -> Sqe {
    [sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13] = dwords;
    sqe
}

#[test]
fn identify_names_the_endurance_group_and_the_granularity() {
    let mut host = host();
    let controller = host.identify(1, 0).unwrap();
    assert_eq!(le(&controller, 96, 4), 1 << 19 | 1 << 4);
    assert_eq!(le(&controller, 340, 2), 1);
    let namespace = host.identify(0, 1).unwrap();
    assert_eq!(le(&namespace, 102, 2), 1);
    // NSFEAT, NPDG and NPDA: 32 LBAs, zero-based.
    assert_eq!((namespace[24], le(&namespace, 68, 2), le(&namespace, 70, 2)), (0x10, 31, 31));
    let mut plain = Host::plain();
    assert_eq!(le(&plain.identify(1, 0).unwrap(), 96, 4), 0);
    let namespace = plain.identify(0, 1).unwrap();
    assert_eq!((namespace[24], le(&namespace, 68, 4), le(&namespace, 102, 2)), (0, 0, 0));
}

#[test]
fn the_feature_is_enabled_and_stays_so() {
    let mut host = host();
    let get = |group| with_dwords(command(AdminOpcode::GET_FEATURES, 0), [0x1d, group, 0, 0]);
    let cqe = host.admin(get(1));
    assert_eq!((cqe.status(), cqe.dw0), (Status::SUCCESS, 1));
    assert_eq!(host.admin_status(get(2)), Status::INVALID_FIELD);
    let set = with_dwords(command(AdminOpcode::SET_FEATURES, 0), [0x1d, 1, 0, 0]);
    assert_eq!(host.admin_status(set), Status::COMMAND_SEQUENCE_ERROR, "it has namespaces");
    assert_eq!(Host::plain().admin_status(get(1)), Status::INVALID_FIELD);
}

#[test]
fn the_log_has_one_configuration() {
    let mut host = host();
    let memory = host.alloc(PAGE);
    let log = |group: u32| {
        let sqe = command(AdminOpcode::GET_LOG_PAGE, 0).with_prps(at(&memory).0, 0);
        with_dwords(sqe, [0x20 | 0x3ff << 16, group << 16, 0, 0])
    };
    assert_eq!(host.admin_status(log(1)), Status::SUCCESS);
    let page = host.read(at(&memory), PAGE);
    assert_eq!((le(&page, 0, 2), page[2], le(&page, 4, 4)), (0, 0, 16 + 80));
    let configuration = &page[16..];
    // 64 bytes and one dword per handle, in multiples of 8; valid; one group, three handles.
    assert_eq!((le(configuration, 0, 2), configuration[2]), (80, 0x80));
    assert_eq!((le(configuration, 4, 4), le(configuration, 8, 2)), (1, 3));
    assert_eq!((le(configuration, 10, 2), le(configuration, 16, 8)), (2, RECLAIM_UNIT));
    let types: Vec<_> = (0..4).map(|handle| le(configuration, 64 + 4 * handle, 4)).collect();
    assert_eq!(types, [1, 1, 1, 0]);
    assert_eq!(host.admin_status(log(2)), Status::INVALID_FIELD);
    let mut plain = Host::plain();
    let memory = plain.alloc(PAGE);
    let sqe = command(AdminOpcode::GET_LOG_PAGE, 0).with_prps(at(&memory).0, 0);
    let sqe = with_dwords(sqe, [0x20 | 0x3ff << 16, 1 << 16, 0, 0]);
    assert_eq!(plain.admin_status(sqe), Status::INVALID_LOG_PAGE);
}

#[test]
fn io_management_receive_lists_the_placement_identifiers() {
    let mut host = host();
    let memory = host.alloc(PAGE);
    host.write(at(&memory), &[0xEE; PAGE]);
    let receive = |operation, bytes: u32| {
        let sqe = Sqe::new(0x12, Cid(0), Nsid(1)).with_prps(at(&memory).0, 0);
        with_dwords(sqe, [operation, bytes / 4 - 1, 0, 0])
    };
    let status = |host: &mut Host, sqe| {
        host.send(1, sqe);
        host.step();
        host.reap_all(1)[0].status().code()
    };
    assert_eq!(status(&mut host, receive(1, 256)), Status::SUCCESS);
    let page = host.read(at(&memory), PAGE);
    assert_eq!(le(&page, 14, 2), 3);
    for handle in 0..3usize {
        let descriptor = &page[16 + 32 * handle..];
        assert_eq!((le(descriptor, 0, 2), le(descriptor, 2, 2)), (handle as u64, handle as u64));
        assert_eq!(le(descriptor, 8, 8), RECLAIM_UNIT / 512);
    }
    assert!(page[16 + 96..256].iter().all(|byte| *byte == 0), "what was asked for is filled up");
    assert!(page[256..].iter().all(|byte| *byte == 0xEE), "and nothing else is written");
    assert_eq!(status(&mut host, receive(0, 256)), Status::SUCCESS);
    assert_eq!(status(&mut host, receive(2, 256)), Status::INVALID_FIELD);
    let mut everywhere = receive(1, 256);
    everywhere.nsid = u32::MAX;
    assert_eq!(status(&mut host, everywhere), Status::INVALID_NAMESPACE);
    let mut plain = Host::plain();
    assert_eq!(status(&mut plain, receive(1, 256)), Status::INVALID_OPCODE);
}

#[test]
fn writes_name_a_handle() {
    let host = host();
    let named = |host: &Host, opcode, kind: u32, pid: u32| {
        let mut sqe = nvm(opcode, 0, 1);
        sqe.cdw12 |= kind << 20;
        sqe.cdw13 |= pid << 16;
        host.controller.storage.placement_handle(&sqe)
    };
    let write = NvmOpcode::WRITE;
    assert_eq!(named(&host, write, 2, 2), Ok(2));
    assert_eq!(named(&host, write, 2, 3), Ok(0), "none that is valid: the controller chooses");
    assert_eq!(named(&host, write, 0, 2), Ok(0), "DSPEC without DTYPE");
    assert_eq!(named(&host, write, 1, 2), Err(Status::INVALID_FIELD), "streams");
    assert_eq!(named(&host, NvmOpcode::READ, 2, 2), Ok(0), "reserved in reads");
    assert_eq!(named(&Host::plain(), write, 2, 0), Err(Status::INVALID_FIELD));
}
