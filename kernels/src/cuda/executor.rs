#![allow(unsafe_code, reason = "launches the kernel on memory that the ring laid out")]
//! Runs the I/O kernel on a GPU.

use std::{
    fmt,
    mem::{self, ManuallyDrop},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering, fence},
    },
};

use gio_uring::{
    ExecutorError, IoExecutor, Mirror as _, Progress, SharedMemory,
    abi::{Args, Iocb, Relay},
};
use nvme_driver::{Clock, GrantEpoch, Nanos, Place, Quiesced, Waiter};

use super::{
    device::{CudaDevice, Registration},
    driver,
    error::{CudaError, NAME},
    memory::PinnedMemory,
    module::{CudaFunction, CudaModule, Kernel, Shape},
    report::{DeviceReport, PartitionReport},
    state::State,
    stream::CudaStream,
};
use crate::ptx;

const MORE_TO_BEGIN_WITH: &str = "no memory is allocated while the I/O kernel may run; give the \
                                  ring more to begin with (arena_bytes)";

/// Condition under which the kernel exits. In both modes, an operation issued while it runs needs
/// no launch, and at most two launches are on the stream: one that is exiting, and the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LaunchMode {
    /// When all operations issued so far are done.
    #[default]
    PerBatch,
    /// When nothing was issued for [`CudaOptions::linger`], so that consecutive layers cost no
    /// launches. The engine must load its own kernels beforehand (`CUDA_MODULE_LOADING=EAGER`).
    Resident,
}

/// Options of the CUDA executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// Condition under which the kernel exits.
    pub mode: LaunchMode,
    /// Number of dedicated SMs, in a green context; `None` shares all SMs.
    pub sms: Option<u32>,
    /// Time that a resident kernel stays without work. Calls that wait for the whole GPU, such as
    /// `cuCtxSynchronize` (`torch.cuda.synchronize`), wait at least as long.
    pub linger: Nanos,
}

impl Default for CudaOptions {
    fn default() -> Self {
        let mode = LaunchMode::default();
        Self { mode, sms: None, linger: Nanos::from_millis(1) }
    }
}

/// Description of the GPU and the partition that runs the I/O kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaReport {
    /// The GPU.
    pub device: DeviceReport,
    /// Its partition.
    pub partition: PartitionReport,
    /// Condition under which the kernel exits.
    pub mode: LaunchMode,
}

impl fmt::Display for CudaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = match self.mode {
            LaunchMode::PerBatch => "a launch per batch",
            LaunchMode::Resident => "resident kernel",
        };
        write!(f, "{}; {mode}; {}", self.device, self.partition)
    }
}

/// Resources of the kernel: released together, or leaked together.
struct Parts {
    kernel: Kernel,
    stream: CudaStream,
    /// Registrations behind addresses that were given out.
    reached: Mutex<Vec<Arc<Registration>>>,
    /// The word in which the kernel announces its exit: `gio_args.exited`.
    exited: PinnedMemory,
    /// State of the warps; kept for the next start to avoid allocating beside other kernels.
    state: Mutex<Option<Arc<State>>>,
    /// `gio_args.relay`; kept likewise.
    relay: Mutex<Option<Arc<State>>>,
    device: Arc<CudaDevice>,
}

/// A kernel that may be running.
struct Run {
    /// Arguments of the last launch.
    args: Args,
    grants: Vec<GrantEpoch>,
    /// Set when launching failed although the GPU is healthy.
    failed: Option<CudaError>,
}

/// Runs the I/O kernel on a GPU.
pub struct CudaExecutor {
    parts: ManuallyDrop<Parts>,
    options: CudaOptions,
    clock: Arc<dyn Clock>,
    /// Set between a successful `start` and a successful `stop`.
    run: Option<Run>,
}

impl fmt::Debug for CudaExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaExecutor({})", self.report())
    }
}

impl CudaExecutor {
    /// Compiles the I/O kernel and creates a stream for it; nothing runs yet. `clock` must be the
    /// ring's clock: the deadline of [`IoExecutor::stop`] is measured with it.
    ///
    /// # Errors
    /// Returns [`CudaError::Compile`], [`CudaError::Argument`] or [`CudaError::Call`].
    pub fn new(
        device: &Arc<CudaDevice>,
        options: CudaOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, CudaError> {
        let module = CudaModule::compile(device, ptx::PTX, "the I/O kernel")?;
        Self::with_kernel(&module.function(ptx::ENTRY)?, options, clock)
    }

    /// Creates an executor of the precompiled kernel [`ptx::ENTRY`] of [`ptx::PTX`], for callers
    /// that create many.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] for a kernel with another argument, or [`CudaError::Call`].
    pub fn with_kernel(
        kernel: &CudaFunction,
        options: CudaOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, CudaError> {
        let (device, kernel) = (kernel.device(), Kernel::of(kernel.clone())?);
        if options.mode == LaunchMode::Resident {
            driver::enough_connections()?;
        }
        let stream = CudaStream::new(device, options.sms)?;
        let parts = Parts {
            kernel,
            stream,
            exited: device.pinned(size_of::<u64>())?,
            reached: Mutex::default(),
            state: Mutex::default(),
            relay: Mutex::default(),
            device: device.clone(),
        };
        let executor = Self { parts: ManuallyDrop::new(parts), options, clock, run: None };
        tracing::info!(report = %executor.report(), "the GPU is to run the I/O kernel");
        Ok(executor)
    }

    /// Returns a description of the GPU and its partition.
    #[must_use]
    pub fn report(&self) -> CudaReport {
        CudaReport {
            device: self.parts.device.report().clone(),
            partition: self.parts.stream.report().clone(),
            mode: self.options.mode,
        }
    }

    fn failed(cause: impl Into<String>) -> ExecutorError {
        ExecutorError::Failed { executor: NAME, cause: cause.into() }
    }

    /// Allocates pinned memory. Once the executor is started, only reuses memory: the driver could
    /// wait for a kernel that waits for an event of the calling thread.
    fn memory(&self, len: usize) -> Result<PinnedMemory, CudaError> {
        let device = &self.parts.device;
        if self.run.is_none() {
            return device.pinned(len);
        }
        device.pinned_again(len).ok_or_else(|| CudaError::Argument(MORE_TO_BEGIN_WITH.into()))
    }

    /// Returns memory near the kernel of at least `len` bytes with a zeroed image: that of the
    /// previous start if it is long enough.
    fn near(&self, kept: &Mutex<Option<Arc<State>>>, len: usize) -> Result<Arc<State>, CudaError> {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |state: &Arc<State>| state.len() >= len && self.run.is_none() && state.is_idle();
        let state = match kept.take().filter(fits) {
            Some(state) => state,
            None => State::new(&self.parts.device, len)?,
        };
        Ok(kept.insert(state).clone())
    }

    /// Returns the address of a zeroed relay for a ring of `depth` entries.
    fn relay(&self, depth: usize) -> Result<u64, ExecutorError> {
        let len = size_of::<Relay>() + depth * (size_of::<Iocb>() + size_of::<u64>());
        let state = self.near(&self.parts.relay, len)?;
        let shared = state.share();
        state.push(0..state.len())?;
        Ok(shared.address())
    }

    /// Returns the run, unless it failed.
    fn running(&mut self) -> Result<(&Parts, &mut Run), ExecutorError> {
        self.parts.device.healthy()?;
        match &mut self.run {
            None => Err(Self::failed("it was not started, or stopped; start it (again)")),
            Some(Run { failed: Some(error), .. }) => Err(error.clone().into()),
            Some(run) => Ok((&self.parts, run)),
        }
    }

    /// Checks that all blocks run at the same time: an operation is done only when every warp did
    /// its part, and no warp exits before.
    fn fits(&self, shape: Shape) -> Result<(), ExecutorError> {
        let sms = self.parts.stream.report().granted;
        let each = self.parts.kernel.blocks_per_sm(shape)?;
        let most = u64::from(sms) * u64::from(each);
        if u64::from(shape.blocks) <= most {
            return Ok(());
        }
        Err(Self::failed(format!(
            "{} blocks of {} threads cannot all run at once: {sms} SMs hold {each} each; give it \
             more SMs or fewer queues",
            shape.blocks, shape.threads
        )))
    }
}

impl Parts {
    fn exited_word(&self) -> &AtomicU64 {
        // SAFETY: the first word of a page that lives as long as `self`; only atomics access it.
        unsafe { AtomicU64::from_ptr(self.exited.host().as_ptr().cast()) }
    }

    /// Returns the number of the last launch that exited or is about to; 0 at first.
    fn exited(&self) -> u64 {
        self.exited_word().load(Ordering::Acquire)
    }

    /// Launches the kernel, possibly behind one that is exiting.
    fn launch(&self, run: &mut Run, sms: u32) -> Result<(), CudaError> {
        let granted = self.stream.report().granted;
        let sms = if sms == 0 { granted } else { sms.min(granted) };
        let args = Args { launch: run.args.launch + 1, ..run.args };
        let shape = Shape::new(args.warp_count, sms);
        // SAFETY: by the contract of `start`, what the arguments point to lives until `stop` has
        // seen the stream idle; every launch of an executor is on its stream.
        let launched = unsafe { self.kernel.launch(&self.stream, args, shape) };
        match launched {
            Ok(()) => run.args = args,
            Err(error) => {
                run.failed = Some(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Returns pinned memory as that of a ring.
fn shared(
    memory: Result<PinnedMemory, CudaError>,
    executor: &'static str,
    len: usize,
) -> Result<SharedMemory, ExecutorError> {
    let failed =
        |error: CudaError| ExecutorError::Memory { executor, len, cause: error.to_string() };
    let memory = memory.map_err(failed)?;
    let (host, address, len) = (memory.host(), memory.device().0, memory.len());
    // SAFETY: zeroed, page aligned, the same memory for the GPU, ordinary memory for the host, and
    // allocated until the owner is dropped.
    Ok(unsafe { SharedMemory::new(host, address, len, Box::new(memory)) })
}

impl CudaDevice {
    /// Allocates pinned memory for the ring of an executor that does not run on the GPU.
    pub(crate) fn pinned_shared(
        self: &Arc<Self>,
        executor: &'static str,
        len: usize,
    ) -> Result<SharedMemory, ExecutorError> {
        shared(self.pinned(len), executor, len)
    }
}

impl IoExecutor for CudaExecutor {
    fn name(&self) -> &'static str {
        NAME
    }

    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        shared(self.memory(len), NAME, len)
    }

    fn alloc_state(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        let state = self.near(&self.parts.state, len).map_err(|error| {
            let cause = error.to_string();
            ExecutorError::Memory { executor: NAME, len, cause }
        })?;
        Ok(state.share())
    }

    fn alloc_tables(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        let failed = |cause| ExecutorError::Memory { executor: NAME, len, cause };
        if self.run.is_some() {
            return Err(failed(MORE_TO_BEGIN_WITH.into()));
        }
        let tables = State::new(&self.parts.device, len);
        Ok(tables.map_err(|error| failed(error.to_string()))?.share())
    }

    fn address(&self, place: &Place) -> Option<u64> {
        if let Some(device) = place.device {
            return Some(device.0);
        }
        let (address, registration) = self.parts.device.reach(place.host?)?;
        let mut reached = self.parts.reached.lock().unwrap_or_else(PoisonError::into_inner);
        if !reached.iter().any(|other| Arc::ptr_eq(other, &registration)) {
            reached.push(registration);
        }
        Some(address)
    }

    fn start(&mut self, args: Args, grants: &[GrantEpoch]) -> Result<(), ExecutorError> {
        self.parts.device.healthy()?;
        if self.run.is_some() {
            return Err(Self::failed("it is running already; stop it first"));
        }
        let resident = self.options.mode == LaunchMode::Resident;
        let linger = if resident { self.options.linger } else { Nanos(0) };
        let exited = self.parts.exited.device().0;
        let relay = self.relay(args.ring_mask as usize + 1)?;
        let args = Args { relay, exited, linger_ns: linger.0, launch: 0, ..args };
        let mut run = Run { args, grants: grants.to_vec(), failed: None };
        self.fits(Shape::new(args.warp_count, self.parts.stream.report().granted))?;
        // Relaxed: no kernel runs, and a launch publishes it.
        self.parts.exited_word().store(0, Ordering::Relaxed);
        // Before the launch: from now on nothing is freed, as the driver could wait for the kernel.
        self.parts.device.started();
        if resident && let Err(error) = self.parts.launch(&mut run, 0) {
            self.parts.device.ended();
            return Err(error.into());
        }
        self.run = Some(run);
        Ok(())
    }

    fn submitted(&mut self, _tail: u32, sms: u32) -> Result<(), ExecutorError> {
        let (parts, run) = self.running()?;
        // Ordering: the ring's entry was stored before; then this fence; then the load of `exited`.
        // The kernel stores `exited`, issues the same kind of fence, and loads the ring
        // (gio_decides). At least one side sees the other's store.
        fence(Ordering::SeqCst);
        if parts.exited() == run.args.launch {
            parts.launch(run, sms)?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<Progress, ExecutorError> {
        let (parts, run) = self.running()?;
        if parts.stream.is_idle()? && parts.exited() != run.args.launch {
            return Err(Self::failed("it ended by itself, or was stopped"));
        }
        // Progress happens on the GPU.
        Ok(Progress::Idle)
    }

    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        if self.run.is_some() {
            let mut waiter = Waiter::new(&*self.clock, deadline);
            // An error here means a lost GPU. CUDA does not say when and how its kernels were
            // killed, so there is no proof, and the queues stay quarantined.
            while !self.parts.stream.is_idle()? {
                if !waiter.wait() {
                    return Err(ExecutorError::StopTimeout { executor: NAME });
                }
            }
            self.parts.device.ended();
        }
        let grants = self.run.take().map(|run| run.grants).unwrap_or_default();
        // SAFETY: the stream of all launches is idle, or there was no launch.
        Ok(unsafe { Quiesced::assert(grants) })
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        if self.run.is_some() {
            match self.parts.stream.is_idle() {
                Ok(true) => self.parts.device.ended(),
                found => {
                    tracing::error!(?found, "dropping an executor whose kernel may run on: leaked");
                    // Kernel, stream, registrations and the device stay until the process ends.
                    mem::forget(self.parts.device.clone());
                    return;
                }
            }
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.parts) };
    }
}
