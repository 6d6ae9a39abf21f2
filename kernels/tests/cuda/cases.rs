//! The executor with good and bad drives: the same cases over the mock and on a GPU.
#![allow(unsafe_code, reason = "the driver API is reached by address, over memory of the tests")]

use std::sync::Arc;

use cuda_mock::{self as mock, Level, isolated};
use gio_kernels::cuda::{CudaDevice, CudaStream, LaunchMode};
use gio_uring::{
    Affine, AffineOp, BlockMap, Direction, ExecutorError, Fault, IoExecutor, IoStatus, IocbId,
    Signal, Uring, UringOptions, Wait,
};
use nvme_driver::{Nanos, Quiesced};
use nvme_emu::{EmuRunner, FaultAction, FaultPlan, FaultRule, FaultWhen};
use ripieno_testkit::{WATCHDOG_NS, until};

use crate::rig::{self, Pool, Rig, all_rows, bare, round_trip, set_stop, soon};

const MODES: [LaunchMode; 2] = [LaunchMode::PerBatch, LaunchMode::Resident];

/// Issues one row of 16 objects.
pub(crate) fn issue(ring: &mut Uring, pool: &Pool) -> (IocbId, Result<(), ExecutorError>) {
    issue_after(ring, pool, None)
}

/// The same, to start after `wait`.
pub(crate) fn issue_after(
    ring: &mut Uring,
    pool: &Pool,
    wait: Option<&Wait>,
) -> (IocbId, Result<(), ExecutorError>) {
    let map = upload(ring);
    issue_map(ring, pool, &map, wait)
}

/// Uploads the map of the 16 objects.
pub(crate) fn upload(ring: &mut Uring) -> BlockMap {
    let map: Vec<Affine> = (0..16).map(|i| Affine { block: i, file: i }).collect();
    ring.upload_map(&map, ring.devices()).expect("a map")
}

/// Issues one row of a map.
pub(crate) fn issue_map(
    ring: &mut Uring,
    pool: &Pool,
    map: &BlockMap,
    wait: Option<&Wait>,
) -> (IocbId, Result<(), ExecutorError>) {
    let op = AffineOp { wait, ..AffineOp::new(Direction::Read, map, &pool.handle, 0..1) };
    match ring.submit(&op) {
        Ok(id) => (id, Ok(())),
        Err(gio_uring::Error::Submitted { iocb, source }) => (iocb, Err(source)),
        Err(error) => panic!("{error}"),
    }
}

/// Creates a drive of one queue.
fn one(device: &Arc<CudaDevice>, mode: LaunchMode, depth: usize) -> (Rig, Uring) {
    let mut rig = Rig::new(device.clone(), 1, 1, depth);
    let ring = rig.ring(rig::options(mode), UringOptions::default());
    (rig, ring)
}

/// Creates one whose commands time out after 400 ms: on a busy machine, good ones may as well.
fn hasty(device: &Arc<CudaDevice>, mode: LaunchMode, depth: usize) -> (Rig, Uring) {
    timed(device, mode, depth, Nanos::from_millis(400))
}

fn timed(
    device: &Arc<CudaDevice>,
    mode: LaunchMode,
    depth: usize,
    command_timeout: Nanos,
) -> (Rig, Uring) {
    let mut rig = Rig::new(device.clone(), 1, 1, depth);
    let options = UringOptions { command_timeout, ..UringOptions::default() };
    let ring = rig.ring(rig::options(mode), options);
    (rig, ring)
}

/// Every other file, so that nothing is merged and there are enough commands.
fn apart() -> Vec<Affine> {
    (0..32).map(|i| Affine { block: i, file: 2 * i }).collect()
}

/// An engine's stream writes the word that an operation waits for, and waits for the word that it
/// signals; the host does nothing in between.
fn chained(device: &Arc<CudaDevice>, mode: LaunchMode) {
    let engine = CudaStream::new(device, None).expect("a stream");
    let mut rig = Rig::new(device.clone(), 1, 1, 32);
    let mut ring = rig.ring(rig::options(mode), UringOptions::default());
    let pool = rig.pool(&mut ring, 1, 16);
    let map: Vec<Affine> = (0..16).map(|i| Affine { block: i, file: i }).collect();
    let map = ring.upload_map(&map, 1).expect("a map");
    let (ready, done) = (ring.event().expect("a word"), ring.event().expect("a word"));
    let wait = Wait { event: ready.clone(), value: 1 };
    let signal = Signal { event: done.clone(), value: 5 };
    let op = AffineOp::new(Direction::Read, &map, &pool.handle, 0..1);
    let op = AffineOp { wait: Some(&wait), signal: Some(&signal), ..op };
    let id = ring.submit(&op).expect("submitted");
    std::thread::sleep(std::time::Duration::from_millis(10));
    assert!(ring.try_completion(id).expect("issued").is_none(), "it waits");
    // SAFETY: both words live until the ring is dropped, the stream until it is idle.
    unsafe {
        device.stream_write(engine.raw(), ready.address(), 1).expect("writes");
        device.stream_wait(engine.raw(), done.address(), 5, false).expect("ok");
    }
    let deadline = soon(&ring);
    let completion = ring.wait_completion(id, deadline).expect("done");
    assert_eq!((completion.objects, completion.errors), (16, 0));
    while !engine.is_idle().expect("a stream") {
        std::thread::yield_now();
    }
    assert_eq!(done.read(), 5);
    rig.end(&mut ring);
}

/// One invalid or missing completion fails its queue and no other; driver and ring recover, and the
/// same operation then succeeds.
fn misbehaving(device: &Arc<CudaDevice>, mode: LaunchMode) {
    let all = [
        (FaultAction::Drop, Fault::Timeout),
        (FaultAction::WrongPhase, Fault::Timeout),
        (FaultAction::WrongCid, Fault::UnknownCid),
        (FaultAction::Duplicate, Fault::UnknownCid),
        (FaultAction::WrongSqhd, Fault::SqHead),
        (FaultAction::WrongSqid, Fault::SqId),
    ];
    let (mut rig, mut ring) = hasty(device, mode, 64);
    let pool = rig.pool(&mut ring, 2, 64);
    for (action, fault) in all {
        // If a good command timed out, it is tried again.
        until("the queue fails for what was wrong", || {
            let found = fails(&mut rig, &mut ring, &pool, action);
            assert!([fault, Fault::Timeout].contains(&found), "{action:?}: {found:?}");
            found == fault
        });
        rig.works_again(&mut ring, &pool, &apart());
    }
    rig.end(&mut ring);
}

/// Lets the drive do something wrong once, and recovers. Returns why the queue failed.
fn fails(rig: &mut Rig, ring: &mut Uring, pool: &Pool, action: FaultAction) -> Fault {
    let when = FaultWhen { admin: Some(false), nth: Some(3), ..FaultWhen::default() };
    let rules = vec![FaultRule::new(when, action).limit(1)];
    rig.emus[0].set_faults(FaultPlan { seed: 1, rules, ..FaultPlan::default() });
    let (objects, errors) = all_rows(ring, pool, Direction::Read, &apart());
    // A duplicate arrives with its command: all others may have completed by then.
    let lost = errors > 0 && objects < 64;
    assert!(lost || action == FaultAction::Duplicate, "{action:?}: {objects}, {errors}");
    until("the queue fails", || {
        ring.poll().expect("the GPU is well");
        issue_and_forget(ring, pool);
        ring.faulted().is_some()
    });
    let fault = ring.faulted().expect("it failed").fault;
    let proof = ring.stop(soon(ring)).expect("stops: nothing is waited for any more");
    rig.emus[0].set_faults(FaultPlan::default());
    rig.start_again(ring, &proof);
    fault
}

/// With a launch per batch, completions are only seen while a batch runs.
fn issue_and_forget(ring: &mut Uring, pool: &Pool) {
    let (id, issued) = issue(ring, pool);
    issued.expect("issued");
    ring.wait_completion(id, soon(ring)).expect("done or failed");
}

/// A command rejected by a drive fails its objects and no others; a late command fails none.
fn refusing(device: &Arc<CudaDevice>, mode: LaunchMode) {
    let (mut rig, mut ring) = one(device, mode, 32);
    let pool = rig.pool(&mut ring, 1, 64);
    let rule = |nth, then| {
        let when = FaultWhen { admin: Some(false), nth: Some(nth), ..FaultWhen::default() };
        FaultRule::new(when, then).limit(1)
    };
    let status = FaultAction::Status { code: 0x281, dnr: true };
    let rules = vec![rule(5, status), rule(9, FaultAction::Delay { ns: 20_000_000 })];
    rig.emus[0].set_faults(FaultPlan { seed: 1, rules, ..FaultPlan::default() });
    let map = ring.upload_map(&apart(), 1).expect("a map");
    let op = AffineOp::new(Direction::Read, &map, &pool.handle, 0..1);
    let id = ring.submit(&op).expect("submitted");
    let done = ring.wait_completion(id, soon(&ring)).expect("done");
    assert_eq!((done.objects, done.errors), (31, 1));
    let statuses = map.statuses();
    let bad: Vec<&IoStatus> = statuses.iter().filter(|status| !status.is_ok()).collect();
    assert!(matches!(bad[..], [IoStatus::Nvme(_)]), "{bad:?}");
    assert!(ring.faulted().is_none());
    rig.end(&mut ring);
}

/// A controller fails midway: its commands end by timeout, unsubmitted ones are rejected, the
/// stream does not hang, and a reset recovers it.
fn dying(device: &Arc<CudaDevice>, mode: LaunchMode) {
    let (mut rig, mut ring) = hasty(device, mode, 16);
    let pool = rig.pool(&mut ring, 4, 64);
    let proof = dies(&mut rig, &mut ring, &pool, FaultAction::FatalStatus);
    rig.start_again(&mut ring, &proof);
    rig.works_again(&mut ring, &pool, &apart());
    rig.end(&mut ring);
}

/// A drive is removed midway. It cannot be recovered and may still write: its queues and the pool
/// stay allocated until the process ends.
fn vanishing(device: &Arc<CudaDevice>, mode: LaunchMode) {
    let (mut rig, mut ring) = hasty(device, mode, 16);
    let pool = rig.pool(&mut ring, 4, 64);
    let proof = dies(&mut rig, &mut ring, &pool, FaultAction::Gone);
    rig.controllers[0].recover(&proof).expect_err("it is gone");
}

fn dies(rig: &mut Rig, ring: &mut Uring, pool: &Pool, how: FaultAction) -> Quiesced {
    let when = FaultWhen { admin: Some(false), nth: Some(40), ..FaultWhen::default() };
    let rules = vec![FaultRule::new(when, how).limit(1)];
    rig.emus[0].set_faults(FaultPlan { seed: 1, rules, ..FaultPlan::default() });
    let (objects, errors) = all_rows(ring, pool, Direction::Read, &apart());
    assert!(objects < 128 && errors > 0, "{objects} objects, {errors} errors");
    assert_eq!(ring.faulted().map(|found| found.fault), Some(Fault::Timeout));
    let (id, issued) = issue(ring, pool);
    issued.expect("issued");
    let done = ring.wait_completion(id, soon(ring)).expect("refused");
    assert_eq!((done.objects, done.errors > 0), (0, true));
    ring.stop(soon(ring)).expect("stops")
}

/// Controllers that never answer: the stop fails at its deadline, and succeeds after the commands'
/// own timeout.
fn silent(device: &Arc<CudaDevice>, mode: LaunchMode) {
    // If the machine is so slow that the commands time out before the first stop, they get more.
    assert!([400, 4_000, 40_000].iter().any(|ms| holds_up(device, mode, Nanos::from_millis(*ms))));
}

/// Returns false if the stop came too late.
fn holds_up(device: &Arc<CudaDevice>, mode: LaunchMode, timeout: Nanos) -> bool {
    let (mut rig, mut ring) = timed(device, mode, 16, timeout);
    let pool = rig.pool(&mut ring, 1, 16);
    rig.runner = None; // the controllers stand still
    let (id, issued) = issue(&mut ring, &pool);
    issued.expect("issued");
    while ring.counters().total.commands == 0 {
        std::thread::yield_now();
    }
    let early = ring.stop(ring.now() + Nanos::from_millis(20));
    let is_held_up = early.is_err();
    let proof = early.or_else(|_| ring.stop(soon(&ring))).expect("given up by now");
    let done = ring.wait_completion(id, soon(&ring)).expect("completed");
    assert_eq!((done.objects, done.errors > 0), (0, true));
    rig.runner = Some(EmuRunner::spawn(rig.emus.clone(), rig.clock.clone()).expect("threads"));
    rig.controllers[0].recover(&proof).expect("it answers again");
    rig.reclaim(&proof);
    is_held_up
}

/// A stop midway: commands in flight are awaited, the rest is cancelled, and every operation
/// reports how much of it was done.
fn stopped(device: &Arc<CudaDevice>, mode: LaunchMode) {
    let (mut rig, mut ring) = one(device, mode, 16);
    let mut pool = rig.pool(&mut ring, 8, 64);
    let when = FaultWhen { admin: Some(false), ..FaultWhen::default() };
    let slow = vec![FaultRule::new(when, FaultAction::Delay { ns: 3_000_000 })];
    rig.emus[0].set_faults(FaultPlan { seed: 1, rules: slow, ..FaultPlan::default() });
    let map = ring.upload_map(&apart(), 1).expect("a map");
    let ids = [0, 1, 2, 3, 4, 5, 6, 7].map(|row| {
        let op = AffineOp::new(Direction::Read, &map, &pool.handle, row..row + 1);
        ring.submit(&op).expect("submitted")
    });
    while ring.counters().total.commands == 0 {
        std::thread::yield_now();
    }
    let proof = ring.stop(soon(&ring)).expect("stops");
    let mut sums = (0, 0);
    for id in ids {
        let done = ring.try_completion(id).expect("issued").expect("it ended");
        assert!(done.objects == 32 || done.errors > 0, "{done:?}");
        sums = (sums.0 + done.objects, sums.1 + u64::from(done.errors));
    }
    let sent = ring.counters().total.commands;
    assert!(sums.0 == sent && sums.0 < 256, "{sums:?} of {sent} commands");
    rig.emus[0].set_faults(FaultPlan::default());
    rig.start_again(&mut ring, &proof);
    round_trip(&mut ring, &mut pool);
    rig.end(&mut ring);
}

/// An idle kernel ends immediately after the stop word.
fn idle(device: &Arc<CudaDevice>, mode: LaunchMode) {
    for _ in 0..3 {
        let (mut executor, page, args) = bare(device, mode);
        executor.start(args, &[]).expect("starts");
        executor.submitted(0, 0).expect("launched");
        set_stop(&page);
        executor.stop(WATCHDOG_NS).expect("it ends");
    }
}

type Case = fn(&Arc<CudaDevice>, LaunchMode);

fn over_the_mock(test: &str, case: Case) {
    isolated(&format!("cases::{test}"), Level::Full, &[], || {
        for mode in MODES {
            case(&rig::gpu(), mode);
        }
        if test == "a_drive_vanishes" {
            assert!(mock::live() > 0, "what the drive may write to was freed");
            assert_eq!(mock::count("freed while a kernel ran"), 0);
            mock::assert_thread_clean();
        } else {
            mock::assert_clean();
        }
    });
}

macro_rules! cases {
    ($($name:ident $case:ident)*) => {
        $(
            #[test]
            fn $name() {
                over_the_mock(stringify!($name), $case);
            }
        )*

        /// The same on a GPU.
        mod on_a_gpu {
            use super::*;

            $(
                #[test]
                #[ignore = "needs an NVIDIA GPU"]
                fn $name() {
                    let device = rig::only_gpu();
                    for mode in MODES {
                        super::$case(&device, mode);
                    }
                }
            )*
        }
    };
}

cases! {
    operations_are_chained_with_a_stream chained
    completions_that_make_no_sense_fail_the_queue misbehaving
    what_a_drive_refuses_is_a_status refusing
    a_controller_dies dying
    a_drive_vanishes vanishing
    a_silent_drive_holds_the_stop_up_until_its_commands_time_out silent
    a_stop_in_the_middle stopped
    an_idle_kernel_ends_with_the_stop_word idle
}
