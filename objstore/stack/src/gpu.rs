//! A GPU that runs the I/O kernel, opened once, before anything else is built.

use std::sync::{Arc, Mutex};

use gio_kernels::cuda::{
    CudaCopies, CudaDevice, CudaDriver, CudaError, CudaExecutor, CudaOptions, CudaReport,
    CudaStreams, Gdr, GdrError, LaunchMode, MappingKind,
};
use kv_catalog::lock;
use nvme_driver::{Clock, CopyEngine, DmaMemory, DmaSpace, ExternalMemory, MonotonicClock};
use objstore::StoreGpu;

use crate::{error::StackError, pool::whole_pages};

/// Size of the pages in which GPU memory is mapped.
const PAGE: usize = 64 << 10;
/// Pinned memory for copies: the most that the software controllers of one address space use at a
/// time, and some for testing routes.
const COPY_BYTES: usize = 80 << 20;
/// Advice to enable the direct route to drives.
const GDRCOPY: &str = "install GDRCopy (libgdrapi and the gdrdrv module); nvme-bind doctor shows \
                       what else drives need to reach GPU memory";
/// Advice against too little memory.
const FEWER: &str = "ask for fewer blocks of the KV pool";

/// The part of a GPU to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaChoice {
    /// Its CUDA ordinal.
    pub ordinal: u32,
    /// SMs of the I/O kernel.
    pub sms: u32,
    /// True when the I/O kernel stays resident on them; otherwise it is launched for each batch.
    pub is_resident: bool,
}

impl CudaChoice {
    /// Returns the choice of this GPU, with a launch for each batch.
    #[must_use]
    pub const fn new(ordinal: u32) -> Self {
        Self { ordinal, sms: 4, is_resident: false }
    }
}

/// An open GPU and the resources in use on it.
#[derive(Debug)]
pub struct Gpu {
    device: Arc<CudaDevice>,
    copies: Arc<CudaCopies>,
    streams: Arc<CudaStreams>,
    gdr: Result<Gdr, GdrError>,
    /// Report of the last executor.
    ran: Mutex<Option<CudaReport>>,
}

impl Gpu {
    /// Loads the driver and opens the GPU.
    ///
    /// # Errors
    /// Returns [`CudaError`] if there is no driver, no such GPU, or too few resources on it.
    pub fn open(choice: CudaChoice) -> Result<Arc<Self>, CudaError> {
        Self::on(CudaDriver::load()?.device(choice.ordinal)?, choice)
    }

    /// Compiles the kernels for `device`, and takes the resources that must be taken before a
    /// resident kernel runs.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn on(device: Arc<CudaDevice>, choice: CudaChoice) -> Result<Arc<Self>, CudaError> {
        let gpu = Self::for_copies(device)?;
        // Detects before anything is built whether the I/O kernel compiles and gets its SMs.
        gpu.executor(choice, Arc::new(MonotonicClock::default()))?;
        Ok(gpu)
    }

    /// Same as [`Gpu::on`], without an I/O kernel: no SMs are reserved.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub(crate) fn for_copies(device: Arc<CudaDevice>) -> Result<Arc<Self>, CudaError> {
        Ok(Arc::new(Self {
            copies: Arc::new(CudaCopies::with_host_memory(&device, COPY_BYTES)?),
            streams: Arc::new(CudaStreams::new(&device)?),
            gdr: Gdr::open(),
            ran: Mutex::default(),
            device,
        }))
    }

    /// Makes an executor on this GPU.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub(crate) fn executor(
        &self,
        choice: CudaChoice,
        clock: Arc<dyn Clock>,
    ) -> Result<CudaExecutor, CudaError> {
        let mode = if choice.is_resident { LaunchMode::Resident } else { LaunchMode::PerBatch };
        let options = CudaOptions { mode, sms: Some(choice.sms), ..CudaOptions::default() };
        let executor = CudaExecutor::new(&self.device, options, clock)?;
        *lock(&self.ran) = Some(executor.report());
        Ok(executor)
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Returns the copy engine for software controllers.
    pub(crate) fn copies(&self) -> Arc<dyn CopyEngine> {
        self.copies.clone()
    }

    /// Returns the parts that a store needs.
    #[must_use]
    pub fn for_store(&self) -> StoreGpu {
        StoreGpu { streams: self.streams.clone(), copies: self.copies.clone() }
    }

    /// Allocates `bytes` bytes of GPU memory, in whole pages.
    ///
    /// # Errors
    /// Returns [`StackError::Unfit`] if too little memory is free.
    pub(crate) fn memory(&self, bytes: usize) -> Result<ExternalMemory, StackError> {
        let allocated = self.device.allocate(bytes.next_multiple_of(PAGE));
        Ok(allocated.map_err(of_memory)?.into_external())
    }

    /// Allocates pinned host memory that GPU and devices reach.
    ///
    /// # Errors
    /// Returns [`StackError::Unfit`] if too little memory is free.
    pub fn staging(
        &self,
        space: &dyn DmaSpace,
        bytes: usize,
    ) -> Result<Arc<dyn DmaMemory>, StackError> {
        let pinned = self.device.pinned(bytes).map_err(of_memory)?;
        space.import(pinned.into_external()).map_err(|error| {
            StackError::unfit(format!("mapping pinned memory for devices: {error}"), "")
        })
    }

    /// Allocates GPU memory with an address in this process, mapped for devices.
    ///
    /// # Errors
    /// Returns [`StackError::Unfit`] without GDRCopy, or if drives could not reach the memory.
    pub fn mapped(
        &self,
        space: &dyn DmaSpace,
        bytes: usize,
    ) -> Result<(Arc<dyn DmaMemory>, MappingKind), StackError> {
        self.check_mapping()?;
        let (memory, _, kind) = self.map(space, self.memory(bytes)?)?;
        Ok((memory, kind))
    }

    /// Checks that drives' writes into GPU memory become visible, and the process can map it.
    fn check_mapping(&self) -> Result<&Gdr, StackError> {
        if !self.streams.orders_peer_writes() {
            let why = "what a drive writes into this GPU's memory may become visible after its \
                       completion, and the driver cannot flush it";
            return Err(StackError::unfit(why, "use another GPU"));
        }
        self.gdr.as_ref().map_err(|error| StackError::unfit(error, GDRCOPY))
    }

    /// Same as [`Gpu::mapped`], for existing memory; also returns its offset in the first page.
    ///
    /// # Errors
    /// Same as [`Gpu::mapped`].
    pub(crate) fn map(
        &self,
        space: &dyn DmaSpace,
        memory: ExternalMemory,
    ) -> Result<(Arc<dyn DmaMemory>, usize, MappingKind), StackError> {
        let mapping = self.check_mapping()?.map(&self.device, memory);
        let mapping = mapping.map_err(|error| StackError::unfit(error, GDRCOPY))?;
        let kind = mapping.kind();
        // GDRCopy maps pages of the GPU, which are whole pages of the host.
        let (pages, head) = whole_pages(mapping.into_external());
        let mapped = space.import(pages).map_err(|error| {
            StackError::unfit(format!("mapping GPU memory for devices: {error}"), "")
        })?;
        Ok((mapped, head, kind))
    }

    /// Returns GDRCopy, if it is available.
    ///
    /// # Errors
    /// Returns the reason why it is not.
    pub fn gdrcopy(&self) -> Result<&Gdr, &GdrError> {
        self.gdr.as_ref()
    }

    /// Returns the report of the last executor: the GPU, and the resources it was granted.
    #[must_use]
    pub fn report(&self) -> Option<CudaReport> {
        lock(&self.ran).clone()
    }
}

/// Converts an allocation error: less memory may do, unless the GPU is lost.
fn of_memory(error: CudaError) -> StackError {
    match error.code() {
        Some(code) if code.is_sticky() => error.into(),
        _ => StackError::unfit(error, FEWER),
    }
}
