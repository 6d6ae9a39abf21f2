//! A store whose I/O kernel runs on the GPU, over software controllers with memory media.

use std::sync::Arc;

use anyhow::Result;
use gio_kernels::cuda::LaunchMode;
use objstore::{KvShape, Route, StoreOptions};
use ripieno_stack::CudaChoice;

use super::device::Gpu;
use crate::stack::{self, OnGpu, Stack};

/// Layers in flight at once, if they need staging memory.
const BUFFERS: u32 = 4;

/// Configuration of a stack.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub route: Route,
    pub mode: LaunchMode,
    pub devices: u32,
    pub shape: KvShape,
    pub blocks: u32,
}

impl Plan {
    /// Creates a store of `blocks` blocks, filled from an equally large KV pool.
    pub fn stack(self, gpu: &Arc<Gpu>) -> Result<Stack> {
        let Self { route, mode, devices, shape, blocks } = self;
        let is_resident = mode == LaunchMode::Resident;
        let choice = CudaChoice { is_resident, ..CudaChoice::new(gpu.device.report().ordinal) };
        let on_gpu =
            OnGpu { gpu: ripieno_stack::Gpu::on(gpu.device.clone(), choice)?, choice, route };
        let options = StoreOptions {
            queues: 4,
            depth: 256,
            staging_buffers: BUFFERS,
            iocbs: shape.layers.next_power_of_two().max(256),
            ..StoreOptions::default()
        };
        let (media, format) =
            (stack::media(&shape, blocks, devices), ripieno_testkit::format(shape));
        Stack::over(media, &options, &format, blocks, None, Some(&on_gpu))
    }

    /// Returns the number of layers in flight at once.
    pub fn burst(self) -> usize {
        match self.route {
            Route::Staged => BUFFERS as usize,
            Route::Host | Route::Direct => self.shape.layers as usize,
        }
    }
}
