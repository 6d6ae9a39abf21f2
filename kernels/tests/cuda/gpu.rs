//! The same tests on a GPU, with the machine's driver.

use std::sync::Arc;

use gio_kernels::cuda::{CudaDevice, CudaOptions, CudaStream, LaunchMode};

use nvme_driver::Nanos;

use crate::{
    launches::submissions_while_the_kernel_leaves,
    rig::{self, stack_moves_bytes},
};

fn moves(device: &Arc<CudaDevice>, mode: LaunchMode, sms: Option<u32>) {
    for shape in [(1, 1), (2, 2), (3, 1)] {
        stack_moves_bytes(device, CudaOptions { mode, sms, ..CudaOptions::default() }, shape);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_launch_per_batch_moves_the_right_bytes() {
    let device = rig::only_gpu();
    moves(&device, LaunchMode::PerBatch, None);
    moves(&device, LaunchMode::PerBatch, Some(2));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_resident_kernel_moves_the_right_bytes() {
    let device = rig::only_gpu();
    moves(&device, LaunchMode::Resident, None);
    moves(&device, LaunchMode::Resident, Some(2));
}

/// The fences of both sides, on real hardware's memory model.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn no_submission_is_lost_while_the_kernel_leaves() {
    let device = rig::only_gpu();
    for linger in [0, 20_000, 200_000] {
        submissions_while_the_kernel_leaves(&device, Nanos(linger));
    }
}

/// On a GPU with green contexts (a driver for CUDA 12.5 or later) a partition has the requested
/// size, and not all SMs.
#[test]
#[ignore = "needs an NVIDIA GPU"]
#[allow(clippy::print_stdout, reason = "what the machine gave")]
fn a_partition_has_fewer_sms_than_the_gpu() {
    let device = rig::only_gpu();
    println!("{}", device.report());
    for sms in [1, 2, 5, 16] {
        let stream = CudaStream::new(&device, Some(sms)).expect("a stream");
        println!("{}", stream.report());
        let granted = stream.report().granted;
        assert!(granted >= sms && granted < device.report().sms, "{}", stream.report());
    }
}
