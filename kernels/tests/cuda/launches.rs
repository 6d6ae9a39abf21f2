//! Launches: both modes move the correct bytes, and nothing waits for a kernel that has exited.
#![allow(unsafe_code, reason = "calls the mock's cuCtxSynchronize")]

use std::sync::Arc;

use cuda_mock::{self as mock, Level, isolated};
use gio_kernels::cuda::{
    CudaDevice, CudaError, CudaExecutor, CudaOptions, CudaStream, LaunchMode, StreamKind,
};
use gio_uring::{
    Affine, AffineOp, Direction, Event, Fault, IoExecutor, IocbId, Signal, Uring, UringOptions,
    Wait,
};
use nvme_driver::Nanos;
use ripieno_testkit::{WATCHDOG_NS, until};

use crate::{
    cases::issue_after,
    rig::{self, Pool, Rig, bare, round_trip, set_stop, soon, stack_moves_bytes},
};

#[test]
fn a_launch_per_batch() {
    isolated("launches::a_launch_per_batch", Level::Full, &[], || {
        let device = rig::gpu();
        let shapes = [(1, 1), (2, 2), (3, 1)];
        for shape in shapes {
            stack_moves_bytes(&device, rig::options(LaunchMode::PerBatch), shape);
        }
        // Twelve rows are two batches; there and back, and all of it twice. An operation issued
        // before the kernel exits needs no launch, but one that the exiting kernel did not see
        // needs another: on a loaded machine there are more, and one for each row at most.
        let launches = mock::count("cuLaunchKernel") / shapes.len() as i64;
        assert!((2..=48).contains(&launches), "{launches} for 48 rows");
        drop(device);
        mock::assert_clean();
    });
}

#[test]
fn a_resident_kernel() {
    isolated("launches::a_resident_kernel", Level::Full, &[], || {
        let device = rig::gpu();
        for shape in [(1, 1), (2, 2)] {
            let linger = Nanos::from_millis(60_000);
            let options = CudaOptions { linger, ..rig::options(LaunchMode::Resident) };
            stack_moves_bytes(&device, options, shape);
        }
        assert_eq!(mock::count("cuLaunchKernel"), 4, "one for each start");
        drop(device);
        mock::assert_clean();
    });
}

/// The mock does not check that the PTX requires a newer driver.
#[test]
fn on_a_driver_without_green_contexts() {
    isolated("launches::on_a_driver_without_green_contexts", Level::Twelve, &[], || {
        let device = rig::gpu();
        stack_moves_bytes(&device, rig::options(LaunchMode::PerBatch), (2, 1));
        drop(device);
        mock::assert_clean();
    });
}

/// Issues one row of 16 objects; with an event, to start once it is 1.
fn issue(ring: &mut Uring, pool: &Pool, event: Option<&Event>) -> IocbId {
    let wait = event.map(|event| Wait { event: event.clone(), value: 1 });
    let (id, issued) = issue_after(ring, pool, wait.as_ref());
    issued.expect("issued");
    id
}

/// Reads the completion ring only, without polling the executor.
fn complete_without_poll(ring: &mut Uring, id: IocbId) {
    let done = loop {
        match ring.try_completion(id).expect("issued") {
            Some(done) => break done,
            None => std::thread::yield_now(),
        }
    };
    assert_eq!((done.objects, done.errors), (16, 0));
}

/// Some operations, then two that wait for their events, without polling the executor: like a host
/// that blocks in a stream's synchronisation.
#[test]
fn nothing_waits_for_a_poll() {
    isolated("launches::nothing_waits_for_a_poll", Level::Full, &[], || {
        for mode in [LaunchMode::PerBatch, LaunchMode::Resident] {
            let device = rig::gpu();
            let mut rig = Rig::new(device.clone(), 1, 1, 32);
            let mut ring = rig.ring(rig::options(mode), UringOptions::default());
            let pool = rig.pool(&mut ring, 1, 16);
            for _ in 0..255 {
                let id = issue(&mut ring, &pool, None);
                complete_without_poll(&mut ring, id);
            }
            let events = [ring.event().expect("a word"), ring.event().expect("a word")];
            let ids = events.each_ref().map(|event| issue(&mut ring, &pool, Some(event)));
            for (event, id) in events.iter().zip(ids) {
                event.set(1);
                complete_without_poll(&mut ring, id);
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            rig.end(&mut ring);
        }
        mock::assert_clean();
    });
}

/// While a kernel waits for an event, later operations cause at most one launch.
#[test]
fn launches_do_not_pile_up() {
    isolated("launches::launches_do_not_pile_up", Level::Full, &[], || {
        let device = rig::gpu();
        let (mut executor, pages, args) = bare(&device, LaunchMode::PerBatch);
        executor.start(args, &[]).expect("starts");
        mock::hang(true);
        for _ in 0..300 {
            executor.submitted(0, 0).expect("noted");
        }
        assert_eq!(mock::count("cuLaunchKernel"), 1);
        mock::hang(false);
        set_stop(&pages);
        executor.stop(WATCHDOG_NS).expect("stops");
        drop((executor, pages, device));
        mock::assert_clean();
    });
}

/// An engine calls this occasionally, as `torch.cuda.synchronize()`.
#[test]
fn a_resident_kernel_leaves_an_idle_gpu() {
    isolated("launches::a_resident_kernel_leaves_an_idle_gpu", Level::Full, &[], || {
        let device = rig::gpu();
        let mut rig = Rig::new(device.clone(), 2, 2, 32);
        let mut ring = rig.ring(rig::options(LaunchMode::Resident), UringOptions::default());
        let mut pool = rig.pool(&mut ring, 4, 64);
        for launches in 1..4 {
            round_trip(&mut ring, &mut pool);
            // SAFETY: takes nothing, and waits for the streams of this process.
            let synchronized = unsafe { cudarc::driver::sys::cuCtxSynchronize() };
            assert_eq!(synchronized, cudarc::driver::sys::CUresult::CUDA_SUCCESS);
            assert!(mock::count("cuLaunchKernel") >= launches);
            ring.poll().expect("it left, and is well");
        }
        rig.end(&mut ring);
        drop((ring, pool, rig, device));
        mock::assert_clean();
    });
}

/// Submits at many times around the kernel's exit: no submission is lost when the kernel has just
/// exited and the host believes it still runs.
pub(crate) fn submissions_while_the_kernel_leaves(device: &Arc<CudaDevice>, linger: Nanos) {
    let mut rig = Rig::new(device.clone(), 2, 2, 32);
    let options = CudaOptions { linger, ..rig::options(LaunchMode::Resident) };
    let mut ring = rig.ring(options, UringOptions::default());
    let pool = rig.pool(&mut ring, 1, 16);
    for i in 0..4000u64 {
        let id = issue(&mut ring, &pool, None);
        complete_without_poll(&mut ring, id);
        // Half of them around its exit, microseconds after it has lingered; others at any time.
        let pause = match i % 2 {
            0 => linger.0 + i * 37 % 20_000,
            _ => i * 7919 % (2 * linger.0 + 50_000),
        };
        let pause = std::time::Duration::from_nanos(pause);
        let start = std::time::Instant::now();
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
    }
    rig.end(&mut ring);
}

#[test]
fn no_submission_is_lost_while_the_kernel_leaves() {
    isolated("launches::no_submission_is_lost_while_the_kernel_leaves", Level::Full, &[], || {
        for linger in [0, 20_000, 200_000] {
            let device = rig::gpu();
            let before = mock::count("cuLaunchKernel");
            submissions_while_the_kernel_leaves(&device, Nanos(linger));
            assert!(mock::count("cuLaunchKernel") > before + 1, "it never left");
        }
        mock::assert_clean();
    });
}

/// A thread fails to set an event, for example because it waits for the whole GPU. The kernel times
/// out by itself, an engine's stream that waits for the operation proceeds, and the kernel exits.
#[test]
fn a_kernel_whose_event_does_not_come_leaves() {
    isolated("launches::a_kernel_whose_event_does_not_come_leaves", Level::Full, &[], || {
        for mode in [LaunchMode::PerBatch, LaunchMode::Resident] {
            let device = rig::gpu();
            let engine = CudaStream::new(&device, None).expect("a stream");
            let mut rig = Rig::new(device.clone(), 1, 1, 32);
            let event_timeout = Nanos::from_millis(300);
            let options = UringOptions { event_timeout, ..UringOptions::default() };
            let mut ring = rig.ring(rig::options(mode), options);
            let pool = rig.pool(&mut ring, 1, 16);
            let map: Vec<Affine> = (0..16).map(|i| Affine { block: i, file: i }).collect();
            let map = ring.upload_map(&map, 1).expect("a map");
            let [never, done] = [0; 2].map(|_| ring.event().expect("a word"));
            let wait = Wait { event: never, value: 1 };
            let signal = Signal { event: done.clone(), value: 5 };
            let op = AffineOp::new(Direction::Read, &map, &pool.handle, 0..1);
            let op = AffineOp { wait: Some(&wait), signal: Some(&signal), ..op };
            let id = ring.submit(&op).expect("submitted");
            // SAFETY: the word lives until the ring is dropped, the stream until it is idle.
            unsafe { device.stream_wait(engine.raw(), done.address(), 5, false).expect("ok") };
            // The operation is not polled, and the stream proceeds.
            until("the stream goes on", || engine.is_idle().expect("a stream"));
            // The ring's entry follows immediately after the signal.
            let completion = ring.wait_completion(id, soon(&ring)).expect("it is over");
            assert_eq!((completion.objects, completion.errors), (0, 16));
            // SAFETY: takes nothing, and waits for the streams of this process.
            let synchronized = unsafe { cudarc::driver::sys::cuCtxSynchronize() };
            assert_eq!(synchronized, cudarc::driver::sys::CUresult::CUDA_SUCCESS);
            assert_eq!(ring.faulted().map(|found| found.fault), Some(Fault::Event));
            let proof = ring.stop(soon(&ring)).expect("stops");
            rig.start_again(&mut ring, &proof);
            let again = issue(&mut ring, &pool, None);
            complete_without_poll(&mut ring, again);
            rig.end(&mut ring);
        }
        mock::assert_clean();
    });
}

/// With few hardware queues, work that a resident kernel waits for could be queued behind it.
#[test]
fn a_resident_kernel_needs_hardware_queues() {
    let test = "launches::a_resident_kernel_needs_hardware_queues";
    isolated(test, Level::Full, &[("CUDA_DEVICE_MAX_CONNECTIONS", "1")], || {
        let device = rig::gpu();
        let made = |mode| {
            let clock = Arc::new(nvme_driver::MonotonicClock::default());
            CudaExecutor::new(&device, rig::options(mode), clock)
        };
        let text = made(LaunchMode::Resident).expect_err("one queue").to_string();
        assert!(text.contains("CUDA_DEVICE_MAX_CONNECTIONS=32"), "{text}");
        drop(made(LaunchMode::PerBatch).expect("no matter"));
    });
}

/// The SMs left by the I/O kernel form a partition too; without partitions, an error is returned.
#[test]
fn an_engine_beside_the_io_kernel() {
    let test = "launches::an_engine_beside_the_io_kernel";
    isolated(test, Level::Full, &[], || {
        let device = rig::gpu();
        let beside = CudaStream::beside(&device, 3).expect("a stream");
        let report = beside.report().clone();
        // The mock has 132 SMs, in units of two.
        assert_eq!((report.asked, report.granted, report.remaining), (None, 128, 4));
        assert_eq!(report.kind, StreamKind::Green);
        let none = CudaStream::beside(&device, 132).expect_err("all of them");
        assert!(none.to_string().contains("no SM is left"), "{none}");
        let lowest = CudaStream::lowest(&device).expect("a stream");
        let kind = StreamKind::Priority { priority: 0, instead: None };
        assert_eq!((lowest.report().granted, &lowest.report().kind), (132, &kind));
        drop((beside, lowest, device));
        mock::assert_clean();
    });
}

#[test]
fn nothing_beside_the_io_kernel_without_green_contexts() {
    let test = "launches::nothing_beside_the_io_kernel_without_green_contexts";
    isolated(test, Level::Twelve, &[], || {
        let error = CudaStream::beside(&rig::gpu(), 3).expect_err("no green contexts");
        assert!(matches!(error, CudaError::Argument(_)), "{error}");
    });
}
