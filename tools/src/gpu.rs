//! The GPU of `--executor cuda`: opened once, before anything else is built.

#![allow(unsafe_code, reason = "sets an environment variable that the NVIDIA driver reads")]

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use gio_kernels::cuda::{
    CudaCopies, CudaDevice, CudaDriver, CudaError, CudaExecutor, CudaOptions, CudaPattern,
    CudaReport, CudaStream, CudaStreams, DeviceMemory, DoorbellKind, Gdr, GdrError, LaunchMode,
    MappingKind, Registration, StreamKind,
};
use gio_uring::{ExecutorError, IoExecutor, RawStream};
use nvme_driver::{
    Bus, Clock, CopyEngine, DevicePtr, DmaMemory, DmaSpace, ExternalMemory, MonotonicClock,
};
use objstore::{ExecutorFactory, StoreGpu};
use serde::Serialize;

use crate::config::GpuChoice;
use crate::problem::{Problem, unfit};

/// Pages that the GPU's memory is mapped in.
const PAGE: usize = 64 << 10;
/// Pinned memory for copies: what the software controllers of one address space ask for at once,
/// and some for trying routes.
const COPY_BYTES: usize = 80 << 20;
/// What opens the direct route to drives.
const GDRCOPY: &str = "install GDRCopy (libgdrapi and the gdrdrv module); nvme-bind doctor shows \
                       what else drives need to reach GPU memory";
/// What to do without a GPU.
const INSTEAD: &str = "use --executor host: the same I/O kernel, compiled for the host and run by \
                       threads; ripieno doctor shows what is missing for the GPU";

fn refused(error: &CudaError) -> Problem {
    Problem::new(format!("--executor cuda: {error}"), INSTEAD)
}

/// What the driver reads from the environment. To be called while this process has one thread.
pub(crate) fn set_environment() {
    // SAFETY: no other thread exists that could read or write the environment.
    unsafe { CudaDriver::set_environment() };
}

/// What keeps memory.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// A GPU, and what is used of it.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: Arc<CudaDevice>,
    copies: Arc<CudaCopies>,
    streams: Arc<CudaStreams>,
    /// Where the engine's work is: below the I/O kernel's priority, on all SMs.
    engine: CudaStream,
    gdr: Result<Gdr, GdrError>,
    /// How the last executor runs.
    ran: Mutex<Option<CudaReport>>,
}

impl Gpu {
    /// Loads the driver and opens the GPU.
    ///
    /// # Errors
    /// [`Problem`] when there is no driver, no such GPU, or not enough of it.
    pub(crate) fn open(choice: GpuChoice) -> Result<Arc<Self>, Problem> {
        let device = CudaDriver::load().and_then(|driver| driver.device(choice.ordinal));
        let opened = device.and_then(|device| Self::on(device, choice));
        opened.map_err(|error| refused(&error))
    }

    /// Compiles what is going to run on `device`, and takes what can only be taken before a
    /// resident kernel runs.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn on(device: Arc<CudaDevice>, choice: GpuChoice) -> Result<Arc<Self>, CudaError> {
        let gpu = Arc::new(Self {
            copies: Arc::new(CudaCopies::with_host_memory(&device, COPY_BYTES)?),
            streams: Arc::new(CudaStreams::new(&device)?),
            engine: CudaStream::lowest(&device)?,
            gdr: Gdr::open(),
            ran: Mutex::default(),
            device,
        });
        // Whether the I/O kernel compiles and gets its SMs is found out before anything is built.
        gpu.make_executor(choice, Arc::new(MonotonicClock::default()))?;
        Ok(gpu)
    }

    fn make_executor(
        &self,
        choice: GpuChoice,
        clock: Arc<dyn Clock>,
    ) -> Result<CudaExecutor, CudaError> {
        let mode = if choice.is_resident { LaunchMode::Resident } else { LaunchMode::PerBatch };
        let options = CudaOptions { mode, sms: Some(choice.io_sms), ..CudaOptions::default() };
        let executor = CudaExecutor::new(&self.device, options, clock)?;
        *self.ran.lock().unwrap_or_else(PoisonError::into_inner) = Some(executor.report());
        Ok(executor)
    }

    /// Makes executors on this GPU.
    pub(crate) fn executor(
        self: &Arc<Self>,
        choice: GpuChoice,
        clock: Arc<dyn Clock>,
    ) -> ExecutorFactory {
        let gpu = self.clone();
        Box::new(move || -> Result<Box<dyn IoExecutor>, ExecutorError> {
            Ok(Box::new(gpu.make_executor(choice, clock.clone())?))
        })
    }

    /// Lets the I/O kernel reach a controller's doorbells.
    ///
    /// # Errors
    /// [`Problem`] when this machine does not let a GPU do that.
    pub(crate) fn doorbells(
        &self,
        bus: &Arc<dyn Bus>,
        kind: DoorbellKind,
    ) -> anyhow::Result<Arc<Registration>> {
        Ok(self.device.register_doorbells(bus, kind).map_err(|error| refused(&error))?)
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

    /// What moves bytes for software controllers.
    pub(crate) fn copies(&self) -> Arc<dyn CopyEngine> {
        self.copies.clone()
    }

    /// What a store needs of it.
    pub(crate) fn for_store(&self) -> StoreGpu {
        StoreGpu { streams: self.streams.clone(), copies: self.copies.clone() }
    }

    /// The engine's stream.
    pub(crate) fn stream(&self) -> RawStream {
        // SAFETY: a stream of the GPU that `streams` is of, too; its user keeps this GPU.
        unsafe { RawStream::new(self.engine.raw()) }
    }

    /// What makes and compares contents, up to so many items at a time.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn pattern(&self, items: usize) -> anyhow::Result<CudaPattern> {
        CudaPattern::with_items(&self.device, items).context("memory for checks")
    }

    /// `bytes` bytes of its memory: to be mapped, where they are, and what keeps them.
    ///
    /// # Errors
    /// [`crate::problem::Unfit`] when it has no more so many.
    pub(crate) fn memory(
        &self,
        bytes: usize,
    ) -> anyhow::Result<(ExternalMemory, DevicePtr, Owner)> {
        let memory = self.allocate(bytes)?;
        let base = memory.device();
        let (host, device, len, owner) = memory.into_external().into_parts();
        // SAFETY: put together again as it was.
        let memory = unsafe { ExternalMemory::new(host, device, len, owner.clone()) };
        Ok((memory, base, owner))
    }

    fn allocate(&self, bytes: usize) -> anyhow::Result<DeviceMemory> {
        let len = bytes.next_multiple_of(PAGE);
        self.device.allocate(len).map_err(|error| unfit(error, "ask for fewer --pool-blocks"))
    }

    /// Pinned memory of the host that GPU and devices reach.
    ///
    /// # Errors
    /// [`crate::problem::Unfit`] when there is no more so much.
    pub(crate) fn staging(
        &self,
        space: &dyn DmaSpace,
        bytes: usize,
    ) -> anyhow::Result<Arc<dyn DmaMemory>> {
        let pinned = self.device.pinned(bytes);
        let pinned = pinned.map_err(|error| unfit(error, "ask for fewer --pool-blocks"))?;
        let mapped = space.import(pinned.into_external());
        mapped.map_err(|error| unfit(format!("mapping pinned memory for devices: {error}"), ""))
    }

    /// Memory of the GPU that has an address in this process, mapped for devices.
    ///
    /// # Errors
    /// [`crate::problem::Unfit`] without GDRCopy, and where drives would not find their way there.
    pub(crate) fn mapped(
        &self,
        space: &dyn DmaSpace,
        bytes: usize,
    ) -> anyhow::Result<(Arc<dyn DmaMemory>, MappingKind)> {
        if !self.streams.orders_peer_writes() {
            let why = "what a drive writes into this GPU's memory may become visible after its \
                       completion, and the driver cannot flush it";
            return Err(unfit(why, "use another GPU"));
        }
        let gdr = self.gdr.as_ref().map_err(|error| unfit(error, GDRCOPY))?;
        let mapping = gdr.map(&self.device, self.allocate(bytes)?.into_external());
        let mapping = mapping.map_err(|error| unfit(error, GDRCOPY))?;
        let kind = mapping.kind();
        let mapped = space.import(mapping.into_external());
        let mapped = mapped
            .map_err(|error| unfit(format!("mapping GPU memory for devices: {error}"), ""))?;
        Ok((mapped, kind))
    }

    /// Whether GDRCopy is there.
    pub(crate) fn gdrcopy(&self) -> Result<&Gdr, &GdrError> {
        self.gdr.as_ref()
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
        format!("{launch} on {}", self.partition_words())
    }

    /// The part of the GPU that is used.
    pub(crate) fn partition_words(&self) -> String {
        let asked = self.io_sms_asked.unwrap_or(self.io_sms_granted);
        let Self { io_sms_granted, sms, partition, .. } = self;
        match &self.partition_missing {
            None => format!("{io_sms_granted} of {sms} SMs ({asked} asked for), {partition}"),
            Some(why) => format!("all {sms} SMs, NOT {asked} of its own: {why}; {partition}"),
        }
    }
}
