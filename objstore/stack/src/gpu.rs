//! A GPU that runs the I/O kernel: opened once, before anything else is built.

use std::sync::{Arc, Mutex, PoisonError};

use gio_kernels::cuda::{
    CudaCopies, CudaDevice, CudaDriver, CudaError, CudaExecutor, CudaOptions, CudaReport,
    CudaStreams, Gdr, GdrError, LaunchMode, MappingKind,
};
use nvme_driver::{Clock, CopyEngine, DmaMemory, DmaSpace, ExternalMemory, MonotonicClock};
use objstore::StoreGpu;

use crate::{error::StackError, pool::whole_pages};

/// Pages that the GPU's memory is mapped in.
const PAGE: usize = 64 << 10;
/// Pinned memory for copies: what the software controllers of one address space ask for at once,
/// and some for trying routes.
const COPY_BYTES: usize = 80 << 20;
/// What opens the direct route to drives.
const GDRCOPY: &str = "install GDRCopy (libgdrapi and the gdrdrv module); nvme-bind doctor shows \
                       what else drives need to reach GPU memory";
/// What to do about too little memory.
const FEWER: &str = "ask for fewer blocks of the KV pool";

/// What is used of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaChoice {
    /// Its number, as CUDA counts.
    pub ordinal: u32,
    /// SMs of the I/O kernel.
    pub io_sms: u32,
    /// The I/O kernel stays on them; else it is launched for each batch.
    pub is_resident: bool,
}

impl CudaChoice {
    /// SMs of the I/O kernel, where nobody asked for a number.
    pub const IO_SMS: u32 = 4;

    /// This GPU, with a launch for each batch.
    #[must_use]
    pub fn new(ordinal: u32) -> Self {
        Self { ordinal, io_sms: Self::IO_SMS, is_resident: false }
    }
}

/// A GPU, and what is used of it.
#[derive(Debug)]
pub struct Gpu {
    device: Arc<CudaDevice>,
    copies: Arc<CudaCopies>,
    streams: Arc<CudaStreams>,
    gdr: Result<Gdr, GdrError>,
    /// How the last executor runs.
    ran: Mutex<Option<CudaReport>>,
}

impl Gpu {
    /// Loads the driver and opens the GPU.
    ///
    /// # Errors
    /// [`CudaError`] when there is no driver, no such GPU, or not enough of it.
    pub fn open(choice: CudaChoice) -> Result<Arc<Self>, CudaError> {
        Self::on(CudaDriver::load()?.device(choice.ordinal)?, choice)
    }

    /// Compiles what is going to run on `device`, and takes what can only be taken before a
    /// resident kernel runs.
    ///
    /// # Errors
    /// What the driver says.
    pub fn on(device: Arc<CudaDevice>, choice: CudaChoice) -> Result<Arc<Self>, CudaError> {
        let gpu = Arc::new(Self {
            copies: Arc::new(CudaCopies::with_host_memory(&device, COPY_BYTES)?),
            streams: Arc::new(CudaStreams::new(&device)?),
            gdr: Gdr::open(),
            ran: Mutex::default(),
            device,
        });
        // Whether the I/O kernel compiles and gets its SMs is found out before anything is built.
        gpu.executor(choice, Arc::new(MonotonicClock::default()))?;
        Ok(gpu)
    }

    /// An executor on this GPU.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn executor(
        &self,
        choice: CudaChoice,
        clock: Arc<dyn Clock>,
    ) -> Result<CudaExecutor, CudaError> {
        let mode = if choice.is_resident { LaunchMode::Resident } else { LaunchMode::PerBatch };
        let options = CudaOptions { mode, sms: Some(choice.io_sms), ..CudaOptions::default() };
        let executor = CudaExecutor::new(&self.device, options, clock)?;
        *self.ran.lock().unwrap_or_else(PoisonError::into_inner) = Some(executor.report());
        Ok(executor)
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// What moves bytes for software controllers.
    pub(crate) fn copies(&self) -> Arc<dyn CopyEngine> {
        self.copies.clone()
    }

    /// What a store needs of it.
    #[must_use]
    pub fn for_store(&self) -> StoreGpu {
        StoreGpu { streams: self.streams.clone(), copies: self.copies.clone() }
    }

    /// `bytes` bytes of its memory, in whole pages.
    ///
    /// # Errors
    /// [`StackError::Unfit`] when it has no more so many.
    pub(crate) fn memory(&self, bytes: usize) -> Result<ExternalMemory, StackError> {
        let allocated = self.device.allocate(bytes.next_multiple_of(PAGE));
        Ok(allocated.map_err(of_memory)?.into_external())
    }

    /// Pinned memory of the host that GPU and devices reach.
    ///
    /// # Errors
    /// [`StackError::Unfit`] when there is no more so much.
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

    /// Memory of the GPU that gets an address in this process, mapped for devices.
    ///
    /// # Errors
    /// [`StackError::Unfit`] without GDRCopy, and where drives would not find their way there.
    pub fn mapped(
        &self,
        space: &dyn DmaSpace,
        bytes: usize,
    ) -> Result<(Arc<dyn DmaMemory>, MappingKind), StackError> {
        self.check_mapping()?;
        let (memory, _, kind) = self.map(space, self.memory(bytes)?)?;
        Ok((memory, kind))
    }

    /// Whether what drives write into its memory can be read, and the process can map it.
    fn check_mapping(&self) -> Result<&Gdr, StackError> {
        if !self.streams.orders_peer_writes() {
            let why = "what a drive writes into this GPU's memory may become visible after its \
                       completion, and the driver cannot flush it";
            return Err(StackError::unfit(why, "use another GPU"));
        }
        self.gdr.as_ref().map_err(|error| StackError::unfit(error, GDRCOPY))
    }

    /// As [`Gpu::mapped`], for memory that is there; with the bytes in its first page before it.
    ///
    /// # Errors
    /// As for [`Gpu::mapped`].
    pub(crate) fn map(
        &self,
        space: &dyn DmaSpace,
        memory: ExternalMemory,
    ) -> Result<(Arc<dyn DmaMemory>, usize, MappingKind), StackError> {
        let mapping = self.check_mapping()?.map(&self.device, memory);
        let mapping = mapping.map_err(|error| StackError::unfit(error, GDRCOPY))?;
        let kind = mapping.kind();
        // GDRCopy maps pages of the GPU, which are whole ones of the host.
        let (pages, head) = whole_pages(mapping.into_external());
        let mapped = space.import(pages).map_err(|error| {
            StackError::unfit(format!("mapping GPU memory for devices: {error}"), "")
        })?;
        Ok((mapped, head, kind))
    }

    /// Returns whether writes of drives to its memory and to the host's may go different ways
    /// ([`gio_kernels::cuda::DeviceReport::is_coherent`]).
    pub(crate) fn is_coherent(&self) -> bool {
        self.device.report().is_coherent
    }

    /// Whether GDRCopy is there.
    ///
    /// # Errors
    /// Why not.
    pub fn gdrcopy(&self) -> Result<&Gdr, &GdrError> {
        self.gdr.as_ref()
    }

    /// What there is, and what the last executor was granted.
    #[must_use]
    pub fn report(&self) -> Option<CudaReport> {
        self.ran.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Less memory may do, unless the GPU is lost.
fn of_memory(error: CudaError) -> StackError {
    match error.code() {
        Some(code) if code.is_sticky() => error.into(),
        _ => StackError::unfit(error, FEWER),
    }
}
