//! Asynchronous events and Abort.

use nvme_spec::admin::{
    Abort, AsyncEvent, AsyncEventKind, FeatureId, GetLogPage, LogPageId, SetFeatures,
};

use super::*;

fn request() -> Sqe {
    command(AdminOpcode::ASYNC_EVENT_REQUEST, 0)
}

fn set(fid: FeatureId, value: u32) -> Sqe {
    let mut sqe = command(AdminOpcode::SET_FEATURES, 0);
    SetFeatures { fid, save: false, value }.write_to(&mut sqe);
    sqe
}

fn acknowledge(host: &mut Host, lid: LogPageId, rae: bool) -> Vec<u8> {
    let page = host.alloc(PAGE);
    let mut sqe = command(AdminOpcode::GET_LOG_PAGE, 0).with_prps(at(&page).0, 0);
    GetLogPage { lid, rae, numd_z: 1023, ..GetLogPage::default() }.write_to(&mut sqe);
    assert_eq!(host.admin_status(sqe), Status::SUCCESS);
    host.read(at(&page), PAGE)
}

fn event(host: &mut Host) -> Option<AsyncEvent> {
    host.step();
    host.reap_all(0).first().map(|cqe| AsyncEvent::from_dword(cqe.dw0))
}

fn abort(sqid: u16, cid: u16) -> Sqe {
    let mut sqe = command(AdminOpcode::ABORT, 0);
    Abort { sqid: QueueId(sqid), cid }.write_to(&mut sqe);
    sqe
}

#[test]
fn bad_doorbells_are_reported_once_until_read() {
    let mut host = Host::plain();
    host.send(0, request());
    host.send(0, request());
    assert_eq!(event(&mut host), None);
    host.store_bell(2, 16);
    let (kind, log_page) = (AsyncEventKind::ERROR, LogPageId::ERROR);
    let value = AsyncEvent { kind, info: 1, log_page };
    assert_eq!(event(&mut host), Some(value), "a tail outside the queue");
    host.store_bell(3, 3);
    assert_eq!(event(&mut host), None, "of a type that was reported and not read");
    acknowledge(&mut host, LogPageId::ERROR, true);
    host.store_bell(3, 9999);
    assert_eq!(event(&mut host), None, "RAE keeps it masked");
    let page = acknowledge(&mut host, LogPageId::ERROR, false);
    assert_eq!(page[..8], 3u64.to_le_bytes(), "all three are in the log");
    assert_eq!(page[8..12], [0xff; 4], "and are about no command");
    assert_eq!(event(&mut host), None, "what was read is not reported again");
    // The queue works again once its doorbells are valid.
    host.store_bell(3, 0);
    assert_eq!(host.io(nvm(NvmOpcode::WRITE_ZEROES, 0, 1)), Status::SUCCESS);
    // A doorbell of a nonexistent queue; each step checks one identifier.
    host.store_bell(2 * 3, 1);
    let found = (0..8).find_map(|_| event(&mut host));
    assert_eq!(found, Some(AsyncEvent { kind, info: 0, log_page }));
}

#[test]
fn events_wait_for_requests() {
    let mut host = Host::plain();
    host.store_bell(2, 16);
    assert_eq!(event(&mut host), None);
    host.send(0, request());
    let found = host.reap_all(0);
    assert_eq!(AsyncEvent::from_dword(found[0].dw0).kind, AsyncEventKind::ERROR);
}

#[test]
fn requests_are_limited_and_hold_no_completion_slots() {
    let mut host = Host::off(|config| config);
    host.enable(8, 2);
    for _ in 0..4 {
        host.send(0, request());
    }
    assert!(host.reap(0).is_none());
    assert_eq!(host.admin_status(request()), Status::AER_LIMIT_EXCEEDED);
    assert!(host.identify(1, 0).is_ok());
}

#[test]
fn a_hot_drive_says_so_if_asked_to() {
    let mut host = Host::plain();
    host.send(0, request());
    host.admin(set(FeatureId::TEMPERATURE_THRESHOLD, 300));
    assert_eq!(event(&mut host), None, "not asked for");
    host.admin(set(FeatureId::TEMPERATURE_THRESHOLD, 340));
    host.admin(set(FeatureId::ASYNC_EVENT_CONFIG, 0xff));
    let cid = host.post(0, set(FeatureId::TEMPERATURE_THRESHOLD, 300));
    host.ring_sq(0);
    host.step();
    let found = host.reap_all(0);
    assert_eq!((found.len(), found[0].cid), (2, cid));
    let event = AsyncEvent::from_dword(found[1].dw0);
    assert_eq!((event.kind, event.info), (AsyncEventKind::SMART, 1));
    assert_eq!(acknowledge(&mut host, LogPageId::SMART, false)[0], 2);
}

#[test]
fn abort_finds_what_is_held() {
    let delay = FaultAction::Delay { ns: 1000 };
    let mut host = Host::ready(|config| config.faults(plan(NvmOpcode::WRITE, delay)));
    let buffer = host.alloc(PAGE);
    host.write(at(&buffer), &[1; 512]);
    let write = nvm(NvmOpcode::WRITE, 0, 1).with_prps(at(&buffer).0, 0);
    let held = host.send(1, write);
    let aer = host.send(0, request());
    assert_eq!(host.admin(abort(1, held ^ 1)).dw0, 1, "no such command");
    assert_eq!(host.admin(abort(2, held)).dw0, 1, "no such queue");
    assert_eq!(host.admin(abort(1, held)).dw0, 0);
    let done = host.reap_all(1);
    assert_eq!((done[0].cid, done[0].status().code()), (held, Status::ABORTED_BY_REQUEST));
    assert_eq!(host.admin(abort(1, held)).dw0, 1, "only once");
    host.now = Nanos(5000);
    host.step();
    assert!(host.reap(1).is_none());
    assert_eq!(host.stored(0, 512), vec![0; 512], "it had no effect");
    host.send(0, abort(0, aer));
    let done = host.reap_all(0);
    assert_eq!((done[0].cid, done[0].status().code()), (aer, Status::ABORTED_BY_REQUEST));
    assert_eq!((done[1].dw0, done[1].status()), (0, Status::SUCCESS));
}

#[test]
fn aborts_are_limited() {
    let when = FaultWhen { opcode: Some(AdminOpcode::ABORT.0), ..FaultWhen::default() };
    let rule = FaultRule::new(when, FaultAction::Delay { ns: 1000 }).limit(4);
    let faults = FaultPlan { rules: vec![rule], ..FaultPlan::default() };
    let mut host = Host::ready(|config| config.faults(faults));
    for _ in 0..4 {
        host.send(0, abort(1, 1));
    }
    assert_eq!(host.admin_status(abort(1, 1)), Status::ABORT_LIMIT_EXCEEDED);
    host.now = Nanos(1000);
    host.step();
    let done = host.reap_all(0);
    assert_eq!(
        done.iter().map(|cqe| (cqe.dw0, cqe.status())).collect::<Vec<_>>(),
        [(1, Status::SUCCESS); 4]
    );
}
