//! Events that devices report reach the engine without any I/O.

use crate::{shelf, stack};

use nvme_driver::{Clock, ControllerEvent, Nanos, wait_until};
use nvme_emu::{FaultAction, FaultPlan, FaultRule, FaultWhen, IdentifyOverrides};
use nvme_spec::{admin::AdminOpcode, ids::Nsid, log::CriticalWarning};
use objstore::{DeviceIndex, Layer, Order, StoreError, StoreEvent, StoreOptions};
use shelf::Shelf;
use stack::{Plan, Stack, blocks, keys};

const SECOND_DEVICE: DeviceIndex = DeviceIndex(1);

/// Lets the controllers run for a while.
fn run(stack: &Stack) {
    wait_until(&*stack.clock, stack.clock.now() + Nanos::from_millis(200), || false);
}

fn poll(stack: &mut Stack) -> Vec<StoreEvent> {
    run(stack);
    stack.store.plane().poll_events().unwrap()
}

#[test]
fn an_idle_store_says_that_a_drive_is_gone() {
    let mut stack = Stack::new(&Plan::default());
    assert_eq!(poll(&mut stack), []);
    stack.emus[1].unplug();
    match stack.store.plane().poll_events().unwrap_err() {
        StoreError::Failed { cause } => assert!(cause.contains("emu1"), "{cause}"),
        other => panic!("{other}"),
    }
}

/// Calls that plan work poll, too, not only requests for events; but not each call does.
#[test]
fn a_call_that_plans_work_finds_out_as_well() {
    let stack = Stack::new(&Plan::default());
    drop(stack.store.allocate(&keys(0..1), &blocks(0, 1)).unwrap());
    stack.emus[0].unplug();
    drop(stack.store.allocate(&keys(0..1), &blocks(0, 1)).unwrap());
    run(&stack);
    let error = stack.store.allocate(&keys(0..1), &blocks(0, 1)).unwrap_err();
    assert!(matches!(error, StoreError::Failed { .. }), "{error}");
    // Lookups do no I/O, but return the failure by then.
    let error = stack.store.lookup(&keys(0..1)).unwrap_err();
    assert!(matches!(error, StoreError::Failed { .. }), "{error}");
}

#[test]
fn a_fatal_status_is_recovered_while_the_store_is_idle() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    // The log page of the event is never read.
    let opcode = Some(AdminOpcode::GET_LOG_PAGE.0);
    let when = FaultWhen { opcode, admin: Some(true), ..FaultWhen::default() };
    stack.faults(Some(FaultRule::new(when, FaultAction::FatalStatus).limit(1)));
    stack.emus[0].warn(CriticalWarning::SPARE);
    poll(&mut stack);
    assert_eq!(stack.store.stats().unwrap().plane.recoveries, 1);
    assert_eq!(stack.get(&keys(0..4), 20), 4);
}

#[test]
fn a_device_that_is_wanted_back_is_named_and_works_on() {
    let mut stack = Stack::new(&Plan::default());
    stack.emus[1].request();
    let event = StoreEvent { device: SECOND_DEVICE, event: ControllerEvent::Requested };
    assert_eq!(poll(&mut stack), [event]);
    assert_eq!(poll(&mut stack), [], "once");
    assert_eq!(stack.store.plane().requested_devices().unwrap(), [SECOND_DEVICE]);
    assert_eq!(stack.put(&keys(0..4), 0), 4);
    stack.store.close().unwrap();
}

#[test]
fn a_pcie_error_stops_the_kernel_and_resets_that_drive_alone() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    let resets = || stack.emus.iter().map(|emu| emu.counters().resets).collect::<Vec<_>>();
    let before = resets();
    stack.emus[1].report_pcie_error();
    let events = stack.store.plane().poll_events().unwrap();
    assert_eq!(events, [StoreEvent { device: SECOND_DEVICE, event: ControllerEvent::PcieError }]);
    let after = resets();
    assert_eq!(after[0], before[0]);
    assert!(after[1] > before[1], "its link may have lost what it was told");
    assert_eq!(stack.store.stats().unwrap().plane.recoveries, 1);
    assert_eq!(stack.get(&keys(0..4), 20), 4);
    assert_eq!(stack.put(&keys(10..14), 0), 4);
}

#[test]
fn a_drive_that_is_another_one_after_a_pcie_error_fails_the_store() {
    let stack = Stack::new(&Plan::default());
    let identify = IdentifyOverrides { nsze: Some(16), ..IdentifyOverrides::default() };
    stack.emus[1].set_faults(FaultPlan { identify, ..FaultPlan::default() });
    stack.emus[1].report_pcie_error();
    match stack.store.plane().poll_events().unwrap_err() {
        StoreError::Failed { cause } => assert!(cause.contains("no longer holds"), "{cause}"),
        other => panic!("{other}"),
    }
}

#[test]
fn media_that_became_read_only_is_read_and_not_written() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    stack.emus[1].warn(CriticalWarning::READ_ONLY);
    match &poll(&mut stack)[..] {
        [StoreEvent { device: SECOND_DEVICE, event: ControllerEvent::Health { warnings, .. } }] => {
            assert_eq!(*warnings, CriticalWarning::READ_ONLY);
        }
        other => panic!("{other:?}"),
    }
    let error = stack.store.allocate(&keys(10..12), &blocks(0, 2)).unwrap_err();
    assert!(matches!(error, StoreError::ReadOnly { device: SECOND_DEVICE }), "{error}");
    assert_eq!(stack.get(&keys(0..4), 20), 4);
    stack.emus[1].warn(CriticalWarning::SPARE);
    assert_eq!(poll(&mut stack).len(), 1);
    assert_eq!(stack.put(&keys(10..12), 0), 2);
}

#[test]
fn a_store_that_was_opened_to_be_read_writes_nothing() {
    let (shelf, mut stack) = Shelf::made(1, Plan::default().shape, &StoreOptions::default());
    stack.put(&keys(0..4), 0);
    stack.store.close().unwrap();
    let options =
        StoreOptions { read_only: true, self_test: false, deallocate: false, ..Default::default() };
    let mut stack = shelf.open(&options);
    let error = stack.store.allocate(&keys(10..12), &blocks(0, 2)).unwrap_err();
    assert!(matches!(error, StoreError::OpenedToRead), "{error}");
    stack.store.check_writable().unwrap_err();
    assert_eq!(stack.get(&keys(0..4), 0), 4);
    stack.store.close().unwrap();
    assert_eq!(stack.emus[0].counters().writes, 0);
}

fn resize(stack: &Stack, lbas: u64) {
    let identify = IdentifyOverrides { nsze: Some(lbas), ..IdentifyOverrides::default() };
    stack.emus[1].set_faults(FaultPlan { identify, ..FaultPlan::default() });
    stack.emus[1].namespace_changed(Nsid(1));
}

#[test]
fn a_namespace_that_grew_gets_new_grants_and_keeps_its_blocks() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    resize(&stack, 32_768);
    let events = poll(&mut stack);
    assert!(
        matches!(
            &events[..],
            [StoreEvent { event: ControllerEvent::NamespacesChanged { .. }, .. }]
        ),
        "{events:?}"
    );
    assert_eq!(stack.store.stats().unwrap().plane.recoveries, 1);
    assert_eq!(stack.get(&keys(0..4), 20), 4);
    assert_eq!(stack.put(&keys(10..14), 0), 4);
}

#[test]
fn a_namespace_that_no_longer_holds_the_data_region_fails_the_store() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    let prefix = stack.store.lookup(&keys(0..4)).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(20, 4)).unwrap();
    resize(&stack, 16);
    run(&stack);
    match stack.store.plane().poll_events().unwrap_err() {
        StoreError::Failed { cause } => assert!(cause.contains("no longer holds"), "{cause}"),
        other => panic!("{other}"),
    }
    assert!(stack.store.start(&load, Layer(0), Order::Unordered).is_err());
}
