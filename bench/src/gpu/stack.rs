//! A store whose I/O kernel runs on the GPU, over software controllers with memory media.

use std::sync::Arc;

use anyhow::Result;
use gio_kernels::cuda::{CudaOptions, LaunchMode};
use nvme_driver::Clock;
use objstore::{ExecutorFactory, KvShape, Route, StoreOptions};
use ripieno_stack::CudaChoice;

use super::device::Gpu;
use crate::stack::{self, OnGpu, Stack};

/// Configuration of a stack.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub route: Route,
    pub mode: LaunchMode,
    /// Dedicated SMs of the I/O kernel; `None` shares all of them.
    pub sms: Option<u32>,
    pub devices: u32,
    pub queues: u16,
    pub shape: KvShape,
    pub blocks: u32,
    /// Layers in flight at once, if they need staging memory.
    pub buffers: u32,
}

impl Plan {
    /// Creates a store of `blocks` blocks, filled from an equally large KV pool.
    pub fn stack(self, gpu: &Arc<Gpu>) -> Result<Stack> {
        let Self { route, mode, sms, devices, queues, shape, blocks, buffers } = self;
        let choice = CudaChoice {
            ordinal: gpu.device.report().ordinal,
            sms: sms.unwrap_or(CudaChoice::new(0).sms),
            is_resident: mode == LaunchMode::Resident,
        };
        let (maker, cuda) = (gpu.clone(), CudaOptions { mode, sms, ..CudaOptions::default() });
        let executor = move |clock: &Arc<dyn Clock>| -> ExecutorFactory {
            let (maker, clock) = (maker.clone(), clock.clone());
            Box::new(move || Ok(Box::new(maker.executor(cuda, clock.clone())?)))
        };
        let on_gpu = OnGpu {
            gpu: ripieno_stack::Gpu::on(gpu.device.clone(), choice)?,
            choice,
            route,
            executor: Box::new(executor),
        };
        let options = StoreOptions {
            queues,
            depth: 256,
            staging_buffers: buffers,
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
            Route::Staged => self.buffers as usize,
            Route::Host | Route::Direct => self.shape.layers as usize,
        }
    }
}
