//! Events that can intervene between a command and its copies.

use nvme_spec::{
    admin::{Abort, DeleteQueue},
    reg::{ShutdownNotification, ShutdownStatus},
};

use super::*;

/// Starts a read and its copies.
fn reading() -> Rig {
    let mut rig = Rig::new();
    rig.host.media.poke(0, &pattern(PAGE, 1)).unwrap();
    let sqe = rig.page(NvmOpcode::READ, 0, 0);
    rig.send(sqe);
    assert_eq!(rig.gpu.pending(), 1);
    rig
}

/// Unmaps the GPU's memory and returns whether it is still allocated.
fn unmap(rig: &mut Rig) -> bool {
    rig.memory = rig.host.alloc(PAGE);
    rig.gpu.allocations() == 1
}

#[test]
fn a_reset_is_over_when_the_copies_are() {
    let mut rig = reading();
    let cq = rig.host.queue(1).cq.clone();
    rig.host.disable();
    assert_eq!(rig.host.csts().rdy(), 1, "the GPU is still writing the host's memory");
    let progress = rig.host.step();
    assert!(progress.next_event.is_some(), "the fence is polled: {progress:?}");
    assert!(unmap(&mut rig), "memory of a copy under way was freed");
    assert_eq!(rig.host.csts().rdy(), 1);
    rig.gpu.finish();
    assert_eq!(rig.host.csts(), Csts(0));
    assert_eq!(rig.gpu.allocations(), 0, "and let go with the fence");
    assert_eq!(rig.host.read(at(&cq), 256), [0; 256], "no completion");
    let progress = rig.host.step();
    assert_eq!((progress.outstanding, progress.next_event), (0, None));
    rig.host.enable(4, 4);
    rig.host.create_pair(1, 8, 8);
    let buffer = rig.host.alloc(PAGE);
    let sqe = nvm(NvmOpcode::READ, 0, 8).with_prps(at(&buffer).0, 0);
    assert_eq!(rig.host.io(sqe), Status::SUCCESS);
}

#[test]
fn enabled_during_the_copies_it_becomes_ready_after_them() {
    let mut rig = reading();
    rig.host.disable();
    rig.host.enable(4, 4);
    rig.host.step();
    rig.gpu.finish();
    assert_eq!(rig.host.csts().rdy(), 1);
    rig.host.create_pair(1, 8, 8);
    assert_eq!(rig.io(rig.page(NvmOpcode::READ, 0, 4096)), Status::SUCCESS);
    assert_eq!(rig.on_gpu(4096, PAGE), pattern(PAGE, 1));
}

#[test]
fn a_reset_forgets_what_waits_for_its_medium_or_its_copy() {
    let mut rig = Rig::slow(fixed(1000));
    rig.send(rig.page(NvmOpcode::READ, 0, 0));
    rig.gpu.write(rig.device, &pattern(PAGE, 3));
    rig.send(rig.page(NvmOpcode::WRITE, 0, 0));
    assert_eq!(rig.gpu.batches(), [1], "the write's; the read is still with its medium");
    rig.host.disable();
    rig.settle();
    assert_eq!(rig.host.csts(), Csts(0));
    assert_eq!(rig.gpu.batches(), [1], "the read is never copied");
    rig.host.enable(4, 4);
    rig.host.create_pair(1, 8, 8);
    assert_eq!(rig.io(rig.page(NvmOpcode::READ, 0, 8192)), Status::SUCCESS);
    assert_eq!(rig.on_gpu(8192, PAGE), vec![0; PAGE], "a write was carried out after the reset");
}

#[test]
fn a_power_loss_during_copies() {
    let mut rig = reading();
    rig.gpu.write(DevicePtr(rig.device.0 + 8192), &pattern(PAGE, 9));
    rig.send(rig.page(NvmOpcode::WRITE, 8, 8192));
    rig.host.controller.power_loss(rig.host.now);
    assert_eq!(rig.host.csts().rdy(), 1, "copies under way cannot be called back");
    assert!(unmap(&mut rig));
    rig.gpu.run(1);
    assert_eq!(rig.host.csts().rdy(), 1);
    rig.gpu.run(1);
    assert_eq!((rig.host.csts(), rig.gpu.allocations()), (Csts(0), 0));
    assert_eq!(rig.host.stored(4096, PAGE), vec![0; PAGE], "the write was lost");
    rig.host.enable(4, 4);
    assert_eq!(rig.host.csts().rdy(), 1);
}

#[test]
fn unplugged_during_copies_it_keeps_their_memory() {
    let mut rig = reading();
    rig.host.controller.unplug();
    assert_eq!(rig.host.csts().0, reg::ALL_ONES);
    assert!(unmap(&mut rig));
    let progress = rig.host.step();
    assert_eq!((progress.outstanding, progress.listening), (1, false));
    assert!(progress.next_event.is_some());
    rig.gpu.finish();
    rig.host.step();
    assert_eq!(rig.gpu.allocations(), 0);
    assert_eq!(rig.host.step(), Progress::default());
}

#[test]
fn a_controller_that_is_dropped_waits_for_copies_or_leaks() {
    let mut rig = reading();
    rig.gpu.per_look(1);
    unmap(&mut rig);
    let Rig { host, gpu, memory, .. } = rig;
    drop((host, memory));
    assert_eq!((gpu.pending(), gpu.allocations()), (0, 0), "waited for");

    let mut rig = reading();
    unmap(&mut rig);
    let Rig { host, gpu, memory, .. } = rig;
    drop((host, memory));
    assert_eq!((gpu.pending(), gpu.allocations()), (1, 1), "leaked");
    gpu.finish();
}

#[test]
fn memory_unmapped_by_its_owner_stays_for_the_copy() {
    let mut rig = reading();
    assert!(unmap(&mut rig));
    rig.gpu.finish();
    assert_eq!(rig.gpu.allocations(), 1, "the fence has not been polled");
    rig.host.step();
    assert_eq!((rig.host.reap_all(1).len(), rig.gpu.allocations()), (1, 0));
}

#[test]
fn a_queue_is_deleted_after_its_copies() {
    let mut rig = reading();
    let mut sqe = command(AdminOpcode::DELETE_IO_SQ, 0);
    DeleteQueue { qid: QueueId(1) }.write_to(&mut sqe);
    let deletion = rig.host.send(0, sqe);
    rig.host.step();
    assert!(rig.host.reap(0).is_none(), "deleted while DMA of its commands goes on");
    rig.gpu.finish();
    rig.host.step();
    assert_eq!(rig.host.reap_all(1).len(), 1, "the command ends first");
    assert_eq!(rig.host.reap(0).map(|cqe| cqe.cid), Some(deletion));
}

#[test]
fn an_abort_does_not_stop_a_copy() {
    let mut rig = reading();
    let cid = rig.host.cid;
    let mut sqe = command(AdminOpcode::ABORT, 0);
    Abort { sqid: QueueId(1), cid }.write_to(&mut sqe);
    assert_eq!(rig.host.admin(sqe).dw0, 1, "not aborted");
    assert!(rig.host.reap(1).is_none());
    rig.gpu.finish();
    rig.host.step();
    let cqe = rig.host.reap(1).unwrap();
    assert_eq!((cqe.cid, cqe.status()), (cid, Status::SUCCESS));
}

#[test]
fn a_shutdown_waits_for_copies() {
    let mut rig = Rig::new();
    rig.gpu.write(rig.device, &pattern(PAGE, 4));
    rig.send(rig.page(NvmOpcode::WRITE, 0, 0));
    let cc = Host::good_cc().with_shn(ShutdownNotification::NORMAL.0);
    rig.host.set(reg::CC, cc.0);
    for _ in 0..5 {
        rig.host.step();
    }
    assert_eq!(rig.host.csts().shst(), ShutdownStatus::OCCURRING.0);
    rig.settle();
    assert_eq!(rig.host.csts().shst(), ShutdownStatus::COMPLETE.0);
    assert_eq!(rig.host.stored(0, PAGE), pattern(PAGE, 4));
}

#[test]
fn copies_that_are_not_taken_fail_their_commands_alone() {
    let mut rig = Rig::new();
    rig.host.media.poke(0, &pattern(PAGE, 1)).unwrap();
    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE] {
        rig.gpu.refuse(Some("too many copies"));
        assert_eq!(rig.io(rig.page(opcode, 0, 0)), Status::DATA_TRANSFER_ERROR);
        assert_eq!(rig.host.csts().cfs(), 0);
        rig.gpu.refuse(None);
        assert_eq!(rig.io(rig.page(opcode, 0, 0)), Status::SUCCESS, "{opcode}");
    }
    assert_eq!(rig.host.controller.storage.media_errors, 0, "no error of the medium");
}

#[test]
fn without_memory_in_between_commands_fail() {
    let mut rig = Rig::new();
    rig.gpu.no_memory(true);
    assert_eq!(rig.io(rig.page(NvmOpcode::READ, 0, 0)), Status::DATA_TRANSFER_ERROR);
    rig.gpu.no_memory(false);
    assert_eq!(rig.io(rig.page(NvmOpcode::READ, 0, 0)), Status::SUCCESS);
    assert_eq!(rig.host.csts().cfs(), 0);
}

#[test]
fn a_lost_gpu_fails_its_commands_and_then_the_controller() {
    for at_submit in [false, true] {
        let mut rig = if at_submit { Rig::new() } else { reading() };
        rig.gpu.lose("fell off the bus");
        if at_submit {
            rig.send(rig.page(NvmOpcode::WRITE, 0, 0));
        }
        rig.host.step();
        let status = rig.host.reap(1).map(|cqe| cqe.status().code());
        assert_eq!(status, Some(Status::DATA_TRANSFER_ERROR), "at submit: {at_submit}");
        assert_eq!(rig.host.csts().cfs(), 1);
        // A reset revives commands on host memory.
        rig.host.disable();
        assert_eq!(rig.host.csts(), Csts(0));
        rig.host.enable(4, 4);
        rig.host.create_pair(1, 8, 8);
        let buffer = rig.host.alloc(PAGE);
        let sqe = nvm(NvmOpcode::READ, 0, 8).with_prps(at(&buffer).0, 0);
        assert_eq!(rig.host.io(sqe), Status::SUCCESS);
        rig.send(rig.page(NvmOpcode::READ, 0, 0));
        rig.host.step();
        assert_eq!(rig.host.csts().cfs(), 1);
    }
}

#[test]
fn a_gpu_lost_during_a_reset_ends_it() {
    let mut rig = reading();
    rig.host.disable();
    assert_eq!(rig.host.csts().rdy(), 1);
    rig.gpu.lose("fell off the bus");
    assert_eq!(rig.host.csts(), Csts(0), "no copy will get any further");
    rig.host.enable(4, 4);
    rig.host.create_pair(1, 8, 8);
    assert_eq!(rig.host.csts().cfs(), 0, "nothing since the reset is lost");
}

#[test]
fn a_fatal_controller_writes_nothing_more() {
    let mut rig =
        Rig::with(|config| config.faults(plan(NvmOpcode::FLUSH, FaultAction::FatalStatus)));
    rig.gpu.write(rig.device, &pattern(PAGE, 4));
    rig.send(rig.page(NvmOpcode::WRITE, 0, 0));
    rig.send(Sqe::new(NvmOpcode::FLUSH.0, Cid(0), Nsid(1)));
    assert_eq!(rig.host.csts().cfs(), 1);
    rig.settle();
    assert_eq!(rig.host.stored(0, PAGE), vec![0; PAGE]);
    rig.host.disable();
    assert_eq!(rig.host.csts(), Csts(0));
}

#[test]
fn what_waits_in_a_fatal_controller_does_not_stop_the_clock() {
    let mut rig =
        Rig::with(|config| config.faults(plan(NvmOpcode::FLUSH, FaultAction::FatalStatus)));
    rig.host.post(1, rig.page(NvmOpcode::READ, 0, 0));
    rig.send(Sqe::new(NvmOpcode::FLUSH.0, Cid(0), Nsid(1)));
    assert_eq!((rig.host.csts().cfs(), rig.gpu.batches().len()), (1, 0));
    rig.host.now = Nanos(1_000_000);
    let event = rig.host.step().next_event;
    assert!(event.is_none_or(|at| at > rig.host.now + Nanos(100)), "{event:?}");
}

#[test]
fn a_reset_forgets_what_waits_for_memory_in_between() {
    let big = 40 << 20;
    let mut rig = Rig::with(|mut config| {
        config.namespaces.clear();
        EmuConfig { mdts_bytes: None, ..config }.namespace(media(big), 4096)
    });
    let memory = rig.host.domain.import(rig.gpu.alloc(big as usize).0).unwrap();
    let all = SglDescriptor::data_block(at(&memory).0, big as u32);
    for _ in 0..2 {
        rig.send(nvm(NvmOpcode::READ, 0, (big / 4096) as u32).with_sgl(all));
    }
    assert_eq!(rig.gpu.batches(), [1], "there is memory for one of them");
    rig.host.disable();
    rig.gpu.finish();
    rig.host.enable(4, 4);
    rig.host.create_pair(1, 8, 8);
    rig.settle();
    assert_eq!(rig.gpu.batches(), [1], "the other read was cancelled");
    let again = nvm(NvmOpcode::READ, 0, (big / 4096) as u32).with_sgl(all);
    assert_eq!(rig.io(again), Status::SUCCESS, "all of the memory is there again");
}

#[test]
fn data_faults_apply_to_data_of_a_gpu_too() {
    let faulty = |opcode, then| Rig::with(|config| config.faults(plan(opcode, then)));
    // Torn and misdirected writes show on the medium.
    let write = |rig: &mut Rig| {
        rig.gpu.write(rig.device, &pattern(PAGE, 5));
        rig.io(rig.page(NvmOpcode::WRITE, 8, 0))
    };
    let mut rig = faulty(NvmOpcode::WRITE, FaultAction::TornWrite);
    assert_eq!(write(&mut rig), Status::SUCCESS);
    let stored = rig.host.stored(4096, PAGE);
    let kept = stored.chunks(512).take_while(|block| block.iter().any(|byte| *byte != 0)).count();
    assert!(kept < 8 && stored[..kept * 512] == pattern(PAGE, 5)[..kept * 512]);
    assert!(stored[kept * 512..].iter().all(|byte| *byte == 0), "torn after {kept}");

    let mut rig = faulty(NvmOpcode::WRITE, FaultAction::MisdirectedWrite { lba_delta: 16 });
    assert_eq!(write(&mut rig), Status::SUCCESS);
    assert_eq!(rig.host.stored(4096, PAGE), vec![0; PAGE]);
    assert_eq!(rig.host.stored(24 * 512, PAGE), pattern(PAGE, 5));

    // A corrupted read shows on the GPU and not on the medium.
    let mut rig = faulty(NvmOpcode::READ, FaultAction::CorruptRead);
    rig.host.media.poke(0, &pattern(PAGE, 6)).unwrap();
    assert_eq!(rig.io(rig.page(NvmOpcode::READ, 0, 0)), Status::SUCCESS);
    let found = rig.on_gpu(0, PAGE);
    let flipped: u32 = found.iter().zip(pattern(PAGE, 6)).map(|(a, b)| (a ^ b).count_ones()).sum();
    assert!((1..=8).contains(&flipped), "{flipped} bits");
    assert_eq!(rig.host.stored(0, PAGE), pattern(PAGE, 6));

    // A delay and a duplicate completion work as for host memory.
    let mut rig = faulty(NvmOpcode::READ, FaultAction::Delay { ns: 1000 });
    rig.send(rig.page(NvmOpcode::READ, 0, 0));
    assert_eq!(rig.gpu.pending(), 0);
    rig.settle();
    assert_eq!(rig.host.reap_all(1).len(), 1);
    let mut rig = faulty(NvmOpcode::READ, FaultAction::Duplicate);
    rig.send(rig.page(NvmOpcode::READ, 0, 0));
    assert!(rig.host.reap(1).is_none());
    rig.settle();
    assert_eq!(rig.host.reap_all(1).len(), 2);
}

#[test]
fn a_power_loss_tears_what_was_copied() {
    // Writes are in a slow medium when the power is lost: each block is old or new, never a mix.
    let bytes = media(1 << 20);
    let mut rig = Rig::with(|mut config| {
        config.namespaces.clear();
        config.namespace(SimMedia::new(bytes.clone(), fixed(1000)), 512)
    });
    rig.gpu.write(rig.device, &pattern(PAGE, 5));
    rig.send(rig.page(NvmOpcode::WRITE, 0, 0));
    rig.gpu.finish();
    rig.host.step();
    // The GPU's memory may change now: the medium has the bytes.
    rig.gpu.write(rig.device, &[0x11; PAGE]);
    rig.host.controller.power_loss(rig.host.now);
    let mut found = vec![0; PAGE];
    bytes.peek(0, &mut found).unwrap();
    let expected = pattern(PAGE, 5);
    let blocks = found.chunks(512).zip(expected.chunks(512));
    let made: Vec<bool> = blocks.clone().map(|(found, new)| found == new).collect();
    assert!(blocks.zip(&made).all(|((found, _), made)| *made || found.iter().all(|b| *b == 0)));
    assert!(made.contains(&true) && made.contains(&false), "seed 1 tears it: {made:?}");
}

/// Generates events: a kind and an amount.
fn events() -> impl Strategy<Value = Vec<(u8, u64)>> {
    prop::collection::vec((0u8..40, 0u64..1 << 20), 1..300)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 96,
        max_shrink_iters: 100,
        ..ProptestConfig::default()
    })]

    /// For any order of events: no copy finds its memory freed (the GPU would panic), none is in
    /// progress while CSTS.RDY is 0, completed reads have their data, and nothing is held at the
    /// end.
    #[test]
    fn nothing_is_freed_or_reused_under_a_copy(events in events(), slow: bool) {
        let mut rig = if slow { Rig::slow(fixed(3000)) } else { Rig::new() };
        // Identifier and page of each outstanding read.
        let (mut reads, mut writes) = (Vec::<(u16, u64)>::new(), 0);
        for (event, amount) in events {
            rig.host.now = rig.host.now + Nanos(amount % 2000);
            let (page, lba) = (amount % 8, 8 * (amount % 200));
            match event {
                // 15 fit in the queue; pages with an outstanding read are left alone.
                0..=9 if reads.iter().all(|(_, used)| *used != page) => {
                    rig.gpu.write(DevicePtr(rig.device.0 + page * 4096), &[0x66; PAGE]);
                    let read = rig.page(NvmOpcode::READ, lba, page * 4096);
                    reads.push((rig.send(read), page));
                }
                10..=12 if writes < 6 => {
                    writes += 1;
                    // Writes the bytes that the medium already has.
                    rig.gpu.write(DevicePtr(rig.device.0 + 8 * 4096), &[0; PAGE]);
                    rig.send(rig.page(NvmOpcode::WRITE, lba, 8 * 4096));
                }
                13..=23 => rig.gpu.run(amount as usize % 4),
                24..=36 => drop(rig.host.step()),
                37 | 38 => {
                    if event == 37 {
                        rig.host.disable();
                    } else {
                        rig.host.controller.power_loss(rig.host.now);
                    }
                    (reads, writes) = (Vec::new(), 0);
                    // The host's side: memory is released with copies in progress.
                    let (memory, device) = rig.gpu.alloc(POOL);
                    rig.memory = rig.host.domain.import(memory).unwrap();
                    rig.device = device;
                    while rig.host.csts().rdy() == 1 {
                        rig.gpu.run(1);
                        rig.host.step();
                    }
                    prop_assert_eq!(rig.gpu.pending(), 0, "RDY is 0 and copies go on");
                    rig.host.enable(4, 4);
                    rig.host.create_pair(1, 16, 16);
                }
                _ => {}
            }
            for cqe in rig.host.reap_all(1) {
                prop_assert_eq!(cqe.status(), Status::SUCCESS);
                if let Some(at) = reads.iter().position(|(cid, _)| *cid == cqe.cid) {
                    let (_, page) = reads.swap_remove(at);
                    prop_assert_eq!(rig.on_gpu(page * 4096, PAGE), vec![0; PAGE], "too early");
                } else {
                    writes -= 1;
                }
            }
        }
        rig.settle();
        rig.settle();
        let (memory, gpu) = (rig.memory, rig.gpu);
        drop((memory, rig.host));
        prop_assert_eq!(gpu.allocations(), 0, "something keeps memory");
    }
}
