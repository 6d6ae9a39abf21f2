//! Builds the devices and memory of a store or a plane, by the first route that works.

use std::sync::Arc;

use nvme_driver::{Clock, Controller, DmaSpace};
use objstore::{
    KvPool, KvShape, Namespace, Owner, RawRing, Route, Store, StoreConfig, StoreOptions,
};

use crate::{
    chosen::Placement,
    controllers::{Backend, Controllers},
    emulation::Emulation,
    error::StackError,
    executor::Executor,
    gpu::Gpu,
    owner::this_process,
    pool::PoolMemory,
    route::{Placed, PoolPlan, limits, routes},
};

/// Parameters of a store or a plane over any controllers. [`Builder`](crate::Builder) has defaults
/// for all of them.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "has a function")]
pub struct Plan<'a> {
    /// The executor of the I/O kernel.
    pub executor: Executor,
    /// The executor's GPU ([`Executor::gpu`]).
    pub gpu: Option<&'a Arc<Gpu>>,
    /// The required route; `None`: the best that works.
    pub require: Option<Route>,
    /// Shape of a KV block.
    pub shape: &'a KvShape,
    /// Location of the KV pool.
    pub pool: &'a PoolMemory,
    /// Options of the store.
    pub options: &'a StoreOptions,
    /// The clock of everything.
    pub clock: &'a Arc<dyn Clock>,
    /// Called before memory is allocated for a route, which is not taken after
    /// [`StackError::Unfit`].
    pub check: &'a dyn Fn(Route) -> Result<(), StackError>,
}

/// Resources of a store or a plane. Fields are dropped in this order: users before what they use.
#[derive(Debug)]
pub struct Built {
    pub(crate) pool: KvPool,
    /// The route and the locations.
    pub placement: Placement,
    /// The devices' address space, and the alignment that they need in it.
    pub(crate) space: Arc<dyn DmaSpace>,
    pub(crate) unit: u64,
    pub(crate) backend: Arc<Backend>,
}

/// Size of objects up to which software controllers lend their threads to the I/O kernel. Checksums
/// of larger ones take longer than what a change of threads costs (docs/results/file.md).
const LENT_OBJECT_BYTES_MAX: u32 = 16 << 10;

impl Plan<'_> {
    /// Takes devices from `controllers` and memory, by each route in turn until `open` succeeds.
    ///
    /// # Errors
    /// Returns [`StackError::NoRoute`], or the first error other than [`StackError::Unfit`] and
    /// [`objstore::StoreError::Route`], which concern a single route.
    pub fn open<T, E: From<StackError>>(
        &self,
        mut controllers: impl FnMut() -> Result<Controllers, E>,
        mut open: impl FnMut(StoreConfig) -> Result<T, StackError>,
    ) -> Result<(T, Built), E> {
        // The same for all routes: a claim that a route left is this process's own.
        let owner = this_process()?;
        let (mut spare, mut not_taken) = (None, Vec::new());
        for &route in routes(self.executor, self.pool, self.require)? {
            let mut ready = match spare.take() {
                Some(controllers) => controllers,
                None => {
                    let mut controllers = controllers()?;
                    controllers.outfit(self.options, self.gpu.map(|gpu| &**gpu))?;
                    controllers
                }
            };
            let opened = match self.prepare(route, &mut ready) {
                Ok(prepared) => self.take(route, ready, prepared, &owner, &mut open),
                Err(error) => {
                    spare = Some(ready);
                    Err(error)
                }
            };
            match opened {
                Ok((opened, mut built)) => {
                    built.placement.not_taken = not_taken;
                    return Ok((opened, built));
                }
                Err(error) => {
                    let not = error.of_route(route)?;
                    tracing::info!(%route, why = not.why, "the route is not taken");
                    not_taken.push(not);
                }
            }
        }
        Err(StackError::NoRoute { tried: not_taken }.into())
    }

    /// Registers the pool, and names its location; leaves the controllers unchanged if it fails.
    fn prepare(&self, route: Route, controllers: &mut Controllers) -> Result<Placed, StackError> {
        (self.check)(route)?;
        let staging_buffers = self.options.staging_buffers;
        let pool = PoolPlan { memory: self.pool, shape: self.shape, staging_buffers };
        pool.prepare(route, controllers, self.gpu)
    }

    fn take<T>(
        &self,
        route: Route,
        controllers: Controllers,
        (pool, place): Placed,
        owner: &Owner,
        open: &mut impl FnMut(StoreConfig) -> Result<T, StackError>,
    ) -> Result<(T, Built), StackError> {
        let (space, (unit, _)) = (controllers.space.clone(), limits(&controllers));
        let (backend, devices, queues) = controllers.into_parts();
        let mut options = StoreOptions { owner: owner.clone(), ..self.options.clone() };
        if let Executor::Cuda(choice) = self.executor {
            options.sms = choice.sms;
        }
        let is_small = self.shape.object_bytes <= LENT_OBJECT_BYTES_MAX;
        let emulation = backend.emulation().filter(|_| is_small);
        let lent = emulation.map(Emulation::threads).unwrap_or_default();
        let placement = Placement { route, queues, pool: place, not_taken: Vec::new() };
        let opened = open(StoreConfig {
            devices,
            executor: self.executor.factory(self.clock, self.gpu, lent),
            clock: self.clock.clone(),
            shape: *self.shape,
            namespace: Namespace::default(),
            pool: pool.clone(),
            gpu: self.gpu.map(|gpu| gpu.for_store()),
            options,
        })?;
        Ok((opened, Built { pool, placement, space, unit, backend }))
    }
}

impl Built {
    /// Returns the software controllers, if there are any.
    #[must_use]
    pub fn emulation(&self) -> Option<&Emulation> {
        self.backend.emulation()
    }

    /// Closes the store, releases the engine's memory, and shuts the devices down. Returns their
    /// models.
    ///
    /// # Errors
    /// Returns [`StackError::Store`] if closing the store fails, or [`StackError::Shutdown`].
    pub fn close(self, store: Store) -> Result<Vec<String>, StackError> {
        let closed = store.close()?;
        let _backend = self.unmap();
        let shut_down = |mut controller: Controller| {
            shut_down(&mut controller)?;
            Ok(controller.info().model.clone())
        };
        closed.controllers.into_iter().map(shut_down).collect()
    }

    /// Same as [`Built::close`], for a ring without a store.
    ///
    /// # Errors
    /// Same as [`Built::close`].
    pub fn close_ring(self, ring: RawRing) -> Result<(), StackError> {
        let controllers = ring.close()?;
        let _backend = self.unmap();
        controllers.iter().try_for_each(|controller| shut_down(&mut controller.lock()))
    }

    /// Releases the engine's memory after the store was closed. Drop the rest after the controllers
    /// were shut down.
    pub(crate) fn unmap(self) -> Arc<Backend> {
        self.backend
    }
}

pub(crate) fn shut_down(controller: &mut Controller) -> Result<(), StackError> {
    let device = controller.id().to_owned();
    controller.shutdown().map_err(|source| StackError::Shutdown { device, source })
}
