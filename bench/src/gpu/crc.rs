#![allow(unsafe_code, reason = "launches a kernel on memory that is laid out here")]
//! Checksums that warps compute with the I/O kernel's code, from L2 and from HBM, by the GPU's own
//! clock.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use gio_kernels::cuda::{CudaStream, DeviceMemory};

use super::{
    abi::{CrcArgs, FillArgs},
    device::{Gpu, Span, TIMEOUT, wait_idle},
};
use crate::sample::gib_s;

/// Warps of a case; up to four per block. The most first: they leave little in L2 of what the
/// fewer read from HBM.
pub const WARPS: [u32; 3] = [WARPS_MAX, 4, 1];
/// Each warp has its own part of the memory, a fraction of this.
const WARPS_MAX: u32 = 16;
/// Objects per case that a processor checks.
const CHECKED: u32 = 4;

/// One measurement.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub kib: u32,
    pub warps: u32,
    /// Bytes that all [`WARPS_MAX`] warps read: they fit into L2, or exceed it by far.
    pub footprint: usize,
}

impl Case {
    /// Returns the number of blocks, each on an SM of its own.
    pub fn blocks(self) -> u32 {
        self.warps.div_ceil(4)
    }
}

/// Objects on the GPU, and their checksums.
pub struct Objects {
    gpu: Arc<Gpu>,
    stream: CudaStream,
    data: DeviceMemory,
    out: DeviceMemory,
    span: Span,
}

impl Objects {
    /// Allocates and fills `bytes`, for objects of at least `kib` KiB.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize, kib: u32) -> Result<Self> {
        let data = gpu.device.allocate(bytes)?;
        let out = gpu.device.allocate(bytes / (kib as usize * 1024) * 4)?;
        let stream = CudaStream::lowest(&gpu.device)?;
        let args = FillArgs { at: data.device().0, count: bytes as u64 / 2, seed: 13 };
        // SAFETY: the argument's type is that of abi.h; the wait below ends before the memory is
        // freed.
        unsafe { gpu.fill.launch(Gpu::raw(&stream), 1024, 256, args)? };
        wait_idle(&stream, TIMEOUT)?;
        Ok(Self { gpu: gpu.clone(), stream, data, out, span: Span::new(gpu)? })
    }

    /// Has each warp compute the checksums of as many bytes as its part of all memory, in several
    /// passes over its part of the footprint. Returns GiB/s of all warps.
    pub fn measure(&self, case: Case) -> Result<f64> {
        let Case { kib, warps, footprint } = case;
        let bytes = kib * 1024;
        let args = CrcArgs {
            base: self.data.device().0,
            out: self.out.device().0,
            bytes,
            objects: (footprint / bytes as usize) as u32 / WARPS_MAX,
            repeats: (self.data.len() / footprint) as u32,
            warps,
        };
        let took = self.span.time(&self.gpu, &self.stream, TIMEOUT, || {
            let threads = 32 * warps.min(4);
            // SAFETY: same as in `new`; `time` waits.
            unsafe {
                self.gpu.crc.launch(Gpu::raw(&self.stream), case.blocks(), threads, args)?;
            }
            Ok(())
        })?;
        ensure!(took > Duration::ZERO, "the GPU's clock did not move during the checksums");
        self.check(&args)?;
        let count = u64::from(warps * args.objects) * u64::from(args.repeats);
        Ok(gib_s(count * u64::from(bytes), took))
    }

    /// Compares some checksums, among them the first and the last one, with a processor's.
    fn check(&self, args: &CrcArgs) -> Result<()> {
        let last = args.warps * args.objects - 1;
        let mut object = vec![0; args.bytes as usize];
        for at in 0..CHECKED {
            let index = (u64::from(last) * u64::from(at) / u64::from(CHECKED - 1)) as u32;
            let mut found = [0; 4];
            self.out.read(index as usize * 4, &mut found)?;
            self.data.read(index as usize * object.len(), &mut object)?;
            let (found, wanted) = (u32::from_le_bytes(found), crc32c::crc32c(&object));
            ensure!(
                found == wanted,
                "the checksum of object {index} of {} bytes is {found:#010x}, not {wanted:#010x}",
                args.bytes
            );
        }
        Ok(())
    }
}
