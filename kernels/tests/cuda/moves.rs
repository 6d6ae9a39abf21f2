//! Both modes move the right bytes.

use cuda_mock::{self as mock, Level, isolated};
use gio_kernels::cuda::{CudaError, CudaStream, LaunchMode, StreamKind};
use gio_uring::IoExecutor;
use nvme_driver::Nanos;

use crate::rig::{self, bare, set_stop, stack_moves_bytes};

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

/// A kernel that waits for its event keeps the launches behind it waiting. They are not piled up
/// until the driver waits in the thread that is to set the event.
#[test]
fn launches_do_not_pile_up() {
    isolated("moves::launches_do_not_pile_up", Level::Full, &[], || {
        let device = rig::gpu();
        let (mut executor, pages, args) = bare(&device, LaunchMode::PerBatch);
        executor.start(args, &[]).expect("starts");
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
