//! Registers, enable, reset, shutdown, power.

use nvme_spec::reg::{Cap, ShutdownNotification, ShutdownStatus, Version};

use super::*;
use crate::RegisterFaults;

fn with_registers(registers: RegisterFaults) -> Host {
    Host::off(|config| config.faults(FaultPlan { registers, ..FaultPlan::default() }))
}

#[test]
fn registers_say_what_the_controller_is() {
    let mut host = Host::off(|config| EmuConfig { dstrd: 2, ..config });
    let mut get = |offset| host.controller.read32(offset, Nanos(0));
    let cap = Cap(u64::from(get(reg::CAP)) | u64::from(get(reg::CAP + 4)) << 32);
    assert_eq!((cap.mqes_z(), cap.cqr(), cap.to_500ms(), cap.dstrd()), (63, 1, 5, 2));
    assert_eq!((cap.css(), cap.mpsmin(), cap.mpsmax(), cap.nssrs()), (1, 0, 4, 0));
    assert!(Version(get(reg::VS)) >= Version::new(1, 4, 0));
    for reserved in [0x18, reg::NSSR, 0x100, 0xffc, 0x1000, 0x1008] {
        assert_eq!(get(reserved), 0, "{reserved:x}");
    }
    host.set64(reg::ASQ, 0x1234_5678_9abc_defe);
    host.set(reg::AQA, u32::MAX);
    host.set(reg::VS, 1);
    host.set(0x18, 1);
    let mut get = |offset| host.controller.read32(offset, Nanos(0));
    assert_eq!((get(reg::ASQ), get(reg::ASQ + 4)), (0x9abc_d000, 0x1234_5678));
    assert_eq!((get(reg::AQA), get(0x18)), (0x0fff_0fff, 0));
    assert_ne!(get(reg::VS), 1);
}

#[test]
fn enabling_needs_good_values() {
    let good = Host::good_cc();
    let cases: [(&str, Cc, u32, u64, bool); 10] = [
        ("all is well", good, 0x0007_0007, 0, true),
        ("entry sizes come later", good.with_iosqes(0).with_iocqes(0), 0x0007_0007, 0, true),
        ("page size", good.with_mps(5), 0x0007_0007, 0, false),
        ("command set", good.with_css(6), 0x0007_0007, 0, false),
        ("arbitration", good.with_ams(1), 0x0007_0007, 0, false),
        ("entry size", good.with_iosqes(7), 0x0007_0007, 0, false),
        ("completion size", good.with_iocqes(6), 0x0007_0007, 0, false),
        ("submission entries", good, 0x0007_0000, 0, false),
        ("completion entries", good, 0x0000_0007, 0, false),
        ("queue address", good.with_mps(1), 0x0007_0007, 4096, false),
    ];
    for (what, cc, aqa, odd, works) in cases {
        let mut host = Host::off(|config| config);
        let memory = host.alloc(4 * PAGE);
        let base = at(&memory).0.next_multiple_of(1 << 13);
        host.set(reg::AQA, aqa);
        host.set64(reg::ASQ, base + odd);
        host.set64(reg::ACQ, base);
        host.set(reg::CC, cc.0);
        let csts = host.csts();
        assert_eq!((csts.rdy() == 1, csts.cfs() == 0), (works, works), "{what}");
        host.set(reg::CC, 0);
        assert_eq!((host.csts().rdy(), host.csts().cfs()), (0, 0), "{what}: a reset clears it");
    }
}

#[test]
fn reset_forgets_queues_and_commands() {
    let delay = FaultAction::Delay { ns: 1000 };
    let mut host = Host::ready(|config| config.faults(plan(NvmOpcode::READ, delay)));
    let buffer = host.alloc(PAGE);
    host.send(1, nvm(NvmOpcode::READ, 0, 8).with_prps(at(&buffer).0, 0));
    host.send(0, command(AdminOpcode::ASYNC_EVENT_REQUEST, 0));
    assert!(host.reap(1).is_none());
    assert_eq!(host.step().outstanding, 1);
    let cq = at(&host.queue(1).cq);
    host.disable();
    assert_eq!(host.csts(), Csts(0));
    assert_eq!((host.bells.sq_tail(1), host.bells.sq_tail(0)), (0, 0));
    host.now = Nanos(5000);
    let progress = host.step();
    assert_eq!((progress.work, progress.outstanding, progress.listening), (0, 0, false));
    host.enable(4, 4);
    host.step();
    assert!(host.reap(0).is_none(), "the event request is gone");
    // Nothing happens on the old queue, and its identifier is free.
    host.store_bell(2, 1);
    host.step();
    host.create_pair(1, 8, 8);
    assert_eq!(
        host.domain.access().read_u32(cq.offset(12)),
        Err(crate::DmaFault { iova: cq.offset(12), len: 4, kind: crate::DmaFaultKind::Unmapped })
    );
    assert_eq!(host.controller.counters().resets, 1);
}

#[test]
fn shutdown_is_reported_in_steps() {
    for kind in [ShutdownNotification::NORMAL, ShutdownNotification::ABRUPT] {
        let mut host = Host::plain();
        let cc = Host::good_cc().with_shn(kind.0);
        host.set(reg::CC, cc.0);
        assert_eq!(host.csts().shst(), ShutdownStatus::OCCURRING.0);
        let mut steps = 0;
        while host.csts().shst() != ShutdownStatus::COMPLETE.0 {
            host.step();
            steps += 1;
            assert!(steps < 8);
        }
        assert_eq!(host.csts().rdy(), 1);
        host.send(1, nvm(NvmOpcode::WRITE_ZEROES, 0, 1));
        assert!(host.reap(1).is_none(), "nothing is fetched after a shutdown");
        host.disable();
        assert_eq!(host.csts(), Csts(0));
        host.enable(8, 8);
        host.create_pair(1, 8, 8);
        assert_eq!(host.io(nvm(NvmOpcode::WRITE_ZEROES, 0, 1)), Status::SUCCESS);
    }
}

#[test]
fn a_shutdown_of_a_disabled_controller_ends_with_the_next_enable() {
    let mut host = Host::off(|config| config);
    host.set(reg::CC, Cc::default().with_shn(ShutdownNotification::NORMAL.0).0);
    while host.step().work > 0 {}
    assert_eq!(host.csts().shst(), ShutdownStatus::COMPLETE.0);
    host.enable(8, 8);
    assert_eq!((host.csts().rdy(), host.csts().shst()), (1, ShutdownStatus::NORMAL.0));
    host.create_pair(1, 8, 8);
}

#[test]
fn ready_can_be_slow_stuck_or_sticky() {
    let mut slow = with_registers(RegisterFaults { slow_rdy_ns: Some(1000), ..Default::default() });
    slow.enable(8, 8);
    assert_eq!(slow.csts().rdy(), 0);
    assert_eq!(slow.controller.next_event(), Some(Nanos(1000)));
    slow.now = Nanos(1000);
    assert_eq!(slow.csts().rdy(), 1);
    slow.disable();
    assert_eq!(slow.csts().rdy(), 1);
    slow.now = Nanos(2000);
    slow.step();
    assert_eq!(slow.csts().rdy(), 0);

    let mut stuck = with_registers(RegisterFaults { stuck_rdy: true, ..Default::default() });
    stuck.enable(8, 8);
    stuck.now = Nanos::from_millis(1 << 30);
    stuck.step();
    assert_eq!(stuck.csts(), Csts(0));
    stuck.controller.set_faults(FaultPlan::default());
    assert_eq!(stuck.csts().rdy(), 1, "without the fault it goes on");

    let sticky = RegisterFaults { rdy_never_clears: true, ..Default::default() };
    let mut sticky = with_registers(sticky);
    sticky.enable(8, 8);
    sticky.disable();
    sticky.now = Nanos::from_millis(1 << 30);
    assert_eq!(sticky.csts().rdy(), 1);
}

#[test]
fn a_missing_queue_is_fatal_and_a_reset_helps() {
    for part in ["sq", "cq"] {
        let mut host = Host::plain();
        host.post(1, nvm(NvmOpcode::WRITE_ZEROES, 0, 1));
        host.ring_sq(1);
        let gone = host.alloc(PAGE);
        let queue = host.queue(1);
        // Frees the queue's memory under the controller.
        if part == "sq" {
            queue.sq = gone
        } else {
            queue.cq = gone
        }
        host.step();
        assert_eq!((host.csts().cfs(), host.csts().rdy()), (1, 1), "{part}");
        assert!(!host.step().listening);
        assert!(host.controller.counters().refused_dma > 0);
        host.disable();
        host.enable(8, 8);
        assert_eq!((host.csts().cfs(), host.csts().rdy()), (0, 1), "{part}");
    }
}

#[test]
fn power_loss_and_removal() {
    let mut host = Host::plain();
    host.controller.power_loss(host.now);
    assert_eq!(host.csts(), Csts(0));
    assert_eq!(host.controller.read32(reg::AQA, host.now), 0);
    assert_eq!(host.controller.read32(reg::CC, host.now), 0);
    host.enable(8, 8);
    host.create_pair(1, 8, 8);
    host.controller.unplug();
    assert!(host.csts().is_gone());
    host.send(1, nvm(NvmOpcode::WRITE_ZEROES, 0, 1));
    assert!(host.reap(1).is_none());
    host.set(reg::CC, 0);
    host.controller.power_loss(host.now);
    assert_eq!(host.controller.read32(reg::CAP, host.now), u32::MAX, "and it stays away");
    assert_eq!(host.controller.next_event(), None);
}
