//! Creation and deletion of queues, and their errors.

use nvme_spec::admin::{DeleteQueue, FeatureId, NumberOfQueues, SetFeatures};

use super::*;
use crate::media::{Latency, SimMedia, SimOptions};

fn delete(opcode: AdminOpcode, qid: u16) -> Sqe {
    let mut sqe = command(opcode, 0);
    DeleteQueue { qid: QueueId(qid) }.write_to(&mut sqe);
    sqe
}

#[test]
fn completion_queues_are_checked() {
    let mut host = Host::enabled(|config| config);
    let memory = host.alloc(PAGE);
    let base = at(&memory);
    let vector = |vector: u16| {
        let mut sqe = create_cq(1, 7, base);
        sqe.cdw11 = 3 | u32::from(vector) << 16;
        sqe
    };
    let scattered = Sqe { cdw11: 2, ..create_cq(1, 7, base) };
    let cases = [
        (create_cq(0, 7, base), Status::INVALID_QUEUE_ID),
        (create_cq(5, 7, base), Status::INVALID_QUEUE_ID),
        (create_cq(u16::MAX, 7, base), Status::INVALID_QUEUE_ID),
        (create_cq(1, 0, base), Status::INVALID_QUEUE_SIZE),
        (create_cq(1, 64, base), Status::INVALID_QUEUE_SIZE),
        (create_cq(1, 7, base.offset(16)), Status::INVALID_PRP_OFFSET),
        (vector(5), Status::INVALID_INTERRUPT_VECTOR),
        (vector(u16::MAX), Status::INVALID_INTERRUPT_VECTOR),
        (scattered, Status::INVALID_FIELD),
        (create_cq(1, 63, base), Status::SUCCESS),
        (create_cq(1, 7, base), Status::INVALID_QUEUE_ID),
        (vector(4), Status::INVALID_QUEUE_ID),
    ];
    for (sqe, status) in cases {
        assert_eq!(host.admin_status(sqe), status, "{sqe:?}");
    }
}

#[test]
fn submission_queues_are_checked() {
    let mut host = Host::enabled(|config| config);
    let memory = host.alloc(2 * PAGE);
    let base = at(&memory);
    assert_eq!(host.admin_status(create_cq(1, 7, base)), Status::SUCCESS);
    let base = base.offset(PAGE as u64);
    let scattered = Sqe { cdw11: 1 << 16, ..create_sq(1, 7, 1, base) };
    let cases = [
        (create_sq(0, 7, 1, base), Status::INVALID_QUEUE_ID),
        (create_sq(5, 7, 1, base), Status::INVALID_QUEUE_ID),
        (create_sq(1, 7, 0, base), Status::INVALID_QUEUE_ID),
        (create_sq(1, 7, 5, base), Status::INVALID_QUEUE_ID),
        (create_sq(1, 7, 2, base), Status::COMPLETION_QUEUE_INVALID),
        (create_sq(1, 0, 1, base), Status::INVALID_QUEUE_SIZE),
        (create_sq(1, 64, 1, base), Status::INVALID_QUEUE_SIZE),
        (create_sq(1, 7, 1, base.offset(4)), Status::INVALID_PRP_OFFSET),
        (scattered, Status::INVALID_FIELD),
        (create_sq(1, 7, 1, base), Status::SUCCESS),
        (create_sq(1, 7, 1, base), Status::INVALID_QUEUE_ID),
        // Deletion, in the wrong order and in the right one.
        (delete(AdminOpcode::DELETE_IO_CQ, 1), Status::INVALID_QUEUE_DELETION),
        (delete(AdminOpcode::DELETE_IO_CQ, 0), Status::INVALID_QUEUE_ID),
        (delete(AdminOpcode::DELETE_IO_CQ, 2), Status::INVALID_QUEUE_ID),
        (delete(AdminOpcode::DELETE_IO_SQ, 0), Status::INVALID_QUEUE_ID),
        (delete(AdminOpcode::DELETE_IO_SQ, 2), Status::INVALID_QUEUE_ID),
        (delete(AdminOpcode::DELETE_IO_SQ, 1), Status::SUCCESS),
        (delete(AdminOpcode::DELETE_IO_SQ, 1), Status::INVALID_QUEUE_ID),
        (delete(AdminOpcode::DELETE_IO_CQ, 1), Status::SUCCESS),
        (delete(AdminOpcode::DELETE_IO_CQ, 1), Status::INVALID_QUEUE_ID),
    ];
    for (sqe, status) in cases {
        assert_eq!(host.admin_status(sqe), status, "{sqe:?}");
    }
}

#[test]
fn entry_sizes_are_needed_by_then() {
    let mut host = Host::off(|config| config);
    let queue = host.host_queue(8, 8);
    host.set(reg::AQA, 0x0007_0007);
    host.set64(reg::ASQ, at(&queue.sq).0);
    host.set64(reg::ACQ, at(&queue.cq).0);
    host.queues[0] = Some(queue);
    host.set(reg::CC, 1);
    let memory = host.alloc(PAGE);
    let create = create_cq(1, 7, at(&memory));
    assert_eq!(host.admin_status(create), Status::COMMAND_SEQUENCE_ERROR);
    host.set(reg::CC, Host::good_cc().0);
    assert_eq!(host.admin_status(create), Status::SUCCESS);
}

#[test]
fn queues_wrap_and_change_phase() {
    let mut host = Host::enabled(|config| config);
    host.create_pair(3, 3, 5);
    for round in 0..40 {
        let cqe = host.run(3, nvm(NvmOpcode::WRITE_ZEROES, 0, 1));
        assert_eq!(u32::from(cqe.sqhd), (round + 1) % 3);
    }
}

#[test]
fn queues_may_be_scattered_if_the_controller_says_so() {
    let mut host =
        Host::enabled(|config| EmuConfig { contiguous_queues: false, mqes: 1024, ..config });
    let (sq, cq, list) = (host.alloc(8 * PAGE), host.alloc(8 * PAGE), host.alloc(PAGE));
    // Every other page, in reverse; 100 submissions take two pages, and so do 300 completions.
    let pages = |base: Iova| [base.0 + 6 * 4096, base.0 + 2 * 4096];
    host.write(at(&list), pages(at(&sq)).as_bytes());
    let odd = [at(&cq).0, at(&cq).0 + 4096 + 64];
    let other = host.alloc(PAGE);
    host.write(at(&other), odd.as_bytes());
    let create = Sqe { cdw11: 0, ..create_cq(1, 299, at(&other)) };
    assert_eq!(host.admin_status(create), Status::INVALID_PRP_OFFSET);
    host.write(at(&other), pages(at(&cq)).as_bytes());
    let create = Sqe { cdw11: 0, ..create_cq(1, 299, at(&other)) };
    assert_eq!(host.admin_status(create), Status::SUCCESS);
    let create = Sqe { cdw11: 1 << 16, ..create_sq(1, 99, 1, at(&list)) };
    assert_eq!(host.admin_status(create), Status::SUCCESS);
    for index in 0..700u64 {
        let (slot, page) = (index % 100, |slot: u64| pages(at(&sq))[(slot / 64) as usize]);
        let sqe = Sqe { cid: index as u16, ..nvm(NvmOpcode::WRITE_ZEROES, 0, 1) };
        host.write(Iova(page(slot) + slot % 64 * 64), sqe.as_bytes());
        host.store_bell(2, ((index + 1) % 100) as u32);
        host.step();
        let slot = index % 300;
        let place = Iova(pages(at(&cq))[(slot / 256) as usize] + slot % 256 * 16);
        let cqe = Cqe::read_from_bytes(&host.read(place, 16)).unwrap();
        let phase = (index / 300) % 2 == 0;
        assert_eq!((u64::from(cqe.cid), cqe.phase()), (index, phase), "entry {index}");
        host.store_bell(3, ((index + 1) % 300) as u32);
    }
}

#[test]
fn number_of_queues_is_granted_once() {
    let mut host = Host::enabled(|config| config);
    let ask = |nsq_z, ncq_z| {
        let mut sqe = command(AdminOpcode::SET_FEATURES, 0);
        let value = NumberOfQueues { nsq_z, ncq_z }.to_dword();
        SetFeatures { fid: FeatureId::NUMBER_OF_QUEUES, save: false, value }.write_to(&mut sqe);
        sqe
    };
    assert_eq!(host.admin(ask(99, 99)).dw0, 0x0003_0003);
    assert_eq!(host.admin_status(ask(u16::MAX, 0)), Status::INVALID_FIELD);
    assert_eq!(host.admin(ask(0, 1)).dw0, 0x0001_0000);
    let memory = host.alloc(PAGE);
    assert_eq!(host.admin_status(create_cq(3, 7, at(&memory))), Status::INVALID_QUEUE_ID);
    assert_eq!(host.admin_status(create_cq(2, 7, at(&memory))), Status::SUCCESS);
    assert_eq!(host.admin_status(create_sq(2, 7, 2, at(&memory))), Status::INVALID_QUEUE_ID);
    assert_eq!(host.admin_status(ask(3, 3)), Status::COMMAND_SEQUENCE_ERROR);
}

#[test]
fn deleting_a_queue_waits_for_its_dma() {
    let bytes = media(1 << 20);
    let fixed = |ns| Latency { min_ns: ns, mean_ns: ns, tail_ns: ns, tail_ppm: 0 };
    let options = SimOptions { read: fixed(1000), ..SimOptions::default() };
    let mut host = Host::ready(|mut config| {
        config.namespaces.clear();
        config.namespace(SimMedia::new(bytes.clone(), options), 512)
    });
    let buffer = host.alloc(PAGE);
    let read = host.send(1, nvm(NvmOpcode::READ, 0, 8).with_prps(at(&buffer).0, 0));
    let deletion = host.send(0, delete(AdminOpcode::DELETE_IO_SQ, 1));
    assert!(host.reap(0).is_none() && host.reap(1).is_none());
    assert_eq!(host.step().next_event, Some(Nanos(1000)));
    // Entries after the deletion are not fetched.
    host.send(1, nvm(NvmOpcode::WRITE_ZEROES, 0, 1));
    host.now = Nanos(1000);
    host.step();
    let done = host.reap_all(1);
    assert_eq!((done.len(), done[0].cid, done[0].status()), (1, read, Status::SUCCESS));
    let done = host.reap_all(0);
    assert_eq!((done.len(), done[0].cid, done[0].status()), (1, deletion, Status::SUCCESS));
    assert_eq!(host.admin_status(delete(AdminOpcode::DELETE_IO_CQ, 1)), Status::SUCCESS);
}

#[test]
fn deleting_a_queue_aborts_what_is_held() {
    let delay = FaultAction::Delay { ns: 1000 };
    let mut host = Host::ready(|config| config.faults(plan(NvmOpcode::WRITE_ZEROES, delay)));
    let held = host.send(1, nvm(NvmOpcode::WRITE_ZEROES, 0, 1));
    assert_eq!(host.admin_status(delete(AdminOpcode::DELETE_IO_SQ, 1)), Status::SUCCESS);
    let done = host.reap_all(1);
    assert_eq!((done[0].cid, done[0].status().code()), (held, Status::ABORTED_SQ_DELETED));
    host.now = Nanos(2000);
    let progress = host.step();
    assert_eq!((progress.work, progress.outstanding), (0, 0));
}

#[test]
fn two_submission_queues_share_a_completion_queue() {
    let mut host = Host::plain();
    let second = host.host_queue(8, 8);
    assert_eq!(host.admin_status(create_sq(2, 7, 1, at(&second.sq))), Status::SUCCESS);
    host.queues[2] = Some(second);
    let first = host.post(1, nvm(NvmOpcode::WRITE_ZEROES, 0, 1));
    let other = host.post(2, nvm(NvmOpcode::WRITE_ZEROES, 0, 1));
    host.ring_sq(1);
    host.ring_sq(2);
    host.step();
    let mut done: Vec<_> = host.reap_all(1).iter().map(|cqe| (cqe.sqid, cqe.cid)).collect();
    done.sort_unstable();
    assert_eq!(done, [(1, first), (2, other)]);
}
