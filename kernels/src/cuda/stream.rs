#![allow(unsafe_code, reason = "calls libcuda")]
//! Streams, optionally with dedicated SMs, and their waits for and writes of words.

use std::{fmt, mem, sync::Arc};

use cudarc::driver::sys::{
    CUdevResource, CUdevResourceDesc, CUdevResourceType, CUdevSmResourceSplit_flags, CUgreenCtx,
    CUgreenCtxCreate_flags, CUstream, CUstream_flags, CUstreamWaitValue_flags,
    CUstreamWriteValue_flags,
};
use nvme_driver::DevicePtr;

use super::{
    device::{CudaDevice, Held, Resource},
    error::{CudaError, ErrorCode},
    report::{PartitionReport, StreamKind},
};

/// A stream owned by this crate.
pub struct CudaStream {
    handle: CUstream,
    report: PartitionReport,
    // In this order: a stream is destroyed before its green context.
    held: Held,
    _green: Option<Held>,
}

// SAFETY: a handle, which any thread may pass to the driver.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream({})", self.report)
    }
}

impl CudaStream {
    /// Creates a stream on `sms` SMs (rounded up to the GPU's granularity) in a green context. If
    /// green contexts are unavailable, or for `None`, it has the highest priority on all SMs; the
    /// report says so, and why.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if `sms` is 0 or exceeds the GPU, or [`CudaError::Call`].
    pub fn new(device: &Arc<CudaDevice>, sms: Option<u32>) -> Result<Self, CudaError> {
        let of = device.report().sms;
        if let Some(asked) = sms.filter(|asked| *asked == 0 || *asked > of) {
            let text = format!("{asked} SMs were asked for; 1 to {of} are possible");
            return Err(CudaError::Argument(text));
        }
        let _entered = device.enter()?;
        let (_, greatest) = priorities(device)?;
        let part = |asked| Self::green(device, (asked, Side::Part), greatest);
        let instead = match sms.map(part) {
            Some(Ok(stream)) => return Ok(stream),
            Some(Err(error)) => {
                device.healthy()?;
                tracing::warn!(%error, "no SMs of its own for the I/O kernel");
                Some(error.to_string())
            }
            None => None,
        };
        Self::plain(device, sms, StreamKind::Priority { priority: greatest, instead })
    }

    /// Creates a stream of the lowest priority on all SMs, like an engine's own.
    ///
    /// # Errors
    /// Returns [`CudaError::Call`].
    pub fn lowest(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        let _entered = device.enter()?;
        let (least, _) = priorities(device)?;
        Self::plain(device, None, StreamKind::Priority { priority: least, instead: None })
    }

    /// Creates a stream of the lowest priority in a green context of the SMs that
    /// [`CudaStream::new`] leaves for `sms`: for an engine that shares none with the I/O kernel.
    /// The driver repeats the division, with the same result every time.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] without green contexts or free SMs, or [`CudaError::Call`].
    pub fn beside(device: &Arc<CudaDevice>, sms: u32) -> Result<Self, CudaError> {
        let _entered = device.enter()?;
        let (least, _) = priorities(device)?;
        Self::green(device, (sms, Side::Rest), least)
    }

    /// Creates a stream on all SMs. The context of `device` must be current.
    fn plain(
        device: &Arc<CudaDevice>,
        asked: Option<u32>,
        kind: StreamKind,
    ) -> Result<Self, CudaError> {
        let priority = match &kind {
            StreamKind::Priority { priority, .. } => *priority,
            StreamKind::Green => 0,
        };
        let mut handle: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        let code =
            unsafe { (device.api.cuStreamCreateWithPriority)(&raw mut handle, flags, priority) };
        device.check("making a stream", "cuStreamCreateWithPriority", code)?;
        let granted = device.report().sms;
        let report = PartitionReport { asked, granted, remaining: 0, granularity: None, kind };
        let held = Held::new(device, Resource::Stream(handle));
        Ok(Self { handle, report, held, _green: None })
    }

    /// Creates a stream in a green context. The context of `device` must be current.
    fn green(
        device: &Arc<CudaDevice>,
        side: (u32, Side),
        priority: i32,
    ) -> Result<Self, CudaError> {
        let api = device.api;
        let (Some(describe), Some(create), Some(_), Some(create_stream)) = (
            api.cuDevResourceGenerateDesc,
            api.cuGreenCtxCreate,
            api.cuGreenCtxDestroy,
            api.cuGreenCtxStreamCreate,
        ) else {
            return Err(no_green_contexts());
        };
        let (mut part, report) = divide(device, side)?;
        let mut desc: CUdevResourceDesc = std::ptr::null_mut();
        // SAFETY: one struct is read, a handle written.
        let code = unsafe { describe(&raw mut desc, &raw mut part, 1) };
        device.check("describing the SMs", "cuDevResourceGenerateDesc", code)?;
        let mut green: CUgreenCtx = std::ptr::null_mut();
        let default = CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: a handle is written.
        let code = unsafe { create(&raw mut green, desc, device.handle(), default) };
        device.check("making a green context", "cuGreenCtxCreate", code)?;
        let green_held = Held::new(device, Resource::Green(green));
        let mut handle: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a handle is written.
        let code = unsafe { create_stream(&raw mut handle, green, flags, priority) };
        device.check("making a green context's stream", "cuGreenCtxStreamCreate", code)?;
        let held = Held::new(device, Resource::Stream(handle));
        Ok(Self { handle, report, held, _green: Some(green_held) })
    }

    /// Returns the part of the GPU that the stream uses.
    #[must_use]
    pub fn report(&self) -> &PartitionReport {
        &self.report
    }

    /// Returns its `CUstream`, for other libraries. Valid as long as `self` lives.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.handle.expose_provenance() as u64
    }

    /// Returns true if all work on the stream is done.
    ///
    /// # Errors
    /// Returns [`CudaError::Call`] if work on the stream failed, or the GPU is lost.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let device = self.held.device();
        let _entered = device.enter()?;
        // SAFETY: a stream that is alive.
        match unsafe { (device.api.cuStreamQuery)(self.handle) } {
            ErrorCode::NOT_READY => Ok(false),
            code => device.check("working on a stream", "cuStreamQuery", code).map(|()| true),
        }
    }
}

/// A side of the SM division.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// The requested SMs.
    Part,
    /// The remaining SMs.
    Rest,
}

/// Returns the lowest and highest priority. The context of `device` must be current.
fn priorities(device: &CudaDevice) -> Result<(i32, i32), CudaError> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: writes two numbers.
    let code =
        unsafe { (device.api.cuCtxGetStreamPriorityRange)(&raw mut least, &raw mut greatest) };
    device.check("asking for stream priorities", "cuCtxGetStreamPriorityRange", code)?;
    Ok((least, greatest))
}

fn no_green_contexts() -> CudaError {
    CudaError::Argument(
        "the driver has no green contexts with streams, they came with CUDA 12.5".into(),
    )
}

/// Splits off `asked` SMs and returns these or the rest. The context of `device` must be current.
fn divide(
    device: &CudaDevice,
    (asked, side): (u32, Side),
) -> Result<(CUdevResource, PartitionReport), CudaError> {
    let (get, split) = (device.api.cuDeviceGetDevResource, device.api.cuDevSmResourceSplitByCount);
    let (Some(get), Some(split)) = (get, split) else { return Err(no_green_contexts()) };
    // SAFETY: a plain struct of numbers, for which 0 is a valid value of every field.
    let mut all: CUdevResource = unsafe { mem::zeroed() };
    let sm = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    // SAFETY: fills the struct in.
    let code = unsafe { get(device.handle(), &raw mut all, sm) };
    device.check("asking for the SMs", "cuDeviceGetDevResource", code)?;
    // The finest division first: it gives up large clusters, which are not used here.
    let fine = CUdevSmResourceSplit_flags::CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING as u32;
    let what = || format!("dividing off {asked} SMs");
    let mut last = None;
    for flags in [fine, 0] {
        // SAFETY: as above.
        let mut rest: CUdevResource = unsafe { mem::zeroed() };
        let (mut part, mut groups) = (all, 1);
        // SAFETY: fills in two structs, and the number of parts.
        let code = unsafe {
            split(&raw mut part, &raw mut groups, &raw const all, &raw mut rest, flags, asked)
        };
        match device.check(what(), "cuDevSmResourceSplitByCount", code) {
            Ok(()) if groups == 1 => {
                let taken = if side == Side::Part { part } else { rest };
                // SAFETY: both are SM resources, or zero; every field is a number.
                let (all, sms) = unsafe { (all.__bindgen_anon_1.sm, taken.__bindgen_anon_1.sm) };
                if sms.smCount == 0 {
                    let text = format!("{}: no SM is left beside them", what());
                    return Err(CudaError::Argument(text));
                }
                // The driver (since CUDA 13.0) reports the alignment of the coarse division.
                let aligned = Some(all.smCoscheduledAlignment);
                let report = PartitionReport {
                    asked: Some(asked).filter(|_| side == Side::Part),
                    granted: sms.smCount,
                    remaining: all.smCount.saturating_sub(sms.smCount),
                    granularity: aligned.filter(|&n| n != 0 && flags != fine),
                    kind: StreamKind::Green,
                };
                return Ok((taken, report));
            }
            Ok(()) => {}
            Err(error) => last = Some(error),
        }
    }
    let none = || CudaError::Argument(format!("{}: the driver makes no such part", what()));
    Err(last.unwrap_or_else(none))
}

impl CudaDevice {
    /// Makes later work on `stream` wait until the word at `word` has reached `value`, by the rule
    /// of [`gio_uring::Event`]. With `flush`, earlier writes of peers to GPU memory are then
    /// visible ([`super::DeviceReport::flush_remote_writes`] tells if that is supported).
    ///
    /// # Errors
    /// Returns [`CudaError::Call`].
    ///
    /// # Safety
    /// `stream` is a `CUstream` of this device (0 for the default stream), and the word is mapped
    /// for the GPU until the wait is over.
    pub unsafe fn stream_wait(
        &self,
        stream: u64,
        word: DevicePtr,
        value: u32,
        flush: bool,
    ) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        let mut flags = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        if flush {
            flags |= CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_FLUSH as u32;
        }
        let stream = std::ptr::with_exposed_provenance_mut(stream as usize);
        // SAFETY: the caller's promise.
        let code = unsafe { (self.api.cuStreamWaitValue32_v2)(stream, word.0, value, flags) };
        self.check("making a stream wait for a word", "cuStreamWaitValue32", code)
    }

    /// Enqueues a write of `value` to the word at `word` after all earlier work on `stream`; an
    /// operation that waits for it then starts.
    ///
    /// # Errors
    /// Returns [`CudaError::Call`].
    ///
    /// # Safety
    /// Same as [`CudaDevice::stream_wait`].
    pub unsafe fn stream_write(
        &self,
        stream: u64,
        word: DevicePtr,
        value: u32,
    ) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        // The default includes a barrier before the write, so that earlier results are visible.
        let flags = CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        let stream = std::ptr::with_exposed_provenance_mut(stream as usize);
        // SAFETY: the caller's promise.
        let code = unsafe { (self.api.cuStreamWriteValue32_v2)(stream, word.0, value, flags) };
        self.check("making a stream write a word", "cuStreamWriteValue32", code)
    }
}
