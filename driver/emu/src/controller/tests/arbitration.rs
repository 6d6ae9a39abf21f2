//! Order, round robin, back-pressure, doorbells, interrupts.

use super::*;

fn noop() -> Sqe {
    nvm(NvmOpcode::WRITE_ZEROES, 0, 1)
}

#[test]
fn a_full_completion_queue_holds_commands_back() {
    let mut host = Host::enabled(|config| config);
    host.create_pair(1, 16, 4);
    let cids: Vec<u16> = (0..10).map(|_| host.post(1, noop())).collect();
    host.ring_sq(1);
    host.step();
    host.step();
    let mut seen: Vec<u16> = std::iter::from_fn(|| host.reap(1)).map(|cqe| cqe.cid).collect();
    assert_eq!(seen, cids[..3], "one entry stays empty");
    assert_eq!(host.step().work, 0);
    assert_eq!(host.controller.counters().cq_full_waits, 1);
    host.ring_cq(1);
    while seen.len() < 10 {
        assert!(host.step().work > 0, "taking entries lets it go on");
        seen.extend(host.reap_all(1).iter().map(|cqe| cqe.cid));
    }
    assert_eq!(seen, cids);
    assert!(host.reap(1).is_none());
}

#[test]
fn queues_take_turns() {
    let mut host = Host::enabled(|config| config);
    for qid in 1..=4 {
        host.create_pair(qid, 32, 32);
        for _ in 0..30 {
            host.post(qid, noop());
        }
    }
    (1..=4).for_each(|qid| host.ring_sq(qid));
    // A burst is 8 commands.
    for expected in [[8; 4], [16; 4]] {
        let progress = host.controller.step(host.now, 32);
        assert_eq!(progress.work, 32);
        let heads = [1, 2, 3, 4].map(|qid| host.controller.queues.sq(qid).unwrap().head);
        assert_eq!(heads, expected);
    }
    let counters = host.controller.counters();
    assert_eq!(counters.batch_max, 8);
    assert_eq!(counters.sq_doorbells, 4 + 8, "8 admin commands created the queues");
    for (budget, left) in [(1, 55), (50, 5), (50, 0), (50, 0)] {
        host.controller.step(host.now, budget);
        let heads = [1, 2, 3, 4].map(|qid| host.controller.queues.sq(qid).unwrap().head);
        assert_eq!(120 - heads.iter().sum::<u32>(), left);
    }
}

#[test]
fn duplicate_identifiers_conflict() {
    let delay = FaultAction::Delay { ns: 1000 };
    let mut host = Host::ready(|config| config.faults(plan(NvmOpcode::WRITE_ZEROES, delay)));
    host.post_as(1, Sqe { cid: 77, ..noop() });
    host.post_as(1, Sqe { cid: 77, ..Sqe::new(NvmOpcode::FLUSH.0, Cid(0), Nsid(1)) });
    host.ring_sq(1);
    host.step();
    let done = host.reap_all(1);
    assert_eq!(done.len(), 1);
    assert_eq!((done[0].cid, done[0].status().code()), (77, Status::CID_CONFLICT));
    host.now = Nanos(1000);
    host.step();
    let done = host.reap_all(1);
    assert_eq!((done[0].cid, done[0].status()), (77, Status::SUCCESS));
    host.controller.set_faults(FaultPlan::default());
    for _ in 0..2 {
        host.post_as(1, Sqe { cid: 77, ..noop() });
        host.ring_sq(1);
        host.step();
        assert_eq!(host.reap_all(1)[0].status(), Status::SUCCESS, "free again");
    }
}

#[test]
fn interrupts_are_raised_once_a_step_and_can_be_masked() {
    let mut host = Host::plain();
    let interrupt = host.interrupts.listen("emu0", 1).unwrap();
    let mut count = [0u8; 8];
    let mut heard = || match rustix::io::read(&interrupt.eventfd, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(_) => 0,
    };
    host.post(1, noop());
    host.post(1, noop());
    host.ring_sq(1);
    host.step();
    assert_eq!((heard(), host.reap_all(1).len()), (1, 2));
    host.set(reg::INTMS, 1 << 1);
    assert_eq!(host.controller.read32(reg::INTMC, host.now), 2);
    host.run(1, noop());
    assert_eq!(heard(), 0);
    host.set(reg::INTMC, 1 << 1);
    assert_eq!(heard(), 1, "what was withheld comes when it is unmasked");
    assert_eq!(host.controller.counters().interrupts, 2);
}

#[test]
fn queues_without_interrupts_are_quiet() {
    let mut host = Host::enabled(|config| config);
    let queue = host.host_queue(8, 8);
    let create = Sqe { cdw11: 1, ..create_cq(1, 7, at(&queue.cq)) };
    assert_eq!(host.admin_status(create), Status::SUCCESS);
    assert_eq!(host.admin_status(create_sq(1, 7, 1, at(&queue.sq))), Status::SUCCESS);
    host.queues[1] = Some(queue);
    let interrupt = host.interrupts.listen("emu0", 0).unwrap();
    host.run(1, noop());
    assert!(rustix::io::read(&interrupt.eventfd, &mut [0u8; 8]).is_err());
}
