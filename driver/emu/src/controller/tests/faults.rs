//! The fault plan from the host's view.

use nvme_spec::status::Status;

use super::*;

fn faulty(opcode: NvmOpcode, then: FaultAction) -> Host {
    Host::ready(|config| config.faults(plan(opcode, then)))
}

/// Builds a write of 8 blocks of `pattern(_, 1)` to block 8.
fn write(host: &Host) -> Sqe {
    let buffer = host.alloc(PAGE);
    host.write(at(&buffer), &pattern(PAGE, 1));
    let iova = at(&buffer).0;
    // The mapping must outlive the command.
    std::mem::forget(buffer);
    nvm(NvmOpcode::WRITE, 8, 8).with_prps(iova, 0)
}

#[test]
fn status_instead_of_execution() {
    let code = Status::WRITE_FAULT.0;
    let mut host = faulty(NvmOpcode::WRITE, FaultAction::Status { code, dnr: true });
    let sqe = write(&host);
    let status = host.run(1, sqe).status();
    assert_eq!((status.code(), status.dnr()), (Status::WRITE_FAULT, true));
    assert_eq!(host.stored(4096, PAGE), vec![0; PAGE]);
    assert_eq!(host.controller.counters().faults, 1);
    assert_eq!(host.io(nvm(NvmOpcode::WRITE_ZEROES, 0, 1)), Status::SUCCESS);
}

#[test]
fn dropped_commands_do_not_clog_the_queue() {
    let mut host = faulty(NvmOpcode::WRITE, FaultAction::Drop);
    for _ in 0..40 {
        let sqe = write(&host);
        host.send(1, sqe);
        assert!(host.reap(1).is_none());
    }
    assert_eq!(host.io(nvm(NvmOpcode::WRITE_ZEROES, 0, 1)), Status::SUCCESS);
    assert_eq!(host.step().outstanding, 0);
}

#[test]
fn delayed_commands_take_effect_late() {
    let mut host = faulty(NvmOpcode::WRITE, FaultAction::Delay { ns: 1000 });
    let (first, second) = (write(&host), write(&host));
    let first = host.send(1, first);
    host.now = Nanos(10);
    let second = host.send(1, second);
    assert_eq!(host.step().next_event, Some(Nanos(1000)));
    assert_eq!(host.stored(4096, PAGE), vec![0; PAGE]);
    host.now = Nanos(2000);
    host.step();
    assert_eq!(host.reap_all(1).iter().map(|cqe| cqe.cid).collect::<Vec<_>>(), [first, second]);
    assert_eq!(host.stored(4096, PAGE), pattern(PAGE, 1));
}

#[test]
fn completions_can_be_wrong() {
    let mut host = faulty(NvmOpcode::WRITE, FaultAction::WrongCid);
    let sqe = write(&host);
    let cid = host.send(1, sqe);
    let found = host.reap_all(1);
    assert!(found.len() == 1 && found[0].cid != cid);

    let mut host = faulty(NvmOpcode::WRITE, FaultAction::WrongSqhd);
    let sqe = write(&host);
    assert!(host.run(1, sqe).sqhd >= 16);

    let mut host = faulty(NvmOpcode::WRITE, FaultAction::WrongSqid);
    let sqe = write(&host);
    host.send(1, sqe);
    assert_ne!(host.reap_all(1)[0].sqid, 1);

    let mut host = faulty(NvmOpcode::WRITE, FaultAction::WrongPhase);
    let sqe = write(&host);
    host.send(1, sqe);
    assert!(host.reap(1).is_none());
    let cq = at(&host.queue(1).cq);
    assert_eq!(host.controller.counters().completions, 2 + 1);
    host.send(1, nvm(NvmOpcode::WRITE_ZEROES, 0, 1));
    let second = Cqe::read_from_bytes(&host.read(cq.offset(16), 16)).unwrap();
    assert!(second.phase(), "the next one is in the next slot");
}

#[test]
fn duplicates_come_twice_but_never_overrun() {
    let mut host = faulty(NvmOpcode::WRITE, FaultAction::Duplicate);
    let sqe = write(&host);
    let cid = host.send(1, sqe);
    let found: Vec<u16> = host.reap_all(1).iter().map(|cqe| cqe.cid).collect();
    assert_eq!(found, [cid, cid]);
    // 15 entries fit: with fewer slots than duplicates, some stay single, and none is lost.
    let mut cids = Vec::new();
    for _ in 0..12 {
        let sqe = write(&host);
        cids.push(host.post(1, sqe));
    }
    host.ring_sq(1);
    let mut found = Vec::new();
    for _ in 0..12 {
        host.step();
        let batch = host.reap_all(1);
        assert!(batch.len() <= 15);
        found.extend(batch.iter().map(|cqe| cqe.cid));
    }
    found.dedup();
    assert_eq!(found, cids);
}

#[test]
fn data_faults_report_success() {
    let mut host = faulty(NvmOpcode::WRITE, FaultAction::TornWrite);
    let sqe = write(&host);
    assert_eq!(host.io(sqe), Status::SUCCESS);
    let (stored, whole) = (host.stored(4096, PAGE), pattern(PAGE, 1));
    let kept = stored.iter().zip(&whole).take_while(|(a, b)| a == b).count();
    assert!(kept < PAGE && stored[kept..].iter().all(|byte| *byte == 0), "{kept}");

    let misdirected = FaultAction::MisdirectedWrite { lba_delta: -8 };
    let mut host = faulty(NvmOpcode::WRITE, misdirected);
    let sqe = write(&host);
    assert_eq!(host.io(sqe), Status::SUCCESS);
    assert_eq!((host.stored(0, PAGE), host.stored(4096, PAGE)), (whole, vec![0; PAGE]));

    let mut host = faulty(NvmOpcode::READ, FaultAction::CorruptRead);
    let buffer = host.alloc(PAGE);
    let read = nvm(NvmOpcode::READ, 0, 8).with_prps(at(&buffer).0, 0);
    assert_eq!(host.io(read), Status::SUCCESS);
    assert_ne!(host.read(at(&buffer), PAGE), vec![0; PAGE]);
    assert_eq!(host.stored(0, PAGE), vec![0; PAGE], "the medium is as it was");
}

#[test]
fn the_whole_device_can_fail() {
    let mut host = faulty(NvmOpcode::WRITE, FaultAction::FatalStatus);
    let sqe = write(&host);
    host.send(1, sqe);
    assert_eq!(host.csts().cfs(), 1);
    assert!(host.reap(1).is_none());

    let mut host = faulty(NvmOpcode::WRITE, FaultAction::Gone);
    let sqe = write(&host);
    host.send(1, sqe);
    assert!(host.csts().is_gone());

    let mut host = faulty(NvmOpcode::WRITE, FaultAction::PowerLoss);
    let sqe = write(&host);
    host.send(1, sqe);
    assert_eq!(host.csts(), Csts(0));
    assert_eq!(host.stored(4096, PAGE), vec![0; PAGE]);
}

#[test]
fn identify_data_can_lie() {
    use crate::{IdentifyOverrides, IdentifyPatch};
    let identify = IdentifyOverrides {
        mdts: Some(3),
        sgls: Some(0),
        nsze: Some(5),
        patches: vec![IdentifyPatch { cns: 1, offset: 4094, bytes: vec![7; 9] }],
        ..IdentifyOverrides::default()
    };
    let mut host =
        Host::enabled(|config| config.faults(FaultPlan { identify, ..FaultPlan::default() }));
    let page = host.identify(1, 0).unwrap();
    assert_eq!((page[77], &page[536..540], &page[4093..]), (3, &[0; 4][..], &[0, 7, 7][..]));
    assert_eq!(host.identify(0, 1).unwrap()[..8], 5u64.to_le_bytes());
}
