//! Streams when something fails: everything that waits for a layer continues, the ticket reports
//! the failure, and memory that has been reused is not accessed.

#![allow(unsafe_code, reason = "memory of an executor, watched")]

use crate::{gpu, rig, stack};

use std::sync::{Arc, Mutex, Weak};

use gio_kernels::InlineExecutor;
use gio_uring::{ExecutorError, IoExecutor, IoStatus, Progress, SharedMemory, abi::Args};
use gpu::Defect;
use nvme_driver::{GrantEpoch, Nanos, Place, Quiesced};
use nvme_emu::FaultAction;
use objstore::{Layer, Order, Route, StoreError};
use rig::{Rig, Ticks};
use stack::{Plan, READ, READ_ERROR, WRITE, WRITE_FAULT, blocks, keys, on};

const BOTH: [Route; 2] = [Route::Direct, Route::Staged];

fn plan(seed: u64) -> Plan {
    let mut plan = Plan { seed, ..Plan::default() };
    plan.options.wait_timeout = Nanos::from_millis(2_000);
    plan.options.stop_timeout = Nanos::from_millis(500);
    plan
}

/// Returns true if the ticket failed with its layer or with the whole store.
fn failed(result: Result<objstore::LayerDone, StoreError>) -> bool {
    match result {
        Ok(_) => false,
        Err(StoreError::Transfer { .. } | StoreError::Failed { .. }) => true,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_failed_layer_holds_no_stream_up() {
    for (path, seed) in BOTH.into_iter().flat_map(|path| (1..4).map(move |seed| (path, seed))) {
        for action in [READ_ERROR, FaultAction::Drop, FaultAction::FatalStatus, FaultAction::Gone] {
            let mut rig = Rig::new(&plan(seed), path);
            let keys = keys(0..9);
            rig.put(&keys, 0);
            let load = rig.load(&keys, 40);
            let [one, two, three] = [1, 2, 3].map(|n| rig.gpu.stream(n));
            rig.faults(Some(on(READ, action)));
            let first = rig.store.start(&load, Layer(0), one).unwrap();
            rig.store.join(&first, two).unwrap();
            // The failure may have been detected by now.
            let second = rig.store.start(&load, Layer(1), Order::AfterStream(three));
            if let Ok(second) = &second {
                rig.store.join(second, three).unwrap();
            }
            assert!(failed(rig.store.wait(first)), "{path}, {action:?}");
            if let Ok(second) = second {
                assert!(failed(rig.store.wait(second)), "{path}, {action:?}");
            }
            assert!(rig.settle(), "{path}, {action:?}: a stream hangs");
            rig.faults(None);
            if action == FaultAction::Gone {
                assert!(rig.store.stats().is_err());
            } else {
                drop(load);
                rig.put(&keys, 0);
                assert_eq!(rig.get(&keys, 40), 9, "{path}, {action:?}");
            }
        }
    }
}

#[test]
fn a_failed_store_holds_no_stream_up() {
    for (path, action) in [WRITE_FAULT, FaultAction::Drop]
        .into_iter()
        .flat_map(|action| BOTH.map(|path| (path, action)))
    {
        let mut rig = Rig::new(&plan(1), path);
        let keys = keys(0..9);
        rig.fill(0, &keys);
        let compute = rig.gpu.stream(1);
        let save = rig.store.allocate(&keys, &blocks(0, 9)).unwrap();
        rig.faults(Some(on(WRITE, action)));
        for layer in rig.layers() {
            if let Ok(ticket) = rig.store.start(&save, layer, compute) {
                rig.store.join(&ticket, rig.gpu.stream(2)).unwrap();
            }
        }
        assert!(rig.store.commit(save).is_err());
        assert!(rig.settle(), "{path}, {action:?}");
        rig.faults(None);
        assert_eq!(rig.put(&keys, 0), 9);
        assert_eq!(rig.get(&keys, 40), 9, "{path}, {action:?}");
    }
}

/// A layer that waits for a stream is cancelled by the recovery from another one's fault. The
/// stream gets there only much later, when the store has reused the IOCBs and buffers.
#[test]
fn a_cancelled_layer_is_not_started_by_a_late_word() {
    for (path, seed) in BOTH.into_iter().flat_map(|path| (1..4).map(move |seed| (path, seed))) {
        let mut rig = Rig::new(&plan(seed), path);
        let (a, b) = (keys(0..4), keys(10..14));
        rig.put(&a, 0);
        rig.put(&b, 0);
        let writing_keys = keys(20..24);
        let late = rig.gpu.stream(1);
        rig.gpu.gate(late, 1);
        let broken = rig.load(&a, 40);
        rig.faults(Some(on(READ, FaultAction::Drop).limit(1)));
        let first = rig.store.start(&broken, Layer(0), Order::Unordered).unwrap();
        let save = rig.store.allocate(&writing_keys, &blocks(30, 4)).unwrap();
        let held = rig.store.start(&save, Layer(0), Order::AfterStream(late)).unwrap();
        let other = rig.gpu.stream(2);
        rig.store.join(&held, other).unwrap();
        assert!(failed(rig.store.wait(first)));
        match rig.store.wait(held).unwrap_err() {
            StoreError::Transfer { failure } => {
                assert!(matches!(failure.status, IoStatus::Cancelled | IoStatus::Fault));
            }
            error => panic!("{path}: {error}"),
        }
        drop((save, broken));
        rig.faults(None);
        if path == Route::Direct {
            rig.run(50);
            assert!(rig.gpu.is_past(other), "{path}: it waits for a cancelled layer");
            // IOCBs and events are reused while the late signal is still to come.
            assert_eq!(rig.get(&b, 40), 4);
        }
        rig.gpu.open(1);
        assert!(rig.settle(), "{path}");
        assert_eq!(rig.put(&a, 0), 4);
        assert_eq!(rig.get(&a, 40), 4, "{path}");
        assert_eq!(rig.get(&b, 40), 4, "{path}");
        assert_eq!(rig.store.lookup(&writing_keys).unwrap().len(), 0);
        rig.store.close().unwrap();
    }
}

/// A layer was cancelled before its objects were moved to its buffer, and the move still happens.
#[test]
fn a_late_move_keeps_its_staging_buffer() {
    let mut plan = plan(1);
    plan.options.staging_buffers = 2;
    let mut rig = Rig::new(&plan, Route::Staged);
    let (a, b) = (keys(0..4), keys(10..14));
    rig.put(&a, 0);
    rig.put(&b, 0);
    let (late, compute) = (rig.gpu.stream(1), rig.gpu.stream(2));
    rig.gpu.gate(late, 1);
    let broken = rig.load(&a, 40);
    rig.faults(Some(on(READ, FaultAction::Drop).limit(1)));
    let first = rig.store.start(&broken, Layer(0), compute).unwrap();
    let save = rig.store.allocate(&keys(20..24), &blocks(30, 4)).unwrap();
    let held = rig.store.start(&save, Layer(0), late).unwrap();
    assert!(failed(rig.store.wait(first)));
    assert!(failed(rig.store.wait(held)));
    drop((save, broken));
    rig.faults(None);
    let load = rig.load(&b, 40);
    let one = rig.store.start(&load, Layer(0), compute).unwrap();
    // It waits for the only other buffer.
    let two = rig.store.start(&load, Layer(1), compute).unwrap();
    assert!(rig.store.poll(&one).unwrap().is_some());
    rig.store.wait(two).unwrap();
    rig.gpu.open(1);
    assert!(rig.settle());
    let three = rig.store.start(&load, Layer(2), compute).unwrap();
    rig.store.wait(three).unwrap();
    assert!(rig.layers().all(|layer| rig.holds(40, &b, layer)));
}

/// Fault of an executor, once the test enables it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExecutorFault {
    None,
    /// The kernel makes no progress, and does not stop.
    Dead,
    /// The GPU is lost, and with it the kernel.
    Lost,
    /// The executor cannot be started again.
    Once,
    /// No more memory can be allocated.
    NoMemory,
}

const CAUSE: &str = "CUDA_ERROR_ILLEGAL_ADDRESS (700)";

#[derive(Debug)]
struct FaultyExecutor {
    inner: InlineExecutor,
    fault: Arc<Mutex<ExecutorFault>>,
    number: u32,
    starts: u32,
    /// Alive as long as its memory is.
    living: Arc<()>,
}

impl FaultyExecutor {
    fn fault(&self) -> ExecutorFault {
        *self.fault.lock().unwrap()
    }

    fn check(&self) -> Result<(), ExecutorError> {
        match self.fault() {
            ExecutorFault::Lost => {
                Err(ExecutorError::Failed { executor: "sick", cause: CAUSE.into() })
            }
            _ => Ok(()),
        }
    }
}

impl IoExecutor for FaultyExecutor {
    fn name(&self) -> &'static str {
        "sick"
    }
    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        self.check()?;
        if self.fault() == ExecutorFault::NoMemory {
            let cause = "not now".to_owned();
            return Err(ExecutorError::Memory { executor: "sick", len, cause });
        }
        let memory = self.inner.alloc(len)?;
        let (host, address, len) = (memory.host(), memory.address(), memory.len());
        let owner = Box::new((memory, self.living.clone()));
        // SAFETY: it is the same memory, which the owner keeps alive.
        Ok(unsafe { SharedMemory::new(host, address, len, owner) })
    }
    fn address(&self, place: &Place) -> Option<u64> {
        self.inner.address(place)
    }
    fn start(&mut self, args: Args, grants: &[GrantEpoch]) -> Result<(), ExecutorError> {
        self.check()?;
        self.starts += 1;
        if self.fault() == ExecutorFault::Once && self.number == 0 && self.starts > 1 {
            let cause = "it starts only once".to_owned();
            return Err(ExecutorError::Failed { executor: "sick", cause });
        }
        self.inner.start(args, grants)
    }
    fn submitted(&mut self, tail: u32, sms: u32) -> Result<(), ExecutorError> {
        self.check()?;
        self.inner.submitted(tail, sms)
    }
    fn poll(&mut self) -> Result<Progress, ExecutorError> {
        self.check()?;
        if self.fault() == ExecutorFault::Dead {
            return Ok(Progress::Idle);
        }
        self.inner.poll()
    }
    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        match self.fault() {
            ExecutorFault::Dead => Err(ExecutorError::StopTimeout { executor: "sick" }),
            // A kernel that died with its GPU no longer runs.
            _ => self.inner.stop(deadline),
        }
    }
}

/// Returns a rig whose executors fail, and a token that the memory of the first one holds.
fn faulty(path: Route, seed: u64) -> (Rig, Arc<Mutex<ExecutorFault>>, Weak<()>) {
    faulty_with(&plan(seed), path)
}

fn faulty_with(plan: &Plan, path: Route) -> (Rig, Arc<Mutex<ExecutorFault>>, Weak<()>) {
    let fault = Arc::new(Mutex::new(ExecutorFault::None));
    let shared = fault.clone();
    let token = Arc::new(());
    let living = Arc::downgrade(&token);
    let tokens = Mutex::new(vec![token]);
    let rig = Rig::with_executor(plan, path, move |number, clock: Ticks| {
        let (inner, fault) = (InlineExecutor::new(clock), shared.clone());
        let living = tokens.lock().unwrap().pop().unwrap_or_default();
        Box::new(FaultyExecutor { inner, fault, number, starts: 0, living })
    });
    (rig, fault, living)
}

#[test]
fn a_kernel_that_died_holds_no_stream_up() {
    for path in BOTH {
        let (mut rig, fault, _) = faulty(path, 1);
        let keys = keys(0..9);
        rig.put(&keys, 0);
        let load = rig.load(&keys, 40);
        *fault.lock().unwrap() = ExecutorFault::Dead;
        let ticket = rig.store.start(&load, Layer(0), rig.gpu.stream(1)).unwrap();
        rig.store.join(&ticket, rig.gpu.stream(2)).unwrap();
        let error = rig.store.wait(ticket).unwrap_err();
        assert!(matches!(error, StoreError::Failed { .. }), "{path}: {error}");
        assert!(rig.settle(), "{path}: a stream waits for a kernel that is no more");
        let error = rig.store.start(&load, Layer(1), Order::Unordered).unwrap_err();
        assert!(matches!(error, StoreError::Failed { .. }), "{path}: {error}");
    }
}

#[test]
fn a_lost_gpu_fails_the_store_with_its_own_words() {
    for path in BOTH {
        for late in [false, true] {
            let (mut rig, fault, _) = faulty(path, 1);
            let keys = keys(0..9);
            rig.put(&keys, 0);
            let load = rig.load(&keys, 40);
            *fault.lock().unwrap() = if late { ExecutorFault::None } else { ExecutorFault::Lost };
            let ticket = rig.store.start(&load, Layer(0), rig.gpu.stream(1));
            *fault.lock().unwrap() = ExecutorFault::Lost;
            let result = ticket.and_then(|ticket| rig.store.wait(ticket));
            match result.unwrap_err() {
                StoreError::Failed { cause } => assert!(cause.contains(CAUSE), "{cause}"),
                error => panic!("{path}: {error}"),
            }
            assert!(rig.settle(), "{path}");
            let place = rig.places().at(blocks(40, 1)[0], objstore::Row(0));
            let untouched = rig.gpu.memory.read(place, 3) == [0xEE; 3];
            assert!(late || untouched, "{path}: nothing was read, but something was moved");
        }
    }
}

#[test]
fn words_are_new_with_a_new_executor() {
    for path in BOTH {
        let (mut rig, fault, living) = faulty(path, 1);
        let (a, b) = (keys(0..4), keys(10..14));
        rig.put(&a, 0);
        rig.put(&b, 0);
        let (compute, slow) = (rig.gpu.stream(1), rig.gpu.stream(2));
        let load = rig.load(&a, 40);
        let done = rig.store.start(&load, Layer(0), compute).unwrap();
        rig.gpu.gate(slow, 1);
        rig.store.join(&done, slow).unwrap();
        while rig.store.poll(&done).unwrap().is_none() {
            rig.run(1);
        }
        *fault.lock().unwrap() = ExecutorFault::Once;
        rig.faults(Some(on(READ, FaultAction::Drop).limit(1)));
        let broken = rig.store.start(&load, Layer(1), compute).unwrap();
        assert!(failed(rig.store.wait(broken)));
        rig.faults(None);
        // A ticket from before: its event is in the memory of an executor that was replaced.
        rig.store.join(&done, compute).unwrap();
        drop((done, load));
        assert!(living.strong_count() > 0, "{path}: a stream still looks at its words");
        rig.gpu.open(1);
        assert!(rig.settle(), "{path}");
        rig.put(&a, 0);
        for keys in [&a, &b] {
            let load = rig.load(keys, 40);
            let ticket = rig.store.start(&load, Layer(2), compute).unwrap();
            let seen = rig.look(compute, 40, keys, Layer(2));
            assert!(rig.settle(), "{path}");
            assert_eq!(seen.try_recv(), Ok(true), "{path}");
            rig.store.wait(ticket).unwrap();
        }
        rig.store.close().unwrap();
    }
}

/// Pending copies by a stream use the memory of the old executor; jobs that were begun with it and
/// not started must be begun again.
#[test]
fn copies_are_new_with_a_new_executor() {
    for path in BOTH {
        let mut plan = plan(1);
        plan.options.dram = 4 * plan.shape.block_bytes();
        let (mut rig, fault, living) = faulty_with(&plan, path);
        let (a, b) = (keys(0..4), keys(10..14));
        rig.put(&b, 0);
        rig.put(&a, 0);
        let slow = rig.gpu.stream(1);
        rig.gpu.gate(slow, 1);
        let [hits, broken] = [rig.load(&a, 40), rig.load(&b, 50)];
        let copied = rig.store.start(&hits, Layer(0), slow).unwrap();
        *fault.lock().unwrap() = ExecutorFault::Once;
        rig.faults(Some(on(READ, FaultAction::Drop).limit(1)));
        let failing = rig.store.start(&broken, Layer(0), Order::Unordered).unwrap();
        assert!(failed(rig.store.wait(failing)));
        rig.faults(None);
        let refused = rig.store.start(&hits, Layer(1), Order::Unordered).unwrap_err();
        assert!(matches!(refused, StoreError::RequestFailed { .. }), "{path}: {refused}");
        assert!(living.strong_count() > 0, "{path}: a stream still looks at its tables");
        rig.gpu.open(1);
        assert!(rig.settle(), "{path}");
        rig.store.wait(copied).unwrap();
        assert!(rig.holds(40, &a, Layer(0)), "{path}");
        drop((hits, broken));
        assert_eq!(rig.get(&a, 40), 4, "{path}");
        assert_eq!(rig.store.stats().unwrap().plane.retrieved_bytes, 0, "{path}");
        rig.store.close().unwrap();
    }
}

/// The memory of a replaced executor is freed if no stream uses it.
#[test]
fn a_replaced_executor_leaves_nothing_behind() {
    let (mut rig, fault, living) = faulty(Route::Direct, 1);
    let keys = keys(0..4);
    rig.put(&keys, 0);
    let load = rig.load(&keys, 40);
    *fault.lock().unwrap() = ExecutorFault::Once;
    rig.faults(Some(on(READ, FaultAction::Drop).limit(1)));
    let broken = rig.store.start(&load, Layer(0), Order::Unordered).unwrap();
    assert!(failed(rig.store.wait(broken)));
    drop(load);
    rig.store.stats().unwrap();
    assert_eq!(living.strong_count(), 0);
}

/// A request that finds no memory is refused, and the others continue.
#[test]
fn a_request_that_finds_no_memory_is_refused() {
    for path in BOTH {
        let mut plan = plan(1);
        plan.options.arena_bytes = 4096;
        let (mut rig, fault, _) = faulty_with(&plan, path);
        let (stored, new) = (keys(0..9), keys(20..29));
        rig.put(&stored, 0);
        let (compute, mut open) = (rig.gpu.stream(1), vec![rig.load(&stored, 40)]);
        let ticket = rig.store.start(&open[0], Layer(0), compute).unwrap();
        rig.store.wait(ticket).unwrap();
        *fault.lock().unwrap() = ExecutorFault::NoMemory;
        let error = loop {
            assert!(open.len() < 1000, "{path}: 4 KiB do not end");
            let prefix = rig.store.lookup(&stored).unwrap();
            match rig.store.retrieve(&prefix, &blocks(40, 9)) {
                Ok(load) => open.push(load),
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains("shared memory failed: not now"), "{path}: {error}");
        rig.store.allocate(&new, &blocks(50, 9)).unwrap_err();
        assert_eq!(rig.store.lookup(&new).unwrap().len(), 0);
        let ticket = rig.store.start(&open[0], Layer(1), compute).unwrap();
        rig.store.wait(ticket).unwrap();
        assert!(rig.settle() && rig.holds(40, &stored, Layer(1)), "{path}");
        open.pop();
        assert_eq!(rig.put(&new, 50), 9);
        drop(open);
        rig.store.close().unwrap();
    }
}

/// For every operation that a stream may refuse: nothing is in flight when the caller gets the
/// error, no stream hangs, and the store continues to work, or reports that it has failed.
#[test]
fn a_stream_that_refuses_is_an_error_with_nothing_in_flight() {
    for path in BOTH {
        let mut ends = [0; 3];
        for taken in 0..6 {
            for which in 0..6 {
                let mut rig = Rig::new(&plan(1), path);
                let keys = keys(0..6);
                rig.put(&keys, 0);
                let compute = rig.gpu.stream(1);
                let order =
                    [Order::Unordered, Order::AfterStream(compute), Order::InStream(compute)]
                        [which as usize % 3];
                rig.fill(30, &stack::keys(50..56));
                let load = rig.load(&keys, 40);
                let save = rig.store.allocate(&stack::keys(50..56), &blocks(30, 6)).unwrap();
                rig.gpu.break_it(Defect::RefusesAfter(taken));
                let started = if which < 3 {
                    rig.store.start(&load, Layer(0), order)
                } else {
                    rig.store.start(&save, Layer(0), order)
                };
                rig.gpu.break_it(Defect::None);
                let context = format!("{path}, {order:?}, {taken} taken, {which}");
                match started {
                    Ok(ticket) => {
                        rig.store.wait(ticket).unwrap();
                        ends[0] += 1;
                    }
                    Err(StoreError::Stream { cause }) => {
                        assert!(cause.contains("LAUNCH_FAILED"), "{context}: {cause}");
                        ends[1] += 1;
                        rig.wipe(40, 6);
                        assert!(rig.settle(), "{context}");
                        rig.run(100);
                        let place = rig.places().at(blocks(40, 1)[0], objstore::Row(0));
                        assert_eq!(rig.gpu.memory.read(place, 3), [0xEE; 3], "{context}");
                        drop((load, save));
                        assert_eq!(rig.put(&keys, 0), 6, "{context}");
                        assert_eq!(rig.get(&keys, 40), 6, "{context}");
                    }
                    Err(StoreError::Failed { cause }) => {
                        assert!(cause.contains("LAUNCH_FAILED"), "{context}: {cause}");
                        ends[2] += 1;
                    }
                    Err(error) => panic!("{context}: {error}"),
                }
                assert!(rig.settle(), "{context}: a stream hangs");
            }
        }
        assert!(ends[0] > 0 && ends[1] > 0, "{path}: {ends:?}");
        assert_eq!(ends[2] > 0, path == Route::Staged, "{path}: {ends:?}");
    }
}

/// Objects will be moved to a staging buffer, at an unknown time.
#[test]
fn a_move_of_which_nobody_knows_the_end_keeps_its_staging_buffer() {
    let mut plan = plan(1);
    plan.options.staging_buffers = 1;
    let mut rig = Rig::new(&plan, Route::Staged);
    let compute = rig.gpu.stream(1);
    let save = rig.store.allocate(&keys(0..4), &blocks(0, 4)).unwrap();
    rig.gpu.break_it(Defect::RefusesAfter(1));
    let error = rig.store.start(&save, Layer(0), compute).unwrap_err();
    assert!(matches!(error, StoreError::Stream { .. }), "{error}");
    rig.gpu.break_it(Defect::None);
    assert!(rig.settle());
    let error = rig.store.start(&save, Layer(0), Order::Unordered).unwrap_err();
    assert!(matches!(error, StoreError::StagingBusy { buffers: 1 }), "{error}");
}

/// The move of a staged layer waits for a stream that never gets there: the wait times out, and
/// nothing that the move will use is freed.
#[test]
fn a_stream_that_never_gets_there_fails_a_staged_store() {
    let mut rig = Rig::new(&plan(1), Route::Staged);
    let keys = keys(0..4);
    rig.put(&keys, 0);
    let load = rig.load(&keys, 40);
    let compute = rig.gpu.stream(1);
    rig.gpu.gate(compute, 1);
    let ticket = rig.store.start(&load, Layer(0), compute).unwrap();
    let error = rig.store.wait(ticket).unwrap_err();
    assert!(matches!(error, StoreError::Failed { .. }), "{error}");
    let living = rig.gpu.living();
    let Rig { store, gpu, clock, .. } = rig;
    drop((load, store));
    assert_eq!(gpu.living(), living, "memory was freed that a move will use");
    gpu.open(1);
    for _ in 0..50 {
        nvme_driver::Clock::pause(&*clock, 0, Nanos::MAX);
    }
    assert!(gpu.is_idle());
}

/// With streams nothing is sent again, and a block is forgotten for its medium alone.
#[test]
fn a_failed_layer_of_a_stream_costs_only_blocks_whose_medium_is_bad() {
    let not_ready = FaultAction::Status { code: 0x82, dnr: false };
    for path in BOTH {
        for (action, kept) in [(not_ready, true), (FaultAction::Drop, true), (READ_ERROR, false)] {
            let mut rig = Rig::new(&plan(1), path);
            let keys = keys(0..9);
            rig.put(&keys, 0);
            let load = rig.load(&keys, 40);
            rig.faults(Some(on(READ, action).limit(1)));
            let stream = rig.gpu.stream(1);
            let ticket = rig.store.start(&load, Layer(0), stream).unwrap();
            rig.store.join(&ticket, stream).unwrap();
            assert!(failed(rig.store.wait(ticket)), "{path}, {action:?}");
            assert!(rig.settle(), "{path}, {action:?}");
            rig.faults(None);
            drop(load);
            assert_eq!(rig.store.peek(&keys) == 9, kept, "{path}, {action:?}");
        }
    }
}
