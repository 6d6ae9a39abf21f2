#![allow(unsafe_code, reason = "launches kernels on memory that is laid out here")]
//! The GPU under test, the benchmarks' own kernel on it, and stream helpers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use gio_kernels::{
    cuda::{
        CudaDevice, CudaDriver, CudaError, CudaExecutor, CudaFunction, CudaModule, CudaOptions,
        CudaStream, PinnedMemory,
    },
    ptx,
};
use gio_uring::RawStream;
use nvme_driver::{Clock, platform::mmio};

/// Kernel of the benchmarks, compiled from `bench/ptx/bench_gpu.cu`.
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
}

impl Gpu {
    /// Opens GPU `ordinal` and compiles the kernels. Must be called first in the program.
    pub fn open(ordinal: u32) -> Result<Self> {
        // SAFETY: there is only one thread so far.
        unsafe { CudaDriver::set_environment() };
        let driver = CudaDriver::load().context("the GPU benchmarks need an NVIDIA GPU")?;
        let device = driver.device(ordinal)?;
        let module = CudaModule::compile(&device, PTX, "the GPU benchmarks")?;
        let io = CudaModule::compile(&device, ptx::PTX, "the I/O kernel")?.function(ptx::ENTRY)?;
        Ok(Self { io, instant: module.function("bench_instant")?, device })
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

    /// Converts a stream to a [`RawStream`].
    pub fn raw(stream: &CudaStream) -> RawStream {
        // SAFETY: a stream of the GPU; its user keeps the stream alive, as each function of the
        // benchmarks does until the stream is idle.
        unsafe { RawStream::new(stream.raw()) }
    }
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
