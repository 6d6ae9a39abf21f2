#![allow(unsafe_code, reason = "calls libcuda")]
//! A GPU's primary context, and resources kept until no kernel runs on it any more.

use std::{
    any::Any,
    fmt,
    marker::PhantomData,
    mem,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUgreenCtx, CUmodule, CUstream};

use nvme_driver::DevicePtr;

use super::{
    api::Api,
    error::{CudaError, ErrorCode},
    report::DeviceReport,
};

/// Pinned memory as allocated by the driver, and the aligned part in use.
#[derive(Clone, Copy)]
pub(super) struct Pinned {
    /// Return value of cuMemHostAlloc.
    pub(super) base: NonNull<u8>,
    pub(super) host: NonNull<u8>,
    pub(super) address: u64,
    pub(super) len: usize,
}

/// A resource to be returned to the driver eventually.
pub(super) enum Resource {
    /// cuMemFreeHost.
    Pinned(Pinned),
    /// cuMemHostUnregister; then the owner of the memory is dropped.
    Registered { host: NonNull<u8>, _owner: Arc<dyn Any + Send + Sync> },
    /// cuMemFree.
    Memory(CUdeviceptr),
    /// cuIpcCloseMemHandle.
    Foreign(CUdeviceptr),
    /// cuModuleUnload.
    Module(CUmodule),
    /// cuStreamDestroy.
    Stream(CUstream),
    /// cuGreenCtxDestroy.
    Green(CUgreenCtx),
}

// SAFETY: handles and addresses, which any thread may pass to the driver.
unsafe impl Send for Resource {}
// SAFETY: as above; a shared reference gives no access.
unsafe impl Sync for Resource {}

/// A resource that returns to the driver once no kernel runs on its device any more.
pub(super) struct Held {
    device: Arc<CudaDevice>,
    resource: Option<Resource>,
}

impl Held {
    pub(super) fn new(device: &Arc<CudaDevice>, resource: Resource) -> Self {
        Self { device: device.clone(), resource: Some(resource) }
    }

    pub(super) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(resource) = self.resource.take() {
            self.device.release(resource);
        }
    }
}

/// Memory of another owner, mapped into the GPU. Executors find it by its host address and keep
/// what they use. Keep the registration as long as the device is used.
pub struct Registration {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) held: Held,
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, len, held } = self;
        write!(f, "Registration({len} bytes at {address:#x} of {:?})", held.device())
    }
}

impl Registration {
    /// Returns the first byte's address in a kernel.
    #[must_use]
    pub fn device(&self) -> DevicePtr {
        DevicePtr(self.address)
    }
}

/// Host range of registered memory. Plain numbers and a weak reference: a search under a lock must
/// not become the last owner of a registration.
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) len: usize,
    pub(super) registration: Weak<Registration>,
}

impl Range {
    fn is_alive(&self) -> bool {
        self.registration.strong_count() > 0
    }
}

#[derive(Default)]
struct State {
    /// The error after which the device is unusable.
    lost: Option<CudaError>,
    /// Number of started executors.
    started: usize,
    /// Resources dropped while an executor is started, in that order.
    parked: Vec<Resource>,
    /// Registered memory ranges, for address lookup.
    ranges: Vec<Range>,
}

/// A GPU, accessed through its primary context.
pub struct CudaDevice {
    pub(super) api: &'static Api,
    device: CUdevice,
    context: CUcontext,
    report: DeviceReport,
    state: Mutex<State>,
}

// SAFETY: the handles may be used from every thread; State is behind a mutex.
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
unsafe impl Sync for CudaDevice {}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({} {})", self.report.ordinal, self.report.name)
    }
}

impl CudaDevice {
    /// Takes ownership of a retained primary context.
    pub(super) fn new(
        api: &'static Api,
        device: CUdevice,
        context: CUcontext,
        report: DeviceReport,
    ) -> Self {
        Self { api, device, context, report, state: Mutex::default() }
    }

    /// Returns a description of the GPU.
    #[must_use]
    pub fn report(&self) -> &DeviceReport {
        &self.report
    }

    /// Checks that the GPU is still usable by this process.
    ///
    /// # Errors
    /// Returns the error that made it unusable.
    pub fn healthy(&self) -> Result<(), CudaError> {
        self.state().lost.clone().map_or(Ok(()), Err)
    }

    pub(super) fn handle(&self) -> CUdevice {
        self.device
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is a single push or assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Converts a call's code to a result. Remembers a sticky error.
    pub(super) fn check(
        &self,
        what: impl Into<String>,
        call: &'static str,
        code: ErrorCode,
    ) -> Result<(), CudaError> {
        let checked = self.api.check(what, call, code);
        if let Err(error) = &checked
            && code.is_sticky()
        {
            let mut state = self.state();
            if state.lost.is_none() {
                tracing::error!(%error, "the GPU is lost to this process");
                state.lost = Some(error.clone());
            }
        }
        checked
    }

    pub(super) fn name_of(&self, code: ErrorCode) -> String {
        self.api.name_of(code)
    }

    /// Makes the context current on this thread until the result is dropped. A stream capture in
    /// progress on this or another thread does not affect the calls made meanwhile.
    pub(super) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        self.healthy()?;
        // SAFETY: the context is retained as long as `self` lives.
        let code = unsafe { (self.api.cuCtxPushCurrent_v2)(self.context) };
        self.check("making the GPU's context current", "cuCtxPushCurrent", code)?;
        // CU_STREAM_CAPTURE_MODE_RELAXED. A number, because the driver writes the old mode back.
        let mut mode: u32 = 2;
        // SAFETY: reads and writes one number of the enum's size.
        let code = unsafe { (self.api.cuThreadExchangeStreamCaptureMode)((&raw mut mode).cast()) };
        let entered = Entered { device: self, mode, thread: PhantomData };
        self.check("leaving stream capture", "cuThreadExchangeStreamCaptureMode", code)?;
        Ok(entered)
    }

    /// Records that an executor starts: nothing is freed from now on.
    pub(super) fn started(&self) {
        self.state().started += 1;
    }

    /// Records that an executor's kernels have ended; the last one frees parked resources.
    pub(super) fn ended(&self) {
        let mut state = self.state();
        state.started = state.started.saturating_sub(1);
        if state.started == 0 {
            let parked = mem::take(&mut state.parked);
            drop(state);
            self.free(parked);
        }
    }

    /// Returns true if an executor of the device is started.
    pub(super) fn is_started(&self) -> bool {
        self.state().started > 0
    }

    /// Takes parked pinned memory of exactly this length.
    pub(super) fn recycled(&self, len: usize) -> Option<Pinned> {
        let mut state = self.state();
        let fits = |resource: &Resource| matches!(resource, Resource::Pinned(p) if p.len == len);
        let at = state.parked.iter().position(fits)?;
        match state.parked.remove(at) {
            Resource::Pinned(pinned) => Some(pinned),
            _ => None,
        }
    }

    /// Records registered memory.
    pub(super) fn add_range(&self, range: Range) {
        let mut state = self.state();
        state.ranges.retain(Range::is_alive);
        state.ranges.push(range);
    }

    /// Returns the first `Some` that `find` returns for a range.
    pub(super) fn find_range<T>(&self, find: impl FnMut(&Range) -> Option<T>) -> Option<T> {
        self.state().ranges.iter().find_map(find)
    }

    fn release(&self, resource: Resource) {
        let mut state = self.state();
        if state.started > 0 {
            state.parked.push(resource);
        } else {
            drop(state);
            self.free(vec![resource]);
        }
    }

    fn free(&self, resources: Vec<Resource>) {
        if resources.is_empty() {
            return;
        }
        let entered = match self.enter() {
            Ok(entered) => entered,
            Err(error) => {
                let count = resources.len();
                tracing::debug!(%error, count, "GPU resources are left to the end of the process");
                // Registered memory may be in use by a device that still runs.
                mem::forget(resources);
                return;
            }
        };
        for resource in resources {
            self.free_one(resource);
        }
        drop(entered);
    }

    fn free_one(&self, resource: Resource) {
        let api = self.api;
        // SAFETY: each was created by the matching function, and is dropped here.
        let (call, code) = unsafe {
            match &resource {
                Resource::Pinned(p) => {
                    ("cuMemFreeHost", (api.cuMemFreeHost)(p.base.as_ptr().cast()))
                }
                Resource::Registered { host, .. } => {
                    ("cuMemHostUnregister", (api.cuMemHostUnregister)(host.as_ptr().cast()))
                }
                Resource::Memory(address) => ("cuMemFree", (api.cuMemFree_v2)(*address)),
                Resource::Foreign(address) => {
                    ("cuIpcCloseMemHandle", (api.cuIpcCloseMemHandle)(*address))
                }
                Resource::Module(module) => ("cuModuleUnload", (api.cuModuleUnload)(*module)),
                Resource::Stream(stream) => ("cuStreamDestroy", (api.cuStreamDestroy_v2)(*stream)),
                Resource::Green(green) => match api.cuGreenCtxDestroy {
                    Some(destroy) => ("cuGreenCtxDestroy", destroy(*green)),
                    None => ("cuGreenCtxDestroy", ErrorCode::SUCCESS),
                },
            }
        };
        if let Err(error) = self.check("freeing a GPU resource", call, code) {
            tracing::error!(%error, "it leaks");
            mem::forget(resource);
        }
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // An executor that did not end keeps its device alive, so no kernel runs here.
        let parked = mem::take(&mut self.state().parked);
        self.free(parked);
        // SAFETY: retained by the creator of `self`; no handle of it is left.
        let code = unsafe { (self.api.cuDevicePrimaryCtxRelease_v2)(self.device) };
        if let Err(error) = self.check("closing a GPU", "cuDevicePrimaryCtxRelease", code) {
            tracing::debug!(%error, "closing a GPU");
        }
    }
}

/// Keeps the context current on this thread while it lives.
pub(super) struct Entered<'a> {
    device: &'a CudaDevice,
    mode: u32,
    /// Makes the type !Send.
    thread: PhantomData<*mut ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let Self { device, mode, .. } = self;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: undoes the calls of `enter`: restores the mode, pops the context.
        let (mode, pop) = unsafe {
            (
                (device.api.cuThreadExchangeStreamCaptureMode)((&raw mut *mode).cast()),
                (device.api.cuCtxPopCurrent_v2)(&raw mut context),
            )
        };
        for (call, code) in [("cuThreadExchangeStreamCaptureMode", mode), ("cuCtxPopCurrent", pop)]
        {
            if let Err(error) = device.check("leaving the GPU's context", call, code) {
                tracing::debug!(%error, "leaving the GPU's context");
            }
        }
    }
}
