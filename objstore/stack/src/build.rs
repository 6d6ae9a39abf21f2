//! Builds the devices and memory of a store or a plane, by the first route that works.

use std::sync::Arc;

use nvme_driver::{Clock, ControllerOptions};
use objstore::{
    ExecutorFactory, Format, KvPool, KvShape, Route, StoreDevice, StoreGpu, StoreOptions,
};

use crate::{
    chosen::Placement,
    controllers::{Backend, Controllers},
    error::StackError,
    executor::Executor,
    place::Place,
    pool::PoolMemory,
    route::{PoolPlan, Prepared, by_first_route, routes},
};

/// Parameters of a build.
pub(crate) struct Plan<'a> {
    pub(crate) place: Place,
    pub(crate) executor: Executor,
    pub(crate) require: Option<Route>,
    pub(crate) shape: &'a KvShape,
    pub(crate) pool: &'a PoolMemory,
    pub(crate) controller: &'a ControllerOptions,
    pub(crate) options: StoreOptions,
    /// Format to apply to the devices first.
    pub(crate) format: Option<&'a Format>,
    pub(crate) clock: &'a Arc<dyn Clock>,
}

/// Parts from which a store or a plane is opened.
pub(crate) struct Parts {
    pub(crate) devices: Vec<StoreDevice>,
    pub(crate) pool: KvPool,
    pub(crate) gpu: Option<StoreGpu>,
    pub(crate) executor: ExecutorFactory,
    pub(crate) options: StoreOptions,
}

/// Resources that must outlive a store or a plane. Fields are dropped in this order: users before
/// what they use.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) pool: KvPool,
    pub(crate) placement: Placement,
    pub(crate) backend: Backend,
    pub(crate) place: Place,
}

impl Plan<'_> {
    /// Builds devices and pool by each route in turn, until `open` succeeds.
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails.
    pub(crate) fn open<T>(
        self,
        mut open: impl FnMut(Parts) -> Result<T, StackError>,
    ) -> Result<(T, Built), StackError> {
        let Self { mut place, executor, require, shape, pool, controller, clock, .. } = self;
        let routes = routes(executor, pool, require)?;
        let gpu = executor.gpu()?;
        let (mut options, mut format) = (self.options, self.format);
        if let Executor::Cuda(choice) = executor {
            options.sms = choice.io_sms;
        }
        // Files do not gain from deallocation: zeroing them only costs time.
        options.deallocate &= !place.is_on_files();
        let plan = PoolPlan { memory: pool, shape, staging_buffers: options.staging_buffers };
        let attach = || -> Result<Controllers, StackError> {
            let mut controllers = place.controllers(clock, controller, gpu.as_deref())?;
            controllers.outfit(options.queues_per_device, options.queue_depth, gpu.as_deref())?;
            Ok(controllers)
        };
        let prepare = |route, controllers: &mut _| {
            plan.prepare(route, controllers, gpu.as_ref()).map(|prepared| (route, prepared))
        };
        let taken = by_first_route(routes, attach, prepare, |controllers, (route, prepared)| {
            let (backend, devices, queues) = controllers.into_parts();
            let Prepared { pool, place: at } = prepared;
            if let Some(format) = format.take() {
                place.format(&devices, format)?;
            }
            let parts = Parts {
                devices,
                pool: pool.clone(),
                gpu: gpu.as_ref().map(|gpu| gpu.for_store()),
                executor: executor.factory(clock, gpu.as_ref()),
                options: options.clone(),
            };
            let placement = Placement { route, queues, pool: at, not_taken: Vec::new() };
            Ok((open(parts)?, pool, placement, backend))
        });
        let ((opened, pool, placement, backend), not_taken) = taken?;
        if self.format.is_some() {
            place.set_ready()?;
        }
        let placement = Placement { not_taken, ..placement };
        Ok((opened, Built { pool, placement, backend, place }))
    }
}

impl Built {
    /// Releases the engine's memory after the store was closed. Drop the rest after the controllers
    /// were shut down.
    pub(crate) fn unmap(self) -> (Backend, Place) {
        drop(self.pool);
        (self.backend, self.place)
    }
}
