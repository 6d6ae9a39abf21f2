//! Both modes move the right bytes.
#![allow(unsafe_code, reason = "the driver API is reached by address, over memory of the tests")]

use cuda_mock::{self as mock, Level, isolated};
use gio_kernels::cuda::{CudaError, CudaStream, LaunchMode, StreamKind};
use gio_uring::{Affine, Flags, IoExecutor, Op, Signal, UringOptions, Wait};
use nvme_driver::{DevicePtr, Nanos};

use crate::rig::{self, Rig, bare, set_stop, stack_moves_bytes};

#[test]
fn a_launch_per_batch() {
    isolated("moves::a_launch_per_batch", Level::Full, &[], || {
        let device = rig::gpu();
        let shapes = [(1, 1), (2, 2), (3, 1)];
        for shape in shapes {
            stack_moves_bytes(&device, rig::options(LaunchMode::PerBatch), shape);
        }
        // Twelve rows are two batches; there and back, and all of it twice.
        assert_eq!(mock::count("cuLaunchKernel"), 8 * shapes.len() as i64);
        drop(device);
        mock::assert_clean();
    });
}

#[test]
fn a_resident_kernel() {
    isolated("moves::a_resident_kernel", Level::Full, &[], || {
        let device = rig::gpu();
        for shape in [(1, 1), (2, 2)] {
            stack_moves_bytes(&device, rig::options(LaunchMode::Resident), shape);
        }
        assert_eq!(mock::count("cuLaunchKernel"), 4);
        drop(device);
        mock::assert_clean();
    });
}

/// The mock does not mind that today's PTX is for a later driver.
#[test]
fn on_a_driver_without_green_contexts() {
    isolated("moves::on_a_driver_without_green_contexts", Level::Twelve, &[], || {
        let device = rig::gpu();
        stack_moves_bytes(&device, rig::options(LaunchMode::PerBatch), (2, 1));
        drop(device);
        mock::assert_clean();
    });
}

/// An engine's stream writes the word that an operation waits for, and waits for the one that it
/// signals: the host does nothing in between.
#[test]
fn operations_are_chained_with_a_stream() {
    isolated("moves::operations_are_chained_with_a_stream", Level::Full, &[], || {
        for mode in [LaunchMode::PerBatch, LaunchMode::Resident] {
            let device = rig::gpu();
            let engine = CudaStream::new(&device, None).expect("a stream");
            let mut rig = Rig::new(device.clone(), 1, 1, 32);
            let mut ring = rig.ring(rig::options(mode), UringOptions::default());
            let pool = rig.pool(&mut ring, 1, 16);
            let map: Vec<Affine> = (0..16).map(|i| Affine { block: i, file: i }).collect();
            let map = ring.upload_map(&map, 1).expect("a map");
            let (ready, done) = (ring.event().expect("a word"), ring.event().expect("a word"));
            let wait = Wait { event: ready.clone(), value: 1 };
            let ids = ring.get_iocb(1, Some(&wait)).expect("free");
            ring.signal(ids[0], &Signal { event: done.clone(), value: 5 }).expect("signals");
            let filled = ring.fill_affine(ids[0], Op::Read, Flags::NONE, &map, &pool.handle, 0..1);
            filled.expect("a row");
            ring.issue_io(&ids, 0).expect("issued");
            std::thread::sleep(std::time::Duration::from_millis(10));
            assert!(ring.try_cqe(ids[0]).expect("issued").is_none(), "it waits");
            // SAFETY: both words live until the ring is dropped, the stream until it is idle.
            unsafe {
                device.stream_write(engine.raw(), DevicePtr(ready.address()), 1).expect("writes");
                device.stream_wait(engine.raw(), DevicePtr(done.address()), 5, false).expect("ok");
            }
            let deadline = ring.now() + Nanos::from_millis(10_000);
            let completion = ring.wait_cqe(ids[0], deadline).expect("done");
            assert_eq!((completion.objects, completion.errors), (16, 0));
            while !engine.is_idle().expect("a stream") {
                std::thread::yield_now();
            }
            assert_eq!(done.read(), 5);
            let proof = ring.stop(deadline).expect("stops");
            rig.reclaim(&proof);
        }
        mock::assert_clean();
    });
}

/// A kernel that waits for its event keeps the launches behind it waiting. They are not piled up
/// until the driver waits in the thread that is to set the event.
#[test]
fn launches_do_not_pile_up() {
    isolated("moves::launches_do_not_pile_up", Level::Full, &[], || {
        let device = rig::gpu();
        let (mut executor, pages, args) = bare(&device, LaunchMode::PerBatch);
        executor.start(args).expect("starts");
        mock::hang(true);
        for _ in 0..300 {
            executor.submitted(0, 0).expect("noted");
        }
        assert_eq!(mock::count("cuLaunchKernel"), 256);
        mock::hang(false);
        while mock::count("cuLaunchKernel") == 256 {
            executor.poll().expect("well");
        }
        assert_eq!(mock::count("cuLaunchKernel"), 257, "one launch for all that was owed");
        executor.submitted(0, 0).expect("launched");
        assert_eq!(mock::count("cuLaunchKernel"), 258);
        set_stop(&pages);
        executor.stop(Nanos::from_millis(10_000)).expect("stops");
        drop((executor, pages, device));
        mock::assert_clean();
    });
}

/// The SMs that the I/O kernel leaves are a partition as well, and without partitions that is said.
#[test]
fn an_engine_beside_the_io_kernel() {
    let test = "moves::an_engine_beside_the_io_kernel";
    isolated(test, Level::Full, &[], || {
        let device = rig::gpu();
        let beside = CudaStream::beside(&device, 3).expect("a stream");
        let report = beside.report().clone();
        // The mock has 132 SMs, in twos.
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
    let test = "moves::nothing_beside_the_io_kernel_without_green_contexts";
    isolated(test, Level::Twelve, &[], || {
        let error = CudaStream::beside(&rig::gpu(), 3).expect_err("no green contexts");
        assert!(matches!(error, CudaError::Argument(_)), "{error}");
    });
}
