//! Device failures: wrong data is never served, nothing accesses a caller's blocks after a wait has
//! returned, and afterwards the store works again or returns the cause.

use crate::stack;

use std::sync::Arc;

use gio_kernels::InlineExecutor;
use gio_uring::{ExecutorError, IoExecutor, IoStatus, Progress, SharedMemory, Wait, abi::Args};
use nvme_driver::{GrantEpoch, Nanos, Place, Quiesced};
use nvme_emu::{FaultAction, FaultRule, FaultWhen, LbaRange, SimClock};
use objstore::{
    BlockKey, Direction, Failure, Layer, LoadRequest, Order, Prefix, Row, StoreError, Ticket,
};
use stack::{Plan, READ, READ_ERROR, Stack, WRITE, WRITE_FAULT, blocks, keys, on};

/// No merging: one command for each object.
fn single() -> Plan {
    let mut plan = Plan::default();
    plan.options.run_bytes = 4096;
    plan
}

fn failure(error: StoreError) -> Failure {
    match error {
        StoreError::Transfer { failure } => failure,
        other => panic!("not a failed transfer: {other}"),
    }
}

/// Status code type and status code.
fn nvme(status: IoStatus) -> (u8, u8) {
    match status {
        IoStatus::Nvme(status) => (status.sct(), status.sc()),
        other => panic!("not from the controller: {other}"),
    }
}

#[test]
fn a_read_error_names_layer_block_and_file_and_only_that_file_is_lost() {
    let mut stack = Stack::new(&single());
    let keys = keys(0..10);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let (position, row) = (6, Row(3));
    let file = prefix.files()[position];
    let place = stack.store.geometry().object(file, row);
    let first = stack.data_lba() + place.slot.0;
    let lbas = Some(LbaRange { first, count: 1 });
    let when = FaultWhen { lbas, admin: Some(false), ..FaultWhen::default() };
    let device = &stack.emus[place.device.0 as usize];
    device.set_faults(nvme_emu::FaultPlan {
        rules: vec![FaultRule::new(when, READ_ERROR)],
        ..Default::default()
    });
    let error = stack.read(&prefix, 20).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("layer 1") && text.contains("block 6"), "{text}");
    assert!(text.contains("Unrecovered Read Error"), "{text}");
    let failed = failure(error);
    let status = nvme(failed.status);
    let expected = Failure {
        direction: Direction::Read,
        layer: Layer(1),
        position: 6,
        file,
        status: failed.status,
        errors: 1,
    };
    assert_eq!((failed, status), (expected, (2, 0x81)));
    drop(prefix);
    assert_eq!(stack.get(&keys, 20), 6);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.lookups.files_lost, stats.files.stored, stats.plane.recoveries), (1, 9, 0));
    assert_eq!(stats.files_free(), stats.files.files - 9);
    // After storing it again, it is found (perhaps in another file).
    stack.faults(None);
    assert_eq!(stack.put(&keys, 0), 10);
    assert_eq!(stack.get(&keys, 20), 10);
}

/// The self-test's file is not one of the catalog's.
#[test]
fn a_self_test_that_cannot_read_says_so() {
    let stack = Stack::new(&Plan::default());
    stack.faults(Some(on(READ, READ_ERROR)));
    let failed = failure(stack.store.plane().self_test(None).unwrap_err());
    assert_eq!(nvme(failed.status), (2, 0x81));
    stack.faults(None);
    stack.store.plane().self_test(None).unwrap();
    assert_eq!(stack.store.stats().unwrap().lookups.files_lost, 0);
}

#[test]
fn after_a_failed_layer_the_request_goes_no_further() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..4);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(20, 4)).unwrap();
    stack.faults(Some(on(READ, READ_ERROR)));
    let ticket = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
    failure(stack.store.wait(ticket).unwrap_err());
    stack.faults(None);
    let error = stack.store.start(&load, Layer(1), Order::Unordered).unwrap_err();
    assert!(matches!(error, StoreError::RequestFailed { .. }), "{error}");
    assert_eq!(stack.store.lookup(&keys).unwrap().len(), 0);
}

#[test]
fn a_write_error_makes_the_commit_fail_and_frees_the_files() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..8);
    stack.faults(Some(on(WRITE, WRITE_FAULT).limit(1)));
    let save = stack.begin(&keys, 0);
    for layer in (0..stack.shape.layers).map(Layer) {
        // No ticket is waited for: the commit finds the failure.
        let _ = stack.store.start(&save, layer, Order::Unordered).unwrap();
    }
    let failed = failure(stack.store.commit(save).unwrap_err());
    assert_eq!(failed.direction, Direction::Write);
    assert_eq!(nvme(failed.status), (2, 0x80));
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files_free(), stats.files.stored), (stats.files.files, 0));
    assert_eq!(stack.get(&keys, 20), 0);
    assert_eq!(stack.put(&keys, 0), 8);
    assert_eq!(stack.get(&keys, 20), 8);
}

/// Faults of the device that end in a recovery of any kind.
const BROKEN: [FaultAction; 6] = [
    FaultAction::Drop,
    FaultAction::WrongCid,
    FaultAction::WrongPhase,
    FaultAction::WrongSqhd,
    FaultAction::WrongSqid,
    FaultAction::FatalStatus,
];

#[test]
fn after_a_read_that_breaks_the_queue_the_store_recovers_and_works() {
    for action in BROKEN {
        let mut stack = Stack::new(&Plan::default());
        let (a, b) = (keys(0..6), keys(10..16));
        stack.put(&a, 0);
        stack.put(&b, 10);
        stack.emus[0].set_faults(nvme_emu::FaultPlan {
            rules: vec![on(READ, action).limit(1)],
            ..Default::default()
        });
        let prefix = stack.store.lookup(&a).unwrap();
        stack.read(&prefix, 20).unwrap();
        drop(prefix);
        assert!(stack.store.stats().unwrap().plane.recoveries >= 1, "{action:?}");
        assert_eq!(stack.get(&a, 20), 6, "{action:?}");
        assert_eq!(stack.get(&b, 30), 6, "{action:?}");
        assert_eq!(stack.put(&a, 0), 6, "{action:?}");
        assert_eq!(stack.get(&a, 20), 6, "{action:?}");
        let stats = stack.store.stats().unwrap();
        assert_eq!((stats.files.stored, stats.files.active), (12, 0), "{action:?}");
        assert_eq!(stack.refused_dma(), 0, "{action:?}");
    }
}

#[test]
fn after_a_write_that_breaks_the_queue_nothing_is_visible_and_the_store_works() {
    for action in BROKEN {
        let mut stack = Stack::new(&Plan::default());
        let (a, b) = (keys(0..6), keys(10..16));
        stack.put(&b, 10);
        stack.faults(Some(on(WRITE, action)));
        let save = stack.begin(&a, 0);
        let failed = failure(stack.write_all(&save).unwrap_err());
        assert_eq!(failed.layer, Layer(0), "{action:?}: {failed}");
        failure(stack.store.commit(save).unwrap_err());
        stack.faults(None);
        assert_eq!(stack.get(&a, 20), 0, "{action:?}");
        assert_eq!(stack.get(&b, 30), 6, "{action:?}");
        assert_eq!(stack.put(&a, 0), 6, "{action:?}");
        assert_eq!(stack.get(&a, 20), 6, "{action:?}");
        let stats = stack.store.stats().unwrap();
        assert_eq!((stats.files.stored, stats.files.writing), (12, 0), "{action:?}");
    }
}

#[test]
fn everything_in_flight_is_moved_after_a_recovery() {
    let mut stack = Stack::new(&Plan::default());
    let (a, b, c) = (keys(0..4), keys(10..14), keys(20..24));
    stack.put(&a, 0);
    stack.put(&b, 10);
    stack.faults(Some(on(READ, FaultAction::Drop).limit(1)));
    let prefixes = [&a, &b].map(|keys| stack.store.lookup(keys).unwrap());
    let first = stack.store.retrieve(&prefixes[0], &blocks(20, 4)).unwrap();
    let second = stack.store.retrieve(&prefixes[1], &blocks(30, 4)).unwrap();
    let save = stack.begin(&c, 40);
    let broken = stack.store.start(&first, Layer(0), Order::Unordered).unwrap();
    let write = stack.store.start(&save, Layer(0), Order::Unordered).unwrap();
    let other = stack.store.start(&second, Layer(0), Order::Unordered).unwrap();
    for ticket in [broken, write, other] {
        stack.store.wait(ticket).unwrap();
    }
    assert_eq!(stack.store.stats().unwrap().plane.recoveries, 1);
    drop((first, second, prefixes));
    drop(save);
    assert_eq!(stack.put(&a, 0), 4);
    assert_eq!(stack.put(&b, 0), 4);
    assert_eq!(stack.put(&c, 0), 4);
    for keys in [&a, &b, &c] {
        assert_eq!(stack.get(keys, 20), 4);
    }
}

/// Returns the keys whose object of layer 0 is on this device.
fn on_device(stack: &Stack, keys: &[BlockKey], device: u32) -> Vec<BlockKey> {
    let is_there = |key: &BlockKey| {
        let prefix = stack.store.lookup(&[*key]).unwrap();
        stack.store.geometry().object(prefix.files()[0], Row(0)).device.0 == device
    };
    keys.iter().copied().filter(is_there).collect()
}

/// Reads layer 0 into blocks from `first` on.
fn read_layer(stack: &Stack, keys: &[BlockKey], first: u32) -> (Prefix, LoadRequest, Ticket) {
    let prefix = stack.store.lookup(keys).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(first, keys.len())).unwrap();
    let ticket = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
    (prefix, load, ticket)
}

/// Advances the time in small steps until the layer is done.
fn done_in_steps(stack: &Stack, ticket: &Ticket) {
    for _ in 0..1000 {
        stack.clock.run_for(Nanos::from_millis(2));
        if stack.store.poll(ticket).unwrap().is_some() {
            return;
        }
    }
    panic!("it neither ends nor fails");
}

/// Each object of a layer is one command. A single block of a layer is on one device, and moved by
/// its last queue; several blocks are moved by all queues.
fn one_segment() -> Plan {
    let mut plan = single();
    plan.shape.segments = 1;
    plan
}

/// Injects a fault into the first command of this queue of the first device. The plane's queues are
/// 2 and 3; 1 is the driver's.
fn corrupt(stack: &Stack, qid: u16, then: FaultAction) {
    let when = FaultWhen { qid: Some(qid), admin: Some(false), ..FaultWhen::default() };
    let rules = vec![FaultRule::new(when, then).limit(1)];
    stack.emus[0].set_faults(nvme_emu::FaultPlan { rules, ..Default::default() });
}

fn resets(stack: &Stack) -> u64 {
    stack.emus.iter().map(|emu| emu.counters().resets).sum()
}

#[test]
fn a_lost_command_costs_its_queue_and_no_other_layer() {
    let mut stack = Stack::new(&one_segment());
    let all = keys(0..8);
    stack.put(&all, 0);
    let before = resets(&stack);
    let [here, there] = [0, 1].map(|device| on_device(&stack, &all, device)[0]);
    corrupt(&stack, 2, FaultAction::Drop);
    let (_prefix, _transfer, broken) = read_layer(&stack, &all, 20);
    // The same device, another queue; and another device. They complete while the command hangs.
    for key in [here, there] {
        let (_prefix, _transfer, ticket) = read_layer(&stack, &[key], 30);
        stack.store.wait(ticket).unwrap();
        assert_eq!(stack.store.stats().unwrap().plane.recoveries, 0, "nothing was given up");
    }
    stack.store.wait(broken).unwrap();
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.plane.recoveries, stats.lookups.files_lost), (1, 0));
    assert_eq!(resets(&stack), before, "no controller was reset");
    assert_eq!(stack.get(&all, 40), 8);
}

/// This includes commands that are yet to be sent, not only those in flight.
#[test]
fn layers_of_other_queues_end_well_when_a_queue_is_given_up() {
    let mut plan = one_segment();
    // One command at a time.
    plan.options.depth = 2;
    let mut stack = Stack::new(&plan);
    let all = keys(0..8);
    stack.put(&all, 0);
    let there = on_device(&stack, &all, 1);
    assert_eq!(there.len(), 4, "two for each queue");
    corrupt(&stack, 2, FaultAction::Drop);
    let (_prefix, _transfer, broken) = read_layer(&stack, &all, 20);
    assert_eq!(stack.store.poll(&broken).unwrap(), None);
    stack.clock.run_for(Nanos::from_millis(90));
    let slow = on(READ, FaultAction::Delay { ns: 30_000_000 });
    stack.emus[1].set_faults(nvme_emu::FaultPlan { rules: vec![slow], ..Default::default() });
    let (_other, _blocks, ticket) = read_layer(&stack, &there, 40);
    done_in_steps(&stack, &broken);
    let done = stack.store.poll(&ticket).unwrap();
    assert_eq!(done.map(|done| done.objects), Some(4), "it was waited for");
    assert_eq!(stack.store.stats().unwrap().plane.recoveries, 1);
}

#[test]
fn a_late_command_is_aborted_and_sent_again() {
    let mut stack = Stack::new(&one_segment());
    let all = keys(0..8);
    stack.put(&all, 0);
    let before = resets(&stack);
    corrupt(&stack, 2, FaultAction::Delay { ns: 60_000_000_000 });
    let (_prefix, _transfer, ticket) = read_layer(&stack, &all, 20);
    done_in_steps(&stack, &ticket);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.plane.recoveries, stats.lookups.files_lost), (0, 0));
    assert_eq!(resets(&stack), before);
    assert_eq!(stack.get(&all, 40), 8);
}

#[test]
fn what_was_cancelled_before_it_reached_a_device_loses_nothing() {
    let mut stack = Stack::new(&Plan::default());
    let (a, b) = (keys(0..4), keys(10..14));
    stack.put(&a, 0);
    stack.put(&b, 10);
    let prefix = stack.store.lookup(&b).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(30, 4)).unwrap();
    // It waits for an event that is never signalled.
    let wait = Wait { event: stack.store.plane().event().unwrap(), value: 1 };
    let ticket = stack.store.start(&load, Layer(0), &wait).unwrap();
    stack.faults(Some(on(READ, FaultAction::Drop).limit(1)));
    let broken = stack.store.lookup(&a).unwrap();
    failure(stack.read(&broken, 20).unwrap_err());
    stack.faults(None);
    assert_eq!(failure(stack.store.wait(ticket).unwrap_err()).status, IoStatus::Cancelled);
    drop((prefix, load, broken));
    assert_eq!(stack.get(&b, 30), 4);
}

#[test]
fn a_late_read_does_not_touch_blocks_the_caller_has_back() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..4);
    stack.put(&keys, 0);
    // Longer than the command timeout of 100 ms.
    let late = FaultAction::Delay { ns: 400_000_000 };
    stack.faults(Some(on(READ, late)));
    let prefix = stack.store.lookup(&keys).unwrap();
    let failed = failure(stack.read(&prefix, 20).unwrap_err());
    assert!(matches!(failed.status, IoStatus::Timeout | IoStatus::Fault), "{failed}");
    for (key, block) in keys.iter().zip(blocks(20, 4)) {
        stack.fill(block, *key);
    }
    let other = stack::keys(50..54);
    for (key, block) in other.iter().zip(blocks(20, 4)) {
        stack.fill(block, *key);
    }
    stack.clock.run_for(Nanos::from_millis(2_000));
    for (key, block) in other.iter().zip(blocks(20, 4)) {
        assert!(stack.holds(block, *key), "a command of the past wrote to {block}");
    }
}

#[test]
fn a_late_write_does_not_touch_files_that_were_reused() {
    let mut stack = Stack::new(&Plan::default());
    let (a, b) = (keys(0..4), keys(10..14));
    let late = FaultAction::Delay { ns: 400_000_000 };
    stack.faults(Some(on(WRITE, late)));
    let save = stack.begin(&a, 0);
    failure(stack.write_all(&save).unwrap_err());
    drop(save);
    stack.faults(None);
    // The same files, as they are the first free ones.
    assert_eq!(stack.put(&b, 10), 4);
    stack.clock.run_for(Nanos::from_millis(2_000));
    assert_eq!(stack.get(&b, 20), 4);
}

#[test]
fn handles_dropped_while_a_command_hangs() {
    let mut stack = Stack::new(&Plan::default());
    let (a, b) = (keys(0..4), keys(10..14));
    stack.put(&a, 0);
    stack.emus[0].set_faults(nvme_emu::FaultPlan {
        rules: vec![on(READ, FaultAction::Drop).limit(1), on(WRITE, FaultAction::Drop).limit(1)],
        ..Default::default()
    });
    let prefix = stack.store.lookup(&a).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(20, 4)).unwrap();
    let _ = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
    let save = stack.begin(&b, 10);
    let _ = stack.store.start(&save, Layer(0), Order::Unordered).unwrap();
    drop((prefix, load, save));
    stack.store.plane().drain().unwrap();
    let stats = stack.store.stats().unwrap();
    assert!(stats.plane.recoveries >= 1);
    assert_eq!((stats.files.active, stats.files.writing), (0, 0));
    assert_eq!(stats.files_free() + stats.files.stored, stats.files.files);
    assert_eq!(stack.put(&a, 0), 4);
    assert_eq!(stack.put(&b, 10), 4);
    assert_eq!(stack.get(&a, 20), 4);
    assert_eq!(stack.get(&b, 30), 4);
}

#[test]
fn a_device_that_is_gone_fails_the_store_for_good() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..4);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    stack.emus[1].unplug();
    let cause = match stack.read(&prefix, 20).unwrap_err() {
        StoreError::Failed { cause } => cause,
        other => panic!("{other}"),
    };
    assert!(cause.contains("emu1"), "{cause}");
    let error = stack.store.lookup(&keys).unwrap_err();
    assert!(matches!(&error, StoreError::Failed { cause: same } if *same == cause), "{error}");
    assert!(stack.store.stats().is_err());
    assert!(stack.store.allocate(&keys, &blocks(0, 4)).is_err());
    assert!(stack.store.retrieve(&prefix, &blocks(20, 4)).is_err());
    let Stack { store, .. } = stack;
    assert!(store.close().is_err());
}

#[test]
fn committed_data_survives_a_drive_that_loses_its_cache() {
    let mut plan = Plan { volatile_cache: true, ..Plan::default() };
    let survives = |plan: &Plan| {
        let mut stack = Stack::new(plan);
        let keys = keys(0..6);
        stack.put(&keys, 0);
        stack.emus.iter().for_each(|emu| emu.power_loss());
        // The first read finds the dead queues and triggers a recovery.
        let prefix = stack.store.lookup(&keys[..1]).unwrap();
        let _ = stack.read(&prefix, 20);
        drop(prefix);
        let mut held = 0;
        for key in &keys[1..] {
            let prefix = stack.store.lookup(std::slice::from_ref(key)).unwrap();
            if prefix.is_empty() {
                continue;
            }
            match stack.read(&prefix, 20) {
                Ok(()) => {
                    assert!(stack.holds(blocks(20, 1)[0], *key), "wrong bytes were served");
                    held += 1;
                }
                Err(error) => {
                    assert_eq!(failure(error).status, IoStatus::Checksum);
                    assert!(stack.store.lookup(std::slice::from_ref(key)).unwrap().is_empty());
                }
            }
        }
        held
    };
    assert_eq!(survives(&plan), 5);
    // Without the option, bytes are lost, as their checksums show.
    plan.options.durability = objstore::Durability::Volatile;
    assert!(survives(&plan) < 5);
}

/// An executor that cannot be started a second time.
#[derive(Debug)]
struct Once {
    inner: InlineExecutor,
    started: bool,
}

impl IoExecutor for Once {
    fn name(&self) -> &'static str {
        "once"
    }
    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        self.inner.alloc(len)
    }
    fn address(&self, place: &Place) -> Option<u64> {
        self.inner.address(place)
    }
    fn start(&mut self, args: Args, grants: &[GrantEpoch]) -> Result<(), ExecutorError> {
        if std::mem::replace(&mut self.started, true) {
            let cause = "it starts only once".to_owned();
            return Err(ExecutorError::Failed { executor: "once", cause });
        }
        self.inner.start(args, grants)
    }
    fn submitted(&mut self, tail: u32, sms: u32) -> Result<(), ExecutorError> {
        self.inner.submitted(tail, sms)
    }
    fn poll(&mut self) -> Result<Progress, ExecutorError> {
        self.inner.poll()
    }
    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        self.inner.stop(deadline)
    }
}

/// The kernel does not start, or a queue cannot be granted: no queue stays granted, so the driver
/// frees all its memory.
#[test]
fn a_store_that_cannot_be_opened_leaves_nothing_behind() {
    let mut plan = Plan::default();
    plan.options.queues = 3;
    let clock = SimClock::new(plan.seed);
    let (ticks, drives) = (clock.clone(), stack::drives(&plan, &clock));
    let domain = drives.domain.clone();
    let opened = Stack::over(&plan, clock, drives, move |_| {
        Box::new(Once { inner: InlineExecutor::new(ticks.clone()), started: true })
    });
    let error = opened.map(drop).unwrap_err();
    assert!(error.to_string().contains("starts only once"), "{error}");
    assert_eq!(domain.mapped(), [], "mappings are left");
}

#[test]
fn an_executor_that_cannot_go_on_is_replaced() {
    let plan = Plan::default();
    let clock = SimClock::new(plan.seed);
    let ticks: Arc<SimClock> = clock.clone();
    let mut stack = Stack::with_executor(&plan, clock, move |_| {
        Box::new(Once { inner: InlineExecutor::new(ticks.clone()), started: false })
    })
    .unwrap();
    let (a, b) = (keys(0..4), keys(10..14));
    stack.put(&a, 0);
    stack.put(&b, 10);
    // A transfer from before, whose map was in the old executor's memory.
    let prefix = stack.store.lookup(&b).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(30, 4)).unwrap();
    stack.faults(Some(on(READ, FaultAction::Drop).limit(1)));
    let broken = stack.store.lookup(&a).unwrap();
    failure(stack.read(&broken, 20).unwrap_err());
    stack.faults(None);
    let error = stack.store.start(&load, Layer(0), Order::Unordered).unwrap_err();
    assert!(matches!(error, StoreError::RequestFailed { .. }), "{error}");
    drop((prefix, load, broken));
    assert_eq!(stack.get(&b, 20), 4);
    assert_eq!(stack.put(&a, 0), 4);
    assert_eq!(stack.get(&a, 30), 4);
}
