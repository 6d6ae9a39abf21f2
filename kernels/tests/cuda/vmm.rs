//! GPU memory that a program composes of several allocations (cuMemCreate), like PyTorch's
//! expandable segments.
#![allow(unsafe_code, reason = "calls libcuda")]

use cudarc::driver::sys::{self, CUresult};

/// Bytes of one allocation: the allocation granularity of all GPUs so far.
pub(crate) const CHUNK: usize = 2 << 20;

/// Allocations at consecutive addresses.
pub(crate) struct VmmPool {
    address: sys::CUdeviceptr,
    handles: Vec<sys::CUmemGenericAllocationHandle>,
}

fn ok(call: &str, result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS, "{call}");
}

/// Calls libcuda with GPU 0's primary context retained and current.
fn in_context<T>(call: impl FnOnce() -> T) -> T {
    let mut context = std::ptr::null_mut();
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: handles and a mode are written, and restored below.
    unsafe {
        let mut device = 0;
        ok("cuDeviceGet", sys::cuDeviceGet(&raw mut device, 0));
        ok("retain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device));
        ok("push", sys::cuCtxPushCurrent_v2(context));
        ok("mode", sys::cuThreadExchangeStreamCaptureMode(&raw mut mode));
        let result = call();
        ok("mode", sys::cuThreadExchangeStreamCaptureMode(&raw mut mode));
        ok("pop", sys::cuCtxPopCurrent_v2(&raw mut context));
        ok("release", sys::cuDevicePrimaryCtxRelease_v2(device));
        result
    }
}

impl VmmPool {
    pub(crate) fn new(allocations: usize) -> Self {
        let mut pool = Self { address: 0, handles: Vec::new() };
        in_context(|| pool.fill(allocations));
        pool
    }

    fn fill(&mut self, allocations: usize) {
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: 0,
        };
        // SAFETY: a plain struct of numbers, for which 0 is valid in every field but the type,
        // which is set next.
        let mut prop: sys::CUmemAllocationProp = unsafe {
            let mut prop = std::mem::MaybeUninit::<sys::CUmemAllocationProp>::zeroed();
            (*prop.as_mut_ptr()).type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            (*prop.as_mut_ptr()).location = location;
            prop.assume_init()
        };
        prop.allocFlags.gpuDirectRDMACapable = 1;
        let access = sys::CUmemAccessDesc {
            location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let all = allocations * CHUNK;
        // SAFETY: an address range and handles are written, which `drop` releases.
        unsafe {
            ok("reserve", sys::cuMemAddressReserve(&raw mut self.address, all, 0, 0, 0));
            for index in 0..allocations {
                let (mut handle, at) = (0, self.address + (index * CHUNK) as u64);
                ok("cuMemCreate", sys::cuMemCreate(&raw mut handle, CHUNK, &raw const prop, 0));
                self.handles.push(handle);
                ok("cuMemMap", sys::cuMemMap(at, CHUNK, 0, handle, 0));
            }
            ok("access", sys::cuMemSetAccess(self.address, all, &raw const access, 1));
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for VmmPool {
    fn drop(&mut self) {
        in_context(|| {
            for (index, handle) in self.handles.iter().enumerate() {
                let at = self.address + (index * CHUNK) as u64;
                // SAFETY: mapped and created by `fill`, and no longer used.
                unsafe {
                    ok("cuMemUnmap", sys::cuMemUnmap(at, CHUNK));
                    ok("cuMemRelease", sys::cuMemRelease(*handle));
                }
            }
            let all = self.handles.len() * CHUNK;
            // SAFETY: reserved by `fill`.
            ok("free", unsafe { sys::cuMemAddressFree(self.address, all) });
        });
    }
}
