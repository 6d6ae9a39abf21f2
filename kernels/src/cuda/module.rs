#![allow(unsafe_code, reason = "calls libcuda")]
//! Kernels, compiled by the driver from PTX.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    fmt,
    sync::Arc,
};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUjit_option, CUmodule, CUstream};
use gio_uring::{RawStream, abi::Args};

use super::{
    device::{CudaDevice, Held, Resource},
    error::{CudaError, ErrorCode},
    stream::CudaStream,
};
use crate::ptx::BLOCK_THREADS_MAX;

/// Threads per warp.
const WARP: u32 = 32;
/// Maximum warps per block.
const WARPS_MAX: u32 = BLOCK_THREADS_MAX / WARP;
/// Buffer size for the compiler's log.
const LOG_BYTES: usize = 8192;

/// Grid dimensions for a number of warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) blocks: u32,
    pub(super) threads: u32,
}

impl Shape {
    /// Returns one block per SM if a block can hold that many warps, otherwise more.
    pub(super) fn new(warps: u32, sms: u32) -> Self {
        let per_block = warps.div_ceil(sms.max(1)).clamp(1, WARPS_MAX);
        Self { blocks: warps.div_ceil(per_block), threads: per_block * WARP }
    }
}

/// PTX that the driver compiled for one GPU. Unloaded after it and its functions are dropped, once
/// no executor of the device runs any more.
#[derive(Clone)]
pub struct CudaModule {
    module: CUmodule,
    name: Arc<str>,
    held: Arc<Held>,
}

// SAFETY: a handle, which any thread may pass to the driver.
unsafe impl Send for CudaModule {}
// SAFETY: as above.
unsafe impl Sync for CudaModule {}

impl fmt::Debug for CudaModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaModule({} on {:?})", self.name, self.held.device())
    }
}

impl CudaModule {
    /// Compiles `ptx`. May wait for running kernels: call it before an executor starts. `name`
    /// describes the PTX in errors: "the I/O kernel".
    ///
    /// # Errors
    /// Returns [`CudaError::Compile`], [`CudaError::Argument`] if the text contains a zero byte, or
    /// [`CudaError::Call`].
    pub fn compile(device: &Arc<CudaDevice>, ptx: &str, name: &str) -> Result<Self, CudaError> {
        let Ok(image) = CString::new(ptx) else {
            let text = format!("the PTX of {name} has a zero byte in it");
            return Err(CudaError::Argument(text));
        };
        let _entered = device.enter()?;
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let size = std::ptr::without_provenance_mut::<c_void>(log.len() - 1);
        let mut values = [log.as_mut_ptr().cast::<c_void>(), size];
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: the image ends with a zero; the log has the length given; a handle is written.
        let code = unsafe {
            (device.api.cuModuleLoadDataEx)(
                &raw mut module,
                image.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if let Err(error) = device.check(format!("compiling {name}"), "cuModuleLoadDataEx", code) {
            return Err(refusal(device, (name, ptx), code, &log, error));
        }
        let held = Arc::new(Held::new(device, Resource::Module(module)));
        Ok(Self { module, name: name.into(), held })
    }

    /// Returns the kernel with this name, loaded: otherwise the driver loads it at the first
    /// launch, which may wait for running kernels.
    ///
    /// # Errors
    /// Returns [`CudaError::Call`] if there is no such kernel, or no memory for it.
    pub fn function(&self, entry: &str) -> Result<CudaFunction, CudaError> {
        let device = self.held.device();
        let _entered = device.enter()?;
        let name = CString::new(entry).unwrap_or_default();
        let mut function: CUfunction = std::ptr::null_mut();
        let get = device.api.cuModuleGetFunction;
        // SAFETY: a loaded module, a name that ends with a zero; a handle is written.
        let code = unsafe { get(&raw mut function, self.module, name.as_ptr().cast::<c_char>()) };
        let what = format!("finding {entry} in the PTX of {}", self.name);
        device.check(what, "cuModuleGetFunction", code)?;
        if let Some(load) = device.api.cuFuncLoad {
            // SAFETY: a function of a loaded module.
            let code = unsafe { load(function) };
            device.check(format!("loading {entry}"), "cuFuncLoad", code)?;
        }
        let mut argument = None;
        if let Some(get) = device.api.cuFuncGetParamInfo {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: two numbers are written.
            let code = unsafe { get(function, 0, &raw mut offset, &raw mut size) };
            let what = format!("asking for the argument of {entry}");
            device.check(what, "cuFuncGetParamInfo", code)?;
            argument = Some((offset, size));
        }
        let (entry, module) = (entry.into(), self.clone());
        Ok(CudaFunction { function, entry, argument, module })
    }
}

/// A kernel with one argument. Keeps its module loaded.
#[derive(Clone)]
pub struct CudaFunction {
    function: CUfunction,
    entry: Arc<str>,
    /// Offset and size of the argument, if the driver reports them (since CUDA 12.4).
    argument: Option<(usize, usize)>,
    module: CudaModule,
}

// SAFETY: a handle, which any thread may pass to the driver.
unsafe impl Send for CudaFunction {}
// SAFETY: as above.
unsafe impl Sync for CudaFunction {}

impl fmt::Debug for CudaFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaFunction({} of {:?})", self.entry, self.module)
    }
}

impl CudaFunction {
    /// Returns the device that it was compiled for.
    #[must_use]
    pub fn device(&self) -> &Arc<CudaDevice> {
        self.module.held.device()
    }

    /// Checks that its argument has the size of a `T`, if the driver reports the size.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if PTX and program were built from different sources.
    pub fn takes<T>(&self) -> Result<(), CudaError> {
        let expected = size_of::<T>();
        match self.argument {
            Some((offset, size)) if (offset, size) != (0, expected) => {
                Err(CudaError::Argument(format!(
                    "the PTX of {} was made from another interface: {} takes {size} bytes at \
                     {offset}, this program passes {expected}; run `cargo xtask ptx`",
                    self.module.name, self.entry
                )))
            }
            _ => Ok(()),
        }
    }

    /// Returns the maximum number of blocks of `threads` threads that one SM runs concurrently.
    ///
    /// # Errors
    /// Returns [`CudaError::Call`].
    pub fn blocks_per_sm(&self, threads: u32) -> Result<u32, CudaError> {
        let device = self.device();
        let _entered = device.enter()?;
        let mut blocks: c_int = 0;
        let ask = device.api.cuOccupancyMaxActiveBlocksPerMultiprocessor;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: a number is written.
        let code = unsafe { ask(&raw mut blocks, self.function, threads, 0) };
        let call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        device.check("asking how many blocks an SM runs", call, code)?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Requests the maximum shared memory, and minimum L1 cache, on SMs that run the kernel. An SM
    /// changes the split only when idle: beside a resident kernel that did not request it, other
    /// kernels that need shared memory may not fit.
    ///
    /// # Errors
    /// Returns [`CudaError::Call`].
    pub fn prefer_shared_memory(&self) -> Result<(), CudaError> {
        let device = self.device();
        let _entered = device.enter()?;
        let carveout = CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: a function of a loaded module, which `self` keeps.
        let code = unsafe { (device.api.cuFuncSetAttribute)(self.function, carveout, 100) };
        device.check("asking for shared memory", "cuFuncSetAttribute", code)
    }

    /// Enqueues a launch of the kernel on `stream` without waiting, unless the stream is full
    /// (about a thousand operations); then the driver waits.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] as [`CudaFunction::takes`] does, or [`CudaError::Call`].
    ///
    /// # Safety
    /// `T` is the type of the kernel's only parameter. Until the launch ends, all memory reachable
    /// through `args` is mapped for the GPU and not otherwise used in a way that the kernel does
    /// not expect, and this function, or a clone of it, lives. `stream` belongs to
    /// [`CudaFunction::device`] and is alive.
    pub unsafe fn launch<T: Copy>(
        &self,
        stream: RawStream,
        blocks: u32,
        threads: u32,
        mut args: T,
    ) -> Result<(), CudaError> {
        self.takes::<T>()?;
        let device = self.device();
        let _entered = device.enter()?;
        let stream: CUstream = std::ptr::with_exposed_provenance_mut(stream.handle() as usize);
        let mut params = [(&raw mut args).cast::<c_void>()];
        // SAFETY: the kernel takes one argument of this type, which is copied before the call
        // returns; the rest is the caller's promise.
        let code = unsafe {
            (device.api.cuLaunchKernel)(
                self.function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        device.check(format!("launching {}", self.entry), "cuLaunchKernel", code)
    }
}

/// The compiled I/O kernel.
pub(super) struct Kernel(CudaFunction);

impl Kernel {
    /// Wraps a compiled kernel.
    pub(super) fn of(function: CudaFunction) -> Result<Self, CudaError> {
        function.takes::<Args>()?;
        function.prefer_shared_memory()?;
        Ok(Self(function))
    }

    /// Returns the maximum number of blocks of this shape that one SM runs concurrently.
    pub(super) fn blocks_per_sm(&self, shape: Shape) -> Result<u32, CudaError> {
        self.0.blocks_per_sm(shape.threads)
    }

    /// Enqueues a launch of the kernel on `stream`.
    ///
    /// # Safety
    /// Until the launch ends, `args` satisfies [`gio_uring::IoExecutor::start`], and no other
    /// launch of these warps runs at the same time: all are on one stream. `stream` belongs to the
    /// kernel's device and is alive.
    pub(super) unsafe fn launch(
        &self,
        stream: &CudaStream,
        args: Args,
        shape: Shape,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise; the argument's type is that of `abi.h`.
        unsafe { self.0.launch(RawStream::new(stream.raw()), shape.blocks, shape.threads, args) }
    }
}

/// Returns the error for a module that was not loaded, with the compiler's log for invalid PTX.
fn refusal(
    device: &CudaDevice,
    (module, ptx): (&str, &str),
    code: ErrorCode,
    log: &[u8],
    error: CudaError,
) -> CudaError {
    // INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, JIT_COMPILER_NOT_FOUND,
    // UNSUPPORTED_PTX_VERSION, JIT_COMPILATION_DISABLED
    if !matches!(code.0, 200 | 209 | 218 | 221..=223) {
        return error;
    }
    let line = |word: &str| {
        let line = ptx.lines().find(|line| line.starts_with(word));
        line.unwrap_or("no header").trim().to_owned()
    };
    let text = String::from_utf8_lossy(log);
    let text = text.trim_end_matches('\0').trim();
    let (major, minor) = device.report().capability;
    CudaError::Compile {
        header: format!("{module} ({}, {})", line(".version"), line(".target")),
        capability: format!("{major}.{minor}"),
        code,
        name: device.name_of(code),
        log: if text.is_empty() { "nothing".into() } else { text.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_warp_has_a_place_and_no_block_is_too_large() {
        for warps in 1..200 {
            for sms in 0..40 {
                let shape = Shape::new(warps, sms);
                let per_block = shape.threads / WARP;
                assert!((1..=WARPS_MAX).contains(&per_block) && shape.threads.is_multiple_of(WARP));
                assert!(shape.blocks * per_block >= warps);
                assert!((shape.blocks - 1) * per_block < warps, "an idle block: {shape:?}");
                if warps <= sms.max(1) * WARPS_MAX {
                    assert!(shape.blocks <= sms.max(1), "{warps} warps, {sms} SMs: {shape:?}");
                }
            }
        }
    }
}
