//! Failures on a GPU, and termination of the executor.
#![allow(unsafe_code, reason = "the driver API is reached by address, over memory of the tests")]

use cuda_mock::{self as mock, Level, Variables, each, isolated};
use std::sync::Arc;

use gio_kernels::{
    cuda::{CudaDevice, CudaError, CudaExecutor, CudaModule, CudaOptions, ErrorCode, LaunchMode},
    ptx::{ENTRY, PTX},
};
use gio_uring::{ExecutorError, IoExecutor, Uring, UringOptions};
use nvme_driver::{Clock, MonotonicClock, Nanos, Quiesced};
use nvme_spec::ids::Nsid;
use ripieno_testkit::WATCHDOG_NS;

use crate::{
    cases::{issue, issue_map, upload},
    rig::{self, Rig, bare, round_trip, set_stop, soon},
};

const MODES: [LaunchMode; 2] = [LaunchMode::PerBatch, LaunchMode::Resident];

/// Two cases without variables.
const PLAIN: [Variables<'_>; 2] = [&[]; 2];

#[test]
fn no_pinned_memory() {
    // The warps' state, its copies' memory and word, rings, the first chunk of the arena; all are
    // allocated after the executor's own word.
    let cases: [Variables<'_>; 5] = [&[]; 5];
    each("faults::no_pinned_memory", Level::Full, &cases, |skip| {
        let device = rig::gpu();
        let mut rig = Rig::new(device.clone(), 1, 1, 32);
        mock::inject("cuMemHostAlloc", 1 + skip as i64, 2);
        let options = UringOptions::default();
        let made = rig.try_ring(rig::options(LaunchMode::Resident), options);
        let text = made.expect_err("no memory").to_string();
        for word in ["CUDA_ERROR_OUT_OF_MEMORY", "ulimit -l"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        mock::assert_thread_clean();
        let proof = rig.never_ran();
        rig.reclaim(&proof);
        drop((rig, device));
        mock::assert_clean();
    });
}

fn refused(device: &Arc<CudaDevice>, text: &str) -> CudaError {
    let clock = Arc::new(MonotonicClock::default());
    let made = CudaModule::compile(device, text, "the I/O kernel")
        .and_then(|module| module.function(ENTRY))
        .and_then(|kernel| CudaExecutor::with_kernel(&kernel, CudaOptions::default(), clock));
    made.expect_err("not the I/O kernel")
}

#[test]
fn ptx_that_does_not_compile() {
    isolated("faults::ptx_that_does_not_compile", Level::Full, &[], || {
        let device = rig::gpu();
        let error = refused(&device, "// nothing\n.target sm_90a\n");
        assert_eq!(error.code(), Some(ErrorCode(218)));
        let text = error.to_string();
        for word in ["line 1 is no PTX", "CUDA_ERROR_INVALID_PTX", ".target sm_90a", "9.0"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        mock::inject("cuModuleLoadDataEx", 0, 222);
        let text = refused(&device, PTX).to_string();
        assert!(text.contains(".version 8.6") && text.contains("update the driver"), "{text}");
        mock::inject("cuModuleLoadDataEx", 0, 2);
        assert!(matches!(refused(&device, PTX), CudaError::Call { .. }), "not the PTX's fault");
        mock::inject("cuModuleGetFunction", 0, 500);
        assert!(refused(&device, PTX).to_string().contains("gio_kernel"));
        assert!(matches!(refused(&device, "\0"), CudaError::Argument(_)));
        drop(device);
        mock::assert_clean();
    });
}

#[test]
fn ptx_of_another_interface() {
    let other = [("MOCK_CUDA_PARAM", "96")];
    isolated("faults::ptx_of_another_interface", Level::Full, &other, || {
        let device = rig::gpu();
        let text = refused(&device, PTX).to_string();
        assert!(text.contains("96 bytes") && text.contains("xtask ptx"), "{text}");
        drop(device);
        mock::assert_clean();
    });
}

/// One compiled kernel serves any number of executors, if it is the I/O kernel.
#[test]
fn a_kernel_that_was_compiled_before() {
    isolated("faults::a_kernel_that_was_compiled_before", Level::Full, &[], || {
        let device = rig::gpu();
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let kernel = |ptx, entry| {
            CudaModule::compile(&device, ptx, "a kernel").expect("PTX").function(entry)
        };
        let io = kernel(PTX, ENTRY).expect("a kernel");
        for _ in 0..3 {
            let made = CudaExecutor::with_kernel(&io, CudaOptions::default(), clock.clone());
            drop(made.expect("an executor"));
        }
        assert_eq!(mock::count("cuModuleLoadDataEx"), 1);
        let other = kernel(gio_kernels::ptx::POOL_PTX, "gio_scatter_gather").expect("a kernel");
        let made = CudaExecutor::with_kernel(&other, CudaOptions::default(), clock);
        assert!(matches!(made.expect_err("not the I/O kernel"), CudaError::Argument(_)));
        drop((io, other, device));
        mock::assert_clean();
    });
}

#[test]
fn a_launch_that_is_refused() {
    isolated("faults::a_launch_that_is_refused", Level::Full, &[], || {
        let device = rig::gpu();
        let mut rig = Rig::new(device.clone(), 1, 1, 32);
        let mut ring = rig.ring(rig::options(LaunchMode::PerBatch), UringOptions::default());
        let mut pool = rig.pool(&mut ring, 2, 16);
        mock::inject("cuLaunchKernel", 0, 701);
        let (id, issued) = issue(&mut ring, &pool);
        let text = issued.expect_err("not launched").to_string();
        assert!(text.contains("cuLaunchKernel") && text.contains("701"), "{text}");
        let again =
            ring.wait_completion(id, soon(&ring)).expect_err("nobody works on it").to_string();
        assert!(again.contains("701"), "{again}");
        device.healthy().expect("the GPU is well");
        // Nothing runs, so the ring can be stopped and restarted.
        let proof = ring.stop(soon(&ring)).expect("stops");
        assert_eq!(ring.try_completion(id).expect("it ended").expect("cancelled").errors, 1);
        rig.start_again(&mut ring, &proof);
        round_trip(&mut ring, &mut pool);
        rig.end(&mut ring);
        drop((ring, pool, rig, device));
        mock::assert_clean();
    });
}

#[test]
fn a_resident_kernel_that_cannot_start() {
    let refusals = [("MOCK_CUDA_OCCUPANCY", "0"), ("MOCK_CUDA_INJECT", "cuLaunchKernel:0:801")];
    let cases = [&refusals[..1], &refusals[1..]];
    each("faults::a_resident_kernel_that_cannot_start", Level::Full, &cases, |_| {
        let device = rig::gpu();
        let mut rig = Rig::new(device.clone(), 1, 2, 32);
        let options = UringOptions::default();
        let made = rig.try_ring(rig::options(LaunchMode::Resident), options);
        let text = made.expect_err("no kernel").to_string();
        assert!(text.contains("cannot all run at once") || text.contains("801"), "{text}");
        let proof = rig.never_ran();
        rig.reclaim(&proof);
        drop((rig, device));
        mock::assert_clean();
    });
}

/// A sticky CUDA error midway is returned by every later call, and memory that the GPU or a drive
/// may still use is not freed.
#[test]
fn an_error_that_stays() {
    each("faults::an_error_that_stays", Level::Full, &PLAIN, |case| {
        stays(MODES[case], [700, 702][case]);
    });
}

fn stays(mode: LaunchMode, code: i32) {
    let device = rig::gpu();
    let mut rig = Rig::new(device.clone(), 1, 1, 32);
    let mut ring = rig.ring(rig::options(mode), UringOptions::default());
    let pool = rig.pool(&mut ring, 1, 16);
    let (id, issued) = issue(&mut ring, &pool);
    issued.expect("issued");
    ring.wait_completion(id, soon(&ring)).expect("works at first");
    // An upload asks how far its copy is as often as that takes.
    let map = upload(&mut ring);
    mock::hang(true);
    mock::inject("cuStreamQuery", 3, code);
    let (id, issued) = issue_map(&mut ring, &pool, &map, None);
    issued.expect("issued");
    let cause = format!("({code})");
    let hint = "start it anew";
    let answer = |found: Result<(), String>| {
        let text = found.expect_err("the GPU is lost");
        assert!(text.contains(&cause) && text.contains(hint), "{text}");
    };
    let words = |error: &dyn std::fmt::Display| error.to_string();
    let deadline = soon(&ring);
    answer(ring.wait_completion(id, deadline).map(drop).map_err(|e| words(&e)));
    for _ in 0..2 {
        answer(ring.poll().map(drop).map_err(|e| words(&e)));
        answer(ring.stop(deadline).map(drop).map_err(|e| words(&e)));
    }
    answer(device.healthy().map_err(|e| words(&e)));
    answer(device.pinned(1).map(drop).map_err(|e| words(&e)));
    let clock = rig.clock.clone();
    let made = CudaExecutor::new(&device, CudaOptions::default(), clock);
    answer(made.map(drop).map_err(|e| words(&e)));
    let live = mock::live();
    drop((map, ring, pool, rig, device));
    assert_eq!(mock::live(), live, "nothing was freed");
    mock::assert_thread_clean();
}

#[test]
fn a_stop_that_takes_too_long_can_be_tried_again() {
    for mode in MODES {
        isolated("faults::a_stop_that_takes_too_long_can_be_tried_again", Level::Full, &[], || {
            let device = rig::gpu();
            let (mut executor, page, args) = bare(&device, mode);
            executor.start(args, &[]).expect("starts");
            mock::hang(true);
            executor.submitted(1, 0).expect("launched");
            set_stop(&page);
            for _ in 0..2 {
                let now = MonotonicClock::default().now();
                let error = executor.stop(now).expect_err("it hangs");
                assert!(matches!(error, ExecutorError::StopTimeout { executor: "cuda" }));
            }
            mock::hang(false);
            executor.stop(WATCHDOG_NS).expect("it ends");
            executor.submitted(1, 0).expect_err("stopped");
            executor.stop(Nanos(0)).expect("stopped already");
            drop((executor, page, device));
            mock::assert_clean();
        });
    }
}

#[test]
fn a_resident_kernel_that_ends_by_itself() {
    isolated("faults::a_resident_kernel_that_ends_by_itself", Level::Full, &[], || {
        let device = rig::gpu();
        let (mut executor, page, args) = bare(&device, LaunchMode::Resident);
        executor.poll().expect_err("not started");
        executor.start(args, &[]).expect("starts");
        executor.start(args, &[]).expect_err("started already");
        executor.poll().expect("it runs");
        set_stop(&page);
        let error = loop {
            match executor.poll() {
                Ok(_) => std::thread::yield_now(),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("ended by itself"), "{error}");
        executor.stop(WATCHDOG_NS).expect("it has ended");
        drop((executor, page, device));
        mock::assert_clean();
    });
}

#[test]
fn what_a_running_kernel_may_use_is_leaked() {
    each("faults::what_a_running_kernel_may_use_is_leaked", Level::Full, &PLAIN, |case| {
        let mode = MODES[case];
        let device = rig::gpu();
        let (mut executor, page, args) = bare(&device, mode);
        mock::hang(true);
        executor.start(args, &[]).expect("starts");
        executor.submitted(1, 0).expect("launched");
        let live = mock::live();
        drop((executor, page, device));
        assert_eq!(mock::live(), live, "nothing was freed");
        assert_eq!(mock::count("freed while a kernel ran"), 0);
    });
}

#[test]
fn what_is_dropped_meanwhile_is_parked_and_used_again() {
    isolated(
        "faults::what_is_dropped_meanwhile_is_parked_and_used_again",
        Level::Full,
        &[],
        || {
            let device = rig::gpu();
            let (mut executor, page, args) = bare(&device, LaunchMode::Resident);
            let stream = gio_kernels::cuda::CudaStream::new(&device, Some(2)).expect("a stream");
            let memory = executor.alloc(100_000).expect("memory");
            executor.start(args, &[]).expect("starts");
            // SAFETY: inside the memory.
            unsafe { memory.host().as_ptr().write_volatile(9) };
            let (address, len) = (memory.address(), memory.len());
            drop((memory, stream));
            assert_eq!(mock::count("cuMemFreeHost") + mock::count("cuStreamDestroy"), 0);
            let allocations = mock::count("cuMemHostAlloc");
            let other = executor.alloc(4096).expect_err("nothing is pinned meanwhile");
            assert!(other.to_string().contains("arena_bytes"), "{other}");
            let again = executor.alloc(len).expect("memory");
            assert_eq!((again.address(), mock::count("cuMemHostAlloc")), (address, allocations));
            // SAFETY: as above.
            assert_eq!(unsafe { again.host().as_ptr().read_volatile() }, 0, "zeroed again");
            drop(again);
            set_stop(&page);
            executor.stop(WATCHDOG_NS).expect("stops");
            assert_eq!((mock::count("cuMemFreeHost"), mock::count("cuStreamDestroy")), (1, 1));
            drop((executor, page, device));
            mock::assert_clean();
        },
    );
}

#[test]
fn a_queue_out_of_reach_is_refused() {
    isolated("faults::a_queue_out_of_reach_is_refused", Level::Full, &[], || {
        let device = rig::gpu();
        let mut rig = Rig::new(device.clone(), 1, 2, 32);
        rig.reclaim(&Quiesced::default());
        // Queues in unregistered memory of the bus.
        let qid = rig.controllers[0].create_queue_pair(32).expect("a queue");
        let grant = rig.controllers[0].grant(qid, Nsid(1)).expect("a grant");
        let (executor, _page, _) = bare(&device, LaunchMode::PerBatch);
        let clock = rig.clock.clone();
        let options = UringOptions::default();
        let made = Uring::init_queue(16, Box::new(executor), clock, &[(0, grant)], options);
        let text = made.expect_err("out of reach").to_string();
        assert!(text.contains("submission queue") && text.contains("place it"), "{text}");
        let proof = rig.never_ran();
        rig.controllers[0].reclaim(qid, &proof).expect("taken back");
    });
}
