//! Commands that fail for the moment are sent again, as the NVMe specification permits, and blocks
//! are forgotten only for errors of their medium.

use crate::stack;

use gio_uring::IoStatus;
use nvme_driver::{Clock, ControllerEvent, Nanos};
use nvme_emu::{FaultAction, FaultPlan, FaultRule, IdentifyPatch, LbaRange, RegisterFaults};
use objstore::{Layer, Order, StoreError};
use stack::{Plan, READ, READ_ERROR, Stack, WRITE, blocks, keys, on};

const NOT_READY: u16 = 0x82;
const INTERRUPTED: u16 = 0x21;
const ABORTED: u16 = 0x07;
const OUT_OF_RANGE: u16 = 0x80;
const MEDIA: u16 = 0x281;

fn status(code: u16) -> FaultAction {
    FaultAction::Status { code, dnr: false }
}

/// One command for each object.
fn single() -> Plan {
    let mut plan = Plan::default();
    plan.options.run_bytes = 4096;
    plan
}

/// Same on drives without a volatile cache. With one, what was stored before a recovery is not
/// committed, as it may be forgotten.
fn durable() -> Plan {
    Plan { drive: |config| config.vwc = false, ..single() }
}

/// Injects a rule into the first device alone.
fn first(stack: &Stack, rule: FaultRule) {
    stack.emus[0].set_faults(FaultPlan { rules: vec![rule], ..FaultPlan::default() });
}

fn commands(stack: &Stack) -> u64 {
    let counters = stack.emus.iter().map(|emu| emu.counters());
    counters.map(|counters| counters.commands - counters.admin_commands).sum()
}

fn lost(stack: &Stack) -> u64 {
    stack.store.stats().unwrap().lookups.files_lost
}

#[test]
fn what_failed_is_sent_again_and_nothing_else() {
    for code in [NOT_READY, INTERRUPTED, ABORTED, MEDIA] {
        let mut stack = Stack::new(&single());
        let keys = keys(0..8);
        stack.put(&keys, 0);
        first(&stack, on(READ, status(code)).limit(3));
        let prefix = stack.store.lookup(&keys).unwrap();
        let load = stack.store.retrieve(&prefix, &blocks(20, 8)).unwrap();
        let before = commands(&stack);
        let ticket = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
        assert_eq!(stack.store.wait(ticket).unwrap().objects, 16, "8 blocks of 2 segments");
        // All objects of a block whose command failed.
        let sent = commands(&stack) - before;
        assert!((16 + 3..=16 + 6).contains(&sent), "{sent} of {code:#x}");
        drop((load, prefix));
        assert_eq!(stack.get(&keys, 20), 8, "{code:#x}");
        assert_eq!((lost(&stack), stack.store.stats().unwrap().plane.recoveries), (0, 0));
    }
}

#[test]
fn stores_too_with_the_right_checksums() {
    for then in [status(NOT_READY), status(ABORTED), FaultAction::Drop, FaultAction::WrongSqhd] {
        let mut stack = Stack::new(&durable());
        let keys = keys(0..8);
        first(&stack, on(WRITE, then).limit(3));
        assert_eq!(stack.put(&keys, 0), 8, "{then:?}");
        stack.faults(None);
        assert_eq!(stack.get(&keys, 20), 8, "{then:?}");
        assert_eq!((lost(&stack), stack.refused_dma()), (0, 0), "{then:?}");
    }
}

/// Checksums are computed when a command is made. The first write of a layer holds all slots of the
/// queue until the recovery, so most commands of the layer were never made.
#[test]
fn stores_that_a_recovery_overtook_have_checksums() {
    let mut plan = durable();
    (plan.options.queues, plan.options.depth) = (1, 4);
    let mut stack = Stack::new(&plan);
    let keys = keys(0..16);
    first(&stack, on(WRITE, FaultAction::Drop).limit(4));
    assert_eq!(stack.put(&keys, 0), 16);
    assert!(stack.store.stats().unwrap().plane.recoveries > 0);
    stack.faults(None);
    assert_eq!((stack.get(&keys, 20), lost(&stack)), (16, 0));
}

/// Each attempt is one for the entries that are left.
#[test]
fn a_drive_that_fails_one_command_in_five_is_slow_and_nothing_worse() {
    let mut stack = Stack::new(&single());
    let keys = keys(0..16);
    let mut rule = on(WRITE, status(NOT_READY));
    rule.when.probability = Some(0.2);
    rule.when.opcode = None;
    stack.put(&keys[..8], 0);
    stack.faults(Some(rule));
    let save = stack.begin(&keys[8..], 8);
    stack.write_all(&save).unwrap();
    stack.faults(None);
    stack.store.commit(save).unwrap();
    let mut rule = on(READ, status(INTERRUPTED));
    rule.when.probability = Some(0.2);
    stack.faults(Some(rule));
    assert_eq!(stack.get(&keys, 20), 16);
}

#[test]
fn attempts_have_an_end_and_nothing_is_forgotten() {
    // Status, Do Not Retry, and how often the command of a block is sent.
    for (code, dnr, sent) in [
        (NOT_READY, false, 5),
        (NOT_READY, true, 1),
        (INTERRUPTED, true, 1),
        (ABORTED, true, 1),
        (ABORTED, false, 5),
    ] {
        let mut plan = single();
        plan.shape.segments = 1;
        let mut stack = Stack::new(&plan);
        let keys = keys(0..1);
        stack.put(&keys, 0);
        let prefix = stack.store.lookup(&keys).unwrap();
        let load = stack.store.retrieve(&prefix, &blocks(20, 1)).unwrap();
        stack.faults(Some(on(READ, FaultAction::Status { code, dnr })));
        let before = commands(&stack);
        let ticket = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
        let error = stack.store.wait(ticket).unwrap_err();
        let StoreError::Transfer { failure } = error else { panic!("{error}") };
        assert!(matches!(failure.status, IoStatus::Nvme(status) if status.code().0 == code));
        assert_eq!(commands(&stack) - before, sent, "{code:#x} {dnr}");
        drop((load, prefix));
        stack.faults(None);
        assert_eq!((stack.get(&keys, 20), lost(&stack)), (1, 0), "{code:#x} {dnr}");
    }
}

#[test]
fn a_drive_that_answers_nothing_costs_no_block() {
    for then in [FaultAction::Drop, FaultAction::WrongCid, FaultAction::FatalStatus] {
        let mut stack = Stack::new(&Plan::default());
        let keys = keys(0..8);
        stack.put(&keys, 0);
        first(&stack, on(READ, then));
        let prefix = stack.store.lookup(&keys).unwrap();
        let error = stack.read(&prefix, 20).unwrap_err();
        assert!(matches!(error, StoreError::Transfer { .. }), "{then:?}: {error}");
        drop(prefix);
        stack.faults(None);
        assert_eq!((stack.get(&keys, 20), lost(&stack)), (8, 0), "{then:?}");
    }
}

#[test]
fn blocks_are_forgotten_whose_medium_is_bad() {
    let bad = FaultAction::Status { code: OUT_OF_RANGE, dnr: true };
    for then in [READ_ERROR, status(MEDIA), bad] {
        let mut stack = Stack::new(&single());
        let keys = keys(0..8);
        stack.put(&keys, 0);
        let place = {
            let prefix = stack.store.lookup(&keys).unwrap();
            stack.store.geometry().object(prefix.files()[5], objstore::Row(0))
        };
        let mut rule = on(READ, then);
        rule.when.lbas = Some(LbaRange { first: stack.data_lba() + place.slot.0, count: 1 });
        let emu = &stack.emus[place.device.0 as usize];
        emu.set_faults(FaultPlan { rules: vec![rule], ..FaultPlan::default() });
        let prefix = stack.store.lookup(&keys).unwrap();
        stack.read(&prefix, 20).unwrap_err();
        drop(prefix);
        assert_eq!((stack.get(&keys, 20), lost(&stack)), (5, 1), "{then:?}");
    }
}

#[test]
fn a_block_that_differs_is_read_again_and_forgotten_the_second_time() {
    for (limit, found) in [(1, 8), (2, 7)] {
        let mut stack = Stack::new(&single());
        let keys = keys(0..8);
        stack.put(&keys, 0);
        let last = {
            let prefix = stack.store.lookup(&keys).unwrap();
            stack.store.geometry().object(prefix.files()[7], objstore::Row(0))
        };
        let mut rule = on(READ, FaultAction::CorruptRead).limit(limit);
        rule.when.lbas = Some(LbaRange { first: stack.data_lba() + last.slot.0, count: 1 });
        let emu = &stack.emus[last.device.0 as usize];
        emu.set_faults(FaultPlan { rules: vec![rule], ..FaultPlan::default() });
        let prefix = stack.store.lookup(&keys).unwrap();
        let read = stack.read(&prefix, 20);
        assert_eq!(read.is_ok(), limit == 1, "{read:?}");
        drop(prefix);
        assert_eq!(stack.get(&keys, 20), found);
        assert_eq!(lost(&stack), 8 - found as u64);
    }
}

/// Command Retry Delay Times 1 to 3: 0.1 s, 2 s, 0.3 s.
#[test]
fn the_controller_says_how_long_to_wait() {
    let drive = |config: &mut nvme_emu::EmuConfig| {
        let bytes = [1u16, 20, 3].iter().flat_map(|time| time.to_le_bytes()).collect();
        config.faults.identify.patches = vec![IdentifyPatch { cns: 1, offset: 128, bytes }];
    };
    let mut stack = Stack::new(&Plan { drive, ..single() });
    let keys = keys(0..4);
    stack.put(&keys, 0);
    first(&stack, on(READ, status(INTERRUPTED | 2 << 11)).limit(1));
    let before = stack.clock.now();
    assert_eq!(stack.get(&keys, 20), 4);
    let waited = stack.clock.now() - before;
    assert!(waited >= Nanos::from_millis(2_000), "{waited:?}");
}

#[test]
fn a_request_that_is_dropped_before_its_next_attempt_ends() {
    let mut stack = Stack::new(&single());
    let keys = keys(0..4);
    stack.put(&keys, 0);
    stack.faults(Some(on(READ, status(NOT_READY))));
    let prefix = stack.store.lookup(&keys).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(20, 4)).unwrap();
    let ticket = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
    for _ in 0..10 {
        stack.clock.run_for(Nanos(200_000));
        assert_eq!(stack.store.poll(&ticket).unwrap(), None, "its attempt is in 10 ms");
    }
    drop((load, prefix));
    stack.store.plane().drain().unwrap();
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files.active, stats.plane.layers_in_flight), (0, 0));
    stack.faults(None);
    assert_eq!(stack.get(&keys, 20), 4);
}

/// A PCIe error with a command in flight: the link is down for 200 ms, and the function comes back
/// without its BARs. The layers in flight are moved after that.
#[test]
fn a_link_that_the_platform_resets_costs_neither_blocks_nor_requests() {
    for (opcode, idle) in [(READ, 0), (READ, 500), (WRITE, 0), (WRITE, 500)] {
        let mut stack = Stack::new(&durable());
        let (a, b) = (keys(0..8), keys(10..18));
        stack.put(&a, 0);
        let then = FaultAction::LinkLoss { ns: 200_000_000 };
        first(&stack, on(opcode, then).limit(1));
        let prefix = stack.store.lookup(&a).unwrap();
        let load = stack.store.retrieve(&prefix, &blocks(20, 8)).unwrap();
        let save = stack.begin(&b, 10);
        let read = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
        let write = stack.store.start(&save, Layer(0), Order::Unordered).unwrap();
        // The plane looks while the link is down, or when it is back.
        stack.clock.run_for(Nanos::from_millis(idle));
        stack.store.wait(read).unwrap();
        stack.store.wait(write).unwrap();
        stack.write_all(&save).unwrap();
        stack.store.commit(save).unwrap();
        drop((load, prefix));
        assert_eq!((stack.get(&a, 20), stack.get(&b, 30)), (8, 8), "{opcode}, {idle} ms");
        let stats = stack.store.stats().unwrap();
        assert_eq!(stats.lookups.files_lost, 0);
        assert!(stats.plane.recoveries >= 1);
        assert_eq!(stack.refused_dma(), 0);
    }
}

/// CSTS.PP is set while firmware is activated (MTFA).
#[test]
fn commands_of_a_paused_controller_are_not_aborted() {
    let mut plan = single();
    plan.options.command_timeout = Nanos::from_millis(3_000);
    let mut stack = Stack::new(&plan);
    let keys = keys(0..4);
    stack.put(&keys, 0);
    let registers = RegisterFaults { paused: true, ..RegisterFaults::default() };
    stack.emus[0].set_faults(FaultPlan { registers, ..FaultPlan::default() });
    let events = stack.store.plane().poll_events().unwrap();
    assert!(events.iter().any(|event| event.event == ControllerEvent::Paused), "{events:?}");
    let prefix = stack.store.lookup(&keys).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(20, 4)).unwrap();
    let ticket = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
    let admin = || stack.emus[0].counters().admin_commands;
    let before = admin();
    for _ in 0..280 {
        stack.clock.run_for(Nanos::from_millis(10));
        assert_eq!(stack.store.poll(&ticket).unwrap(), None);
    }
    stack.faults(None);
    stack.store.wait(ticket).unwrap();
    assert_eq!(admin(), before, "nothing was aborted");
    drop((load, prefix));
    assert_eq!((stack.get(&keys, 20), lost(&stack)), (4, 0));
}

#[test]
fn a_write_protected_namespace_is_read_and_not_written() {
    let mut stack = Stack::new(&Plan::default());
    let protected = IdentifyPatch { cns: 0, offset: 99, bytes: vec![1] };
    stack.put(&keys(0..4), 0);
    let mut faults = FaultPlan::default();
    faults.identify.patches = vec![protected];
    stack.emus[1].set_faults(faults);
    stack.emus[1].report_pcie_error();
    stack.store.plane().poll_events().unwrap();
    let error = stack.store.allocate(&keys(10..12), &blocks(0, 2)).unwrap_err();
    assert!(matches!(error, StoreError::ReadOnly { .. }), "{error}");
    assert_eq!(stack.get(&keys(0..4), 20), 4);
}
