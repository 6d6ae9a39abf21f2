#![allow(unsafe_code, reason = "copies between memories that are laid out here")]
//! Retrieve bandwidth into the GPU's memory, against a plain copy of the same number of bytes from
//! pinned host memory.

use std::{any::Any, ptr::NonNull, sync::Arc, time::Instant};

use anyhow::{Context as _, Result, ensure};
use gio_kernels::cuda::{CudaCopies, DeviceMemory};
use nvme_driver::{CopyDirection, CopyEngine as _, DeviceCopy, DevicePtr};

use super::{
    device::{Gpu, TIMEOUT},
    stack::Plan,
};
use crate::{
    sample::{Sides, gib_s, timed},
    stack::scattered,
};

/// Retrieves, and copies, alternately. Returns GiB/s.
pub fn measure(gpu: &Arc<Gpu>, plan: Plan, rounds: u32) -> Result<Sides> {
    let mut copy = Copy::new(gpu, plan)?;
    let stack = plan.stack(gpu)?;
    let blocks = scattered(plan.blocks);
    let sides = Sides::measure(rounds, |_| -> Result<_> {
        let (bytes, took) = timed(|| stack.retrieve(&blocks));
        let (bytes, expected) = (bytes?, (copy.layers * copy.layer_bytes) as u64);
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
    layers: usize,
    layer_bytes: usize,
}

impl Copy {
    fn new(gpu: &Gpu, Plan { shape, blocks, .. }: Plan) -> Result<Self> {
        let engine = CudaCopies::new(&gpu.device)?;
        let layers = shape.layers as usize;
        let layer_bytes = shape.block_bytes() as usize * blocks as usize / layers;
        let bytes = layer_bytes * layers;
        let (from, _, _, owner) = engine.host_memory(bytes)?.into_parts();
        let from = from.context("pinned memory has an address here")?;
        let to = gpu.device.allocate(bytes)?;
        Ok(Self { engine, from, _owner: owner, to, layers, layer_bytes })
    }

    fn run(&mut self) -> Result<f64> {
        let (len, start) = (self.layer_bytes, Instant::now());
        let copies: Vec<DeviceCopy> = (0..self.layers)
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
        Ok(gib_s((len * self.layers) as u64, start.elapsed()))
    }
}
