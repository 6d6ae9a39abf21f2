#![allow(unsafe_code, reason = "calls libcuda")]
//! The I/O kernel, compiled by the driver from PTX.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    sync::Arc,
};

use cudarc::driver::sys::{CUfunction, CUjit_option, CUmodule, CUstream};
use gio_uring::abi::Args;

use super::{
    device::{CudaDevice, Held, Resource},
    error::{CudaError, ErrorCode},
};
use crate::ptx::{BLOCK_THREADS_MAX, ENTRY};

/// Threads of a warp.
const WARP: u32 = 32;
/// Warps of a block, at most.
const WARPS_MAX: u32 = BLOCK_THREADS_MAX / WARP;
/// Room for the compiler's words.
const LOG_BYTES: usize = 8192;

/// How warps become blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) blocks: u32,
    pub(super) threads: u32,
}

impl Shape {
    /// As many blocks as there are SMs, where a block holds that many warps, else more.
    pub(super) fn new(warps: u32, sms: u32) -> Self {
        let per_block = warps.div_ceil(sms.max(1)).clamp(1, WARPS_MAX);
        Self { blocks: warps.div_ceil(per_block), threads: per_block * WARP }
    }
}

/// The compiled I/O kernel.
pub(super) struct Kernel {
    function: CUfunction,
    held: Held,
}

// SAFETY: a handle, which any thread may pass to the driver.
unsafe impl Send for Kernel {}

impl Kernel {
    /// Compiles `ptx`.
    pub(super) fn compile(device: &Arc<CudaDevice>, ptx: &str) -> Result<Self, CudaError> {
        let Ok(image) = CString::new(ptx) else {
            return Err(CudaError::Argument("the PTX has a zero byte in it".into()));
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
        if let Err(error) = device.check("compiling the I/O kernel", "cuModuleLoadDataEx", code) {
            return Err(refusal(device, ptx, code, &log, error));
        }
        let held = Held::new(device, Resource::Module(module));
        let name = CString::new(ENTRY).unwrap_or_default();
        let mut function: CUfunction = std::ptr::null_mut();
        let get = device.api.cuModuleGetFunction;
        // SAFETY: a module that is loaded, a name that ends with a zero; a handle is written.
        let code = unsafe { get(&raw mut function, module, name.as_ptr().cast::<c_char>()) };
        device.check(format!("finding {ENTRY} in the PTX"), "cuModuleGetFunction", code)?;
        let kernel = Self { function, held };
        kernel.prepare()?;
        Ok(kernel)
    }

    /// Loads the code now, because the driver otherwise does that at the first launch and may wait
    /// for running kernels then; and compares the one argument's size.
    fn prepare(&self) -> Result<(), CudaError> {
        let (device, function) = (self.held.device(), self.function);
        if let Some(load) = device.api.cuFuncLoad {
            // SAFETY: a function of a module that is loaded.
            let code = unsafe { load(function) };
            device.check("loading the I/O kernel", "cuFuncLoad", code)?;
        }
        if let Some(get) = device.api.cuFuncGetParamInfo {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: two numbers are written.
            let code = unsafe { get(function, 0, &raw mut offset, &raw mut size) };
            device.check("asking for the kernel's argument", "cuFuncGetParamInfo", code)?;
            if (offset, size) != (0, size_of::<Args>()) {
                let expected = size_of::<Args>();
                return Err(CudaError::Argument(format!(
                    "the PTX was made from another abi.h: its kernel takes {size} bytes at \
                     {offset}, this program passes {expected}; run `cargo xtask ptx`"
                )));
            }
        }
        Ok(())
    }

    /// Blocks of this shape that one SM runs at the same time.
    pub(super) fn blocks_per_sm(&self, shape: Shape) -> Result<u32, CudaError> {
        let device = self.held.device();
        let _entered = device.enter()?;
        let mut blocks: c_int = 0;
        let ask = device.api.cuOccupancyMaxActiveBlocksPerMultiprocessor;
        // SAFETY: a number is written.
        let code = unsafe { ask(&raw mut blocks, self.function, shape.threads as c_int, 0) };
        let call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        device.check("asking how many blocks an SM runs", call, code)?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Puts a run of the kernel at the end of `stream`.
    ///
    /// # Safety
    /// What `args` point to is as [`gio_uring::IoExecutor::start`] demands until the run ended, and
    /// no other run of these warps is under way at the same time: all are on one stream. `stream`
    /// belongs to the kernel's device and is alive.
    pub(super) unsafe fn launch(
        &self,
        stream: CUstream,
        mut args: Args,
        shape: Shape,
    ) -> Result<(), CudaError> {
        let device = self.held.device();
        let _entered = device.enter()?;
        let mut params = [(&raw mut args).cast::<c_void>()];
        // SAFETY: the kernel takes one argument of this type, which is copied before the call
        // returns; the rest is the caller's promise.
        let code = unsafe {
            (device.api.cuLaunchKernel)(
                self.function,
                shape.blocks,
                1,
                1,
                shape.threads,
                1,
                1,
                0,
                stream,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        device.check("launching the I/O kernel", "cuLaunchKernel", code)
    }
}

/// The error of a module that was not loaded; with the compiler's words, if it was about the PTX.
fn refusal(
    device: &CudaDevice,
    ptx: &str,
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
        header: format!("{}, {}", line(".version"), line(".target")),
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
