#![allow(unsafe_code, reason = "copies between memories that are laid out here")]
//! Retrieve bandwidth into the GPU's memory, against a plain copy of the same number of bytes from
//! pinned host memory.

use std::{any::Any, ptr::NonNull, sync::Arc, time::Instant};

use anyhow::{Context as _, Result, ensure};
use gio_kernels::cuda::{CudaCopies, DeviceMemory, LaunchMode};
use nvme_driver::{CopyDirection, CopyEngine as _, DeviceCopy, DevicePtr};
use objstore::{KvShape, Route};

use super::{
    device::{Gpu, TIMEOUT},
    stack::Plan,
};
use crate::{
    sample::{Sides, gib_s, timed},
    stack::scattered,
};

/// Amount of data.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub layers: u32,
    pub object_bytes: u32,
    pub blocks: u32,
    pub devices: u32,
}

impl Size {
    /// Returns layers of 64 MiB: far larger than a cache, with many objects.
    pub fn new(tiny: bool) -> Self {
        if tiny {
            return Self { layers: 2, object_bytes: 8 << 10, blocks: 16, devices: 2 };
        }
        Self { layers: 4, object_bytes: 128 << 10, blocks: 512, devices: 4 }
    }

    fn layer_bytes(self) -> usize {
        self.object_bytes as usize * self.blocks as usize
    }
}

/// Retrieves over `route`, and copies, alternately. Returns GiB/s.
pub fn measure(
    gpu: &Arc<Gpu>,
    route: Route,
    mode: LaunchMode,
    size: Size,
    rounds: u32,
) -> Result<Sides> {
    let mut copy = Copy::new(gpu, size)?;
    let Size { layers, object_bytes, blocks, devices } = size;
    let shape = KvShape { layers, segments: 1, object_bytes, block_tokens: 64 };
    let stack = Plan { route, mode, devices, shape, blocks }.stack(gpu)?;
    let blocks = scattered(size.blocks);
    let sides = Sides::measure(rounds, |_| -> Result<_> {
        let (bytes, took) = timed(|| stack.retrieve(&blocks));
        let bytes = bytes?;
        let expected = size.layer_bytes() as u64 * u64::from(size.layers);
        ensure!(bytes == expected, "{bytes} bytes were read, not {expected}");
        Ok((gib_s(bytes, took), copy.run()?))
    })?;
    stack.close()?;
    Ok(sides)
}

/// One copy per layer from pinned memory: the bandwidth of the bus.
struct Copy {
    engine: CudaCopies,
    from: NonNull<u8>,
    _owner: Arc<dyn Any + Send + Sync>,
    to: DeviceMemory,
    size: Size,
}

impl Copy {
    fn new(gpu: &Gpu, size: Size) -> Result<Self> {
        let engine = CudaCopies::new(&gpu.device)?;
        let bytes = size.layer_bytes() * size.layers as usize;
        let (from, _, _, owner) = engine.host_memory(bytes)?.into_parts();
        let from = from.context("pinned memory has an address here")?;
        Ok(Self { engine, from, _owner: owner, to: gpu.device.allocate(bytes)?, size })
    }

    fn run(&mut self) -> Result<f64> {
        let (len, start) = (self.size.layer_bytes(), Instant::now());
        let copies: Vec<DeviceCopy> = (0..self.size.layers as usize)
            .map(|layer| DeviceCopy {
                // SAFETY: inside the memory.
                host: unsafe { self.from.add(layer * len) },
                device: DevicePtr(self.to.device().0 + (layer * len) as u64),
                len,
                direction: CopyDirection::HostToDevice,
            })
            .collect();
        // SAFETY: both memories live in `self`, and nothing else uses them; the loop below waits,
        // and a copy that exceeds its timeout has lost its GPU.
        let fence = unsafe { self.engine.submit(&copies)? };
        while !self.engine.is_done(fence)? {
            ensure!(start.elapsed() < TIMEOUT, "a plain copy did not end");
            std::hint::spin_loop();
        }
        Ok(gib_s((len * self.size.layers as usize) as u64, start.elapsed()))
    }
}
