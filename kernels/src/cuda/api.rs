#![allow(unsafe_code, reason = "looks functions up in libcuda by name")]
#![allow(non_snake_case, reason = "functions have the names that CUDA's documentation gives them")]
//! The libcuda functions used, looked up once.
//!
//! cudarc finds the library and declares the functions. They are not called through cudarc, because
//! it panics if an old driver lacks a symbol, and because it returns an enum, for which a newer
//! driver's unknown error would be an invalid value. Here an error is a number, and the compiler
//! checks the arguments against cudarc's declarations.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::OnceLock,
};

use cudarc::driver::sys::{
    self, CUcontext, CUdevResource, CUdevResourceDesc, CUdevResourceType, CUdevice,
    CUdevice_attribute, CUdeviceptr, CUfunction, CUfunction_attribute, CUgreenCtx, CUipcMemHandle,
    CUjit_option, CUmemcpyAttributes, CUmodule, CUpointer_attribute, CUresult, CUstream,
    CUstreamCaptureMode,
};

use super::error::{CudaError, ErrorCode};

macro_rules! functions {
    (
        required { $($name:ident($($arg:ty),* $(,)?);)* }
        unchecked { $($loose:ident($($loose_arg:ty),* $(,)?);)* }
        optional { $($extra:ident($($extra_arg:ty),* $(,)?);)* }
        optional_unchecked { $($odd:ident($($odd_arg:ty),* $(,)?);)* }
    ) => {
        /// Functions of libcuda. The optional ones were added in CUDA 12.1 and later.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> ErrorCode,)*
            $(pub(super) $loose: unsafe extern "C" fn($($loose_arg),*) -> ErrorCode,)*
            $(pub(super) $extra: Option<unsafe extern "C" fn($($extra_arg),*) -> ErrorCode>,)*
            $(pub(super) $odd: Option<unsafe extern "C" fn($($odd_arg),*) -> ErrorCode>,)*
        }

        const _: () = {
            $(let _: unsafe fn($($arg),*) -> CUresult = sys::$name;)*
            $(let _: unsafe fn($($extra_arg),*) -> CUresult = sys::$extra;)*
        };

        impl Api {
            /// Looks all functions up; the error lists the required ones that are missing.
            ///
            /// # Safety
            /// The library is libcuda, whose functions have these arguments.
            unsafe fn look_up() -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                // SAFETY: the caller checked that the library exists, so this does not panic; it
                // stays loaded.
                let library = unsafe { sys::culib() };
                macro_rules! get {
                    ($symbol:ident($of:ty)) => {
                        // SAFETY: the caller's promise. The type was checked against cudarc's
                        // above, or by eye: a number instead of the enum, or a function that
                        // cudarc declares for CUDA 12 only.
                        unsafe { library.get::<$of>(concat!(stringify!($symbol), "\0").as_bytes()) }
                            .map(|found| *found)
                            .map_err(|_| stringify!($symbol))
                    };
                }
                $(
                    let $name = get!($name(unsafe extern "C" fn($($arg),*) -> ErrorCode));
                    missing.extend($name.err());
                )*
                $(
                    let $loose = get!($loose(unsafe extern "C" fn($($loose_arg),*) -> ErrorCode));
                    missing.extend($loose.err());
                )*
                match ($($name,)* $($loose,)*) {
                    ($(Ok($name),)* $(Ok($loose),)*) => Ok(Self {
                        $($name,)*
                        $($loose,)*
                        $($extra: get!($extra(_)).ok(),)*
                        $($odd: get!($odd(_)).ok(),)*
                    }),
                    _ => Err(missing),
                }
            }
        }
    };
}

functions! {
    required {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
        cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);
        cuModuleLoadDataEx(
            *mut CUmodule,
            *const c_void,
            c_uint,
            *mut CUjit_option,
            *mut *mut c_void,
        );
        cuModuleUnload(CUmodule);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize);
        cuLaunchKernel(
            CUfunction,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            CUstream,
            *mut *mut c_void,
            *mut *mut c_void,
        );
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuMemcpyHtoD_v2(CUdeviceptr, *const c_void, usize);
        cuMemcpyDtoH_v2(*mut c_void, CUdeviceptr, usize);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);
        cuPointerSetAttribute(*const c_void, CUpointer_attribute, CUdeviceptr);
        cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr);
        cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint);
        cuIpcCloseMemHandle(CUdeviceptr);
        cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
        cuStreamDestroy_v2(CUstream);
        cuStreamQuery(CUstream);
        cuStreamWaitValue32_v2(CUstream, CUdeviceptr, u32, c_uint);
        cuStreamWriteValue32_v2(CUstream, CUdeviceptr, u32, c_uint);
    }
    unchecked {
        cuGetErrorName(ErrorCode, *mut *const c_char);
        cuGetErrorString(ErrorCode, *mut *const c_char);
    }
    optional {
        cuDeviceGetDevResource(CUdevice, *mut CUdevResource, CUdevResourceType);
        cuDevSmResourceSplitByCount(
            *mut CUdevResource,
            *mut c_uint,
            *const CUdevResource,
            *mut CUdevResource,
            c_uint,
            c_uint,
        );
        cuDevResourceGenerateDesc(*mut CUdevResourceDesc, *mut CUdevResource, c_uint);
        cuGreenCtxCreate(*mut CUgreenCtx, CUdevResourceDesc, CUdevice, c_uint);
        cuGreenCtxDestroy(CUgreenCtx);
        cuGreenCtxStreamCreate(*mut CUstream, CUgreenCtx, c_uint, c_int);
        cuCtxGetFlags(*mut c_uint);
        cuCtxSetFlags(c_uint);
        cuFuncLoad(CUfunction);
        cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
        cuMemcpyBatchAsync_v2(
            *mut CUdeviceptr,
            *mut CUdeviceptr,
            *mut usize,
            usize,
            *mut CUmemcpyAttributes,
            *mut usize,
            usize,
            CUstream,
        );
    }
    optional_unchecked {
        // Since CUDA 12.8; libcuda for CUDA 13 has it too, beside the new version.
        cuMemcpyBatchAsync(
            *mut CUdeviceptr,
            *mut CUdeviceptr,
            *mut usize,
            usize,
            *mut CUmemcpyAttributes,
            *mut usize,
            usize,
            *mut usize,
            CUstream,
        );
    }
}

/// Loads this machine's libcuda.
pub(super) fn load() -> Result<&'static Api, CudaError> {
    static API: OnceLock<Result<Api, CudaError>> = OnceLock::new();
    let api = API.get_or_init(|| {
        // SAFETY: opens libcuda if present; its initialisers are trusted as the driver is.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoLibrary);
        }
        // SAFETY: the library was found under libcuda's name.
        unsafe { Api::look_up() }.map_err(|missing| CudaError::OldDriver {
            found: version_alone().unwrap_or_else(|| "of an unknown version".into()),
            lacks: missing.join(", "),
        })
    });
    api.as_ref().map_err(Clone::clone)
}

/// Returns the version of a driver that lacks other functions.
fn version_alone() -> Option<String> {
    let mut version: c_int = 0;
    // SAFETY: as in `look_up`; the function is as old as the library.
    let code = unsafe {
        let get = sys::culib()
            .get::<unsafe extern "C" fn(*mut c_int) -> ErrorCode>(b"cuDriverGetVersion\0")
            .ok()?;
        get(&raw mut version)
    };
    (code == ErrorCode::SUCCESS).then(|| version_text(version))
}

/// Formats 13000 as `13.0`.
pub(super) fn version_text(version: i32) -> String {
    format!("for CUDA {}.{}", version / 1000, version % 1000 / 10)
}

impl Api {
    /// Converts a code to a result, with its name from the driver.
    pub(super) fn check(
        &self,
        what: impl Into<String>,
        call: &'static str,
        code: ErrorCode,
    ) -> Result<(), CudaError> {
        if code == ErrorCode::SUCCESS {
            return Ok(());
        }
        Err(CudaError::Call { what: what.into(), call, code, name: self.name_of(code) })
    }

    /// Formats a code as `CUDA_ERROR_OUT_OF_MEMORY, out of memory`.
    pub(super) fn name_of(&self, code: ErrorCode) -> String {
        let text = |get: unsafe extern "C" fn(ErrorCode, *mut *const c_char) -> ErrorCode| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: writes a pointer: null, or a constant of the driver.
            let code = unsafe { get(code, &raw mut text) };
            if code != ErrorCode::SUCCESS || text.is_null() {
                return None;
            }
            // SAFETY: as above.
            Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        match (text(self.cuGetErrorName), text(self.cuGetErrorString)) {
            (Some(name), Some(meaning)) => format!("{name}, {meaning}"),
            (Some(name), None) => name,
            _ => "an error unknown to this driver".into(),
        }
    }
}
