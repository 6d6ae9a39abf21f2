#![allow(unsafe_code, reason = "launches kernels on memory that is laid out here")]
//! The GPU under test, the benchmarks' own kernels on it, and stream helpers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use cudarc::driver::sys;
use gio_kernels::{
    cuda::{
        CudaDevice, CudaDriver, CudaError, CudaExecutor, CudaFunction, CudaModule, CudaOptions,
        CudaStream, PinnedMemory,
    },
    ptx,
};
use gio_uring::RawStream;
use nvme_driver::{Clock, platform::mmio};

use super::abi::{StampArgs, WhereArgs};

/// Kernels of the benchmarks, compiled from `bench/ptx/bench_gpu.cu`.
pub const PTX: &str = include_str!("../../ptx/bench_gpu.ptx");
/// Name of the mock's GPU.
const MOCK: &str = "Mock GPU";
/// Default timeout.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// A GPU and the kernels.
#[derive(Debug)]
pub struct Gpu {
    pub device: Arc<CudaDevice>,
    /// The I/O kernel, compiled once for all executors.
    io: CudaFunction,
    pub instant: CudaFunction,
    pub matmul: CudaFunction,
    pub fill: CudaFunction,
    pub crc: CudaFunction,
    pub read: CudaFunction,
    stamp: CudaFunction,
    place: CudaFunction,
}

impl Gpu {
    /// Opens GPU `ordinal` and compiles the kernels. Must be called first in the program.
    pub fn open(ordinal: u32) -> Result<Self> {
        // SAFETY: there is only one thread so far.
        unsafe { CudaDriver::set_environment() };
        let driver = CudaDriver::load().context("the GPU benchmarks need an NVIDIA GPU")?;
        let device = driver.device(ordinal)?;
        let module = CudaModule::compile(&device, PTX, "the GPU benchmarks")?;
        let function = |entry| module.function(entry);
        let io = CudaModule::compile(&device, ptx::PTX, "the I/O kernel")?.function(ptx::ENTRY)?;
        Ok(Self {
            io,
            instant: function("bench_instant")?,
            matmul: function("bench_matmul")?,
            fill: function("bench_fill")?,
            crc: function("bench_crc")?,
            read: function("bench_read")?,
            stamp: function("bench_stamp")?,
            place: function("bench_where")?,
            device,
        })
    }

    /// Creates an executor.
    pub fn executor(
        &self,
        options: CudaOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<CudaExecutor, CudaError> {
        CudaExecutor::with_kernel(&self.io, options, clock)
    }

    /// Returns true for the mock, whose figures are meaningless.
    pub fn is_mock(&self) -> bool {
        self.device.report().name == MOCK
    }

    /// Waits for all work in the primary context, as `torch.cuda.synchronize` does. Never returns
    /// if a kernel does not end.
    pub fn synchronize(&self) -> Result<()> {
        let mut context = std::ptr::null_mut();
        let mut device = 0;
        let ordinal = i32::try_from(self.device.report().ordinal)?;
        // SAFETY: the calls write a device and its context; `self.device` retains the context for
        // longer than it is current here, and it is popped again.
        let results = unsafe {
            [
                sys::cuDeviceGet(&raw mut device, ordinal),
                sys::cuDevicePrimaryCtxRetain(&raw mut context, device),
                sys::cuCtxPushCurrent_v2(context),
                sys::cuCtxSynchronize(),
                sys::cuCtxPopCurrent_v2(&raw mut context),
                sys::cuDevicePrimaryCtxRelease_v2(device),
            ]
        };
        let failed = results.into_iter().find(|result| *result != sys::CUresult::CUDA_SUCCESS);
        failed.map_or(Ok(()), |result| bail!("waiting for the context: {result:?}"))
    }

    /// Converts a stream to a [`RawStream`].
    pub fn raw(stream: &CudaStream) -> RawStream {
        // SAFETY: a stream of the GPU; its user keeps the stream alive, as each function of the
        // benchmarks does until the stream is idle.
        unsafe { RawStream::new(stream.raw()) }
    }

    /// Returns the numbers of the SMs that kernels on this stream run on.
    pub fn sms_of(&self, stream: &CudaStream) -> Result<Vec<u32>> {
        const HOLD_NS: u64 = 300_000;
        let sms = self.device.report().sms;
        let page = self.device.pinned(sms as usize * 4)?;
        let at = page.device().0;
        let args = WhereArgs { at, hold_ns: HOLD_NS, sms, reserved: 0 };
        // Blocks of 1024 threads, of which one or two fill an SM: enough to reach every SM.
        // SAFETY: the argument's type is that of abi.h; the page lives until the stream is idle.
        unsafe { self.place.launch(Self::raw(stream), 4 * sms, 1024, args)? };
        wait_idle(stream, TIMEOUT)?;
        Ok((0..sms).filter(|sm| word(&page, *sm as usize * 4) != 0).collect())
    }
}

/// Two time stamps in a stream, taken by the GPU's own clock.
pub struct Span {
    page: PinnedMemory,
}

impl Span {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self { page: gpu.device.pinned(16)? })
    }

    /// Runs `work` between two time stamps on `stream`, waits for it, and returns the time between.
    pub fn time(
        &self,
        gpu: &Gpu,
        stream: &CudaStream,
        timeout: Duration,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Duration> {
        let stamp = |offset: u64| -> Result<()> {
            let args = StampArgs { at: self.page.device().0 + offset };
            // SAFETY: same as in `sms_of`.
            unsafe { gpu.stamp.launch(Gpu::raw(stream), 1, 32, args)? };
            Ok(())
        };
        stamp(0)?;
        let done = work();
        stamp(8)?;
        wait_idle(stream, timeout)?;
        done?;
        let ns =
            |at: usize| u64::from(word(&self.page, at + 4)) << 32 | u64::from(word(&self.page, at));
        Ok(Duration::from_nanos(ns(8).saturating_sub(ns(0))))
    }
}

/// Reads a word of pinned memory.
pub fn word(memory: &PinnedMemory, offset: usize) -> u32 {
    assert!(offset + 4 <= memory.len() && offset.is_multiple_of(4));
    // SAFETY: inside the memory, and aligned.
    unsafe { mmio::load_acquire32(memory.host().byte_add(offset).cast()) }
}

/// Writes a word of pinned memory.
pub fn set_word(memory: &PinnedMemory, offset: usize, value: u32) {
    assert!(offset + 4 <= memory.len() && offset.is_multiple_of(4));
    // SAFETY: inside the memory, and aligned.
    unsafe { mmio::store_release32(memory.host().byte_add(offset).cast(), value) }
}

/// Waits until the stream is idle. Polls rarely: each query takes a driver lock that launches need,
/// too.
pub fn wait_idle(stream: &CudaStream, timeout: Duration) -> Result<()> {
    let start = Instant::now();
    while !stream.is_idle()? {
        if start.elapsed() > timeout {
            bail!("a kernel did not end within {timeout:?}");
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}
