//! The GPU of `--executor cuda`: opened once, before anything else is built.

#![allow(unsafe_code, reason = "sets an environment variable that the NVIDIA driver reads")]

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use gio_kernels::cuda::{
    CudaDevice, CudaDriver, CudaError, CudaExecutor, CudaOptions, CudaReport, DoorbellKind,
    LaunchMode, Registration, StreamKind,
};
use gio_uring::{ExecutorError, IoExecutor};
use nvme_driver::{Bus, Clock, DmaMemory, DmaSpace};
use objstore::ExecutorFactory;
use serde::Serialize;

use crate::cli::GpuChoice;
use crate::problem::Problem;

/// What to do without a GPU.
const INSTEAD: &str = "use --executor host: the same I/O kernel, compiled for the host and run by \
                       threads; ripieno doctor shows what is missing for the GPU";

/// Lets the driver load kernels when they are compiled, and not at their first launch, which would
/// wait for a resident kernel to end. What the user chose is left as it is.
///
/// To be called while this process has one thread.
pub(crate) fn load_eagerly() {
    const LOADING: &str = "CUDA_MODULE_LOADING";
    if std::env::var_os(LOADING).is_none() {
        // SAFETY: no other thread exists that could read or write the environment.
        unsafe { std::env::set_var(LOADING, "EAGER") };
    }
}

/// A GPU, and what is used of it.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: Arc<CudaDevice>,
    choice: GpuChoice,
    /// How the last executor runs.
    ran: Mutex<Option<CudaReport>>,
}

impl Gpu {
    /// Loads the driver and opens the GPU.
    ///
    /// # Errors
    /// [`Problem`] when there is no driver, no such GPU, or not enough of it.
    pub(crate) fn open(choice: GpuChoice) -> Result<Arc<Self>, Problem> {
        let refuse = |error: CudaError| Problem::new(format!("--executor cuda: {error}"), INSTEAD);
        let device = CudaDriver::load().and_then(|driver| driver.device(choice.ordinal));
        let device = device.map_err(refuse)?;
        let gpu = Arc::new(Self { device, choice, ran: Mutex::default() });
        // Whether the I/O kernel compiles and gets its SMs is found out before anything is built.
        gpu.make_executor(Arc::new(nvme_driver::MonotonicClock::default())).map_err(refuse)?;
        Ok(gpu)
    }

    fn make_executor(&self, clock: Arc<dyn Clock>) -> Result<CudaExecutor, CudaError> {
        let mode =
            if self.choice.is_resident { LaunchMode::Resident } else { LaunchMode::PerBatch };
        let options = CudaOptions { mode, sms: Some(self.choice.io_sms) };
        let executor = CudaExecutor::new(&self.device, options, clock)?;
        *self.ran.lock().unwrap_or_else(PoisonError::into_inner) = Some(executor.report());
        Ok(executor)
    }

    /// Makes executors on this GPU.
    pub(crate) fn executor(self: &Arc<Self>, clock: Arc<dyn Clock>) -> ExecutorFactory {
        let gpu = self.clone();
        Box::new(move || -> Result<Box<dyn IoExecutor>, ExecutorError> {
            Ok(Box::new(gpu.make_executor(clock.clone())?))
        })
    }

    /// Lets the I/O kernel reach a controller's doorbells.
    ///
    /// # Errors
    /// When this machine does not let a GPU do that.
    pub(crate) fn doorbells(
        &self,
        bus: &Arc<dyn Bus>,
        kind: DoorbellKind,
    ) -> anyhow::Result<Arc<Registration>> {
        self.device.register_doorbells(bus, kind).context("--executor cuda")
    }

    /// Lets kernels reach memory of a DMA space.
    ///
    /// # Errors
    /// When there is no more that can be pinned.
    pub(crate) fn register(
        &self,
        memory: &Arc<dyn DmaMemory>,
    ) -> anyhow::Result<Arc<Registration>> {
        self.device.register_memory(memory).context("--executor cuda")
    }

    /// Memory for queues and descriptors, which host, GPU and controllers reach, and its name.
    ///
    /// # Errors
    /// When there is not so much of it.
    pub(crate) fn queue_memory(
        &self,
        space: &dyn DmaSpace,
        bytes: usize,
    ) -> anyhow::Result<(Arc<dyn DmaMemory>, &'static str)> {
        let pinned = self.device.pinned(bytes).context("memory for queues")?;
        let memory = space.import(pinned.into_external()).context("memory for queues")?;
        Ok((memory, "pinned host memory"))
    }

    /// What there is and what was granted.
    pub(crate) fn report(&self) -> Option<GpuReport> {
        let ran = self.ran.lock().unwrap_or_else(PoisonError::into_inner);
        ran.as_ref().map(GpuReport::new)
    }
}

/// The GPU that ran the I/O kernel. Field names are those of the JSON object.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct GpuReport {
    /// Its number.
    pub(crate) gpu: u32,
    pub(crate) name: String,
    pub(crate) pci: String,
    /// The CUDA version that the driver implements.
    pub(crate) driver: String,
    pub(crate) compute_capability: String,
    pub(crate) sms: u32,
    /// SMs that were asked for, and those the I/O kernel may run on.
    pub(crate) io_sms_asked: Option<u32>,
    pub(crate) io_sms_granted: u32,
    /// green context, or priority stream.
    pub(crate) partition: &'static str,
    /// Why the SMs are not its own; null if they are.
    pub(crate) partition_missing: Option<String>,
    /// per-batch, or resident.
    pub(crate) launch: &'static str,
    /// For which GPUs' kernels what a peer writes into its memory is in order.
    pub(crate) writes_ordering: String,
}

impl GpuReport {
    fn new(report: &CudaReport) -> Self {
        let CudaReport { device, partition, mode, .. } = report;
        let (major, minor) = device.capability;
        let version = device.driver_version;
        let missing = match &partition.kind {
            StreamKind::Priority { instead, .. } => instead.clone(),
            StreamKind::Green => None,
        };
        Self {
            gpu: device.ordinal,
            name: device.name.clone(),
            pci: device.pci.clone(),
            driver: format!("{}.{}", version / 1000, version % 1000 / 10),
            compute_capability: format!("{major}.{minor}"),
            sms: device.sms,
            io_sms_asked: partition.asked,
            io_sms_granted: partition.granted,
            partition: match partition.kind {
                StreamKind::Green => "green context",
                StreamKind::Priority { .. } => "priority stream",
            },
            partition_missing: missing,
            launch: match mode {
                LaunchMode::PerBatch => "per-batch",
                LaunchMode::Resident => "resident",
            },
            writes_ordering: device.writes_ordering.to_string(),
        }
    }

    /// What it is, in a few words.
    pub(crate) fn device_words(&self) -> String {
        format!("GPU {} {} at {}", self.gpu, self.name, self.pci)
    }

    /// How the I/O kernel ran, in a few words.
    pub(crate) fn kernel_words(&self) -> String {
        let launch = match self.launch {
            "resident" => "resident kernel",
            _ => "a launch per batch",
        };
        let asked = self.io_sms_asked.unwrap_or(self.io_sms_granted);
        let partition = match &self.partition_missing {
            None => format!("{} of {} SMs ({asked} asked for)", self.io_sms_granted, self.sms),
            Some(why) => format!("all {} SMs, NOT {asked} of its own: {why}", self.sms),
        };
        format!("{launch} on {partition}, {}", self.partition)
    }
}
