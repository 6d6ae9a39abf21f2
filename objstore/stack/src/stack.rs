//! A store with its devices, driver, executor and KV pool.

use std::{ptr::NonNull, sync::Arc};

use nvme_driver::{Clock, Controller, ControllerOptions};
use objstore::{Format, KvShape, Namespace, Route, Store, StoreConfig, StoreOptions};

use crate::{
    build::{Built, Parts, Plan},
    chosen::Placement,
    error::StackError,
    executor::Executor,
    place::Place,
    pool::PoolMemory,
};

/// Parameters of a stack.
#[derive(Debug)]
pub struct StackConfig {
    /// The store's devices.
    pub place: Place,
    /// The executor of the I/O kernel.
    pub executor: Executor,
    /// The required route; `None`: the best that works.
    pub require: Option<Route>,
    /// Shape of a KV block.
    pub shape: KvShape,
    /// The namespace of the first handle.
    pub namespace: Namespace,
    /// Location of the KV pool.
    pub pool: PoolMemory,
    /// Options for attaching to controllers.
    pub controller: ControllerOptions,
    /// Options of the store.
    pub options: StoreOptions,
}

/// A store, and the resources that must outlive it. Fields are dropped in this order: users before
/// what they use.
#[derive(Debug)]
pub struct Stack {
    store: Store,
    built: Built,
}

impl Stack {
    /// Builds the devices and opens the store on them.
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails.
    pub fn open(config: StackConfig, clock: Arc<dyn Clock>) -> Result<Self, StackError> {
        Self::build(config, None, clock)
    }

    /// Formats the devices of a newly created home, or drives, and opens the store on them. Marks a
    /// home as ready.
    ///
    /// # Errors
    /// Same as [`Stack::open`], and [`StackError::NotEmpty`].
    pub fn create(
        config: StackConfig,
        format: &Format,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        Self::build(config, Some(format), clock)
    }

    /// Opens the store of a home that is ready, or formats one that was just created: for use after
    /// [`crate::Home::open_or_create`].
    ///
    /// # Errors
    /// Same as [`Stack::open`].
    pub fn open_or_create(
        config: StackConfig,
        format: &Format,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        let format = (!config.place.is_ready()).then_some(format);
        Self::build(config, format, clock)
    }

    fn build(
        config: StackConfig,
        format: Option<&Format>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        let StackConfig { place, executor, require, shape, namespace, pool, controller, options } =
            config;
        let plan = Plan {
            place,
            executor,
            require,
            shape: &shape,
            pool: &pool,
            controller: &controller,
            options,
            format,
            clock: &clock,
        };
        let (store, built) = plan.open(|parts| {
            let Parts { devices, pool, gpu, executor, options } = parts;
            let (clock, namespace) = (clock.clone(), namespace.clone());
            Ok(Store::open(StoreConfig {
                devices,
                executor,
                clock,
                shape,
                namespace,
                pool,
                gpu,
                options,
            })?)
        })?;
        Ok(Self { store, built })
    }

    /// Returns the store. Its clones are handles of the same store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the first byte of a pool that was allocated in host memory.
    #[must_use]
    pub fn pool_host(&self) -> Option<NonNull<u8>> {
        self.built.pool.memory().host()
    }

    /// Returns true when blocks are copied through bounce buffers, because the devices cannot
    /// describe the engine's memory.
    #[must_use]
    pub fn is_bounced(&self) -> bool {
        self.built.pool.is_bounced()
    }

    /// Returns the route, the locations, and the reasons against better routes.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.built.placement
    }

    /// Closes the store, shuts the devices down, and releases the engine's memory. Other handles of
    /// the store then fail as closed.
    ///
    /// # Errors
    /// Returns [`StackError::Store`] if closing the store fails, or [`StackError::Shutdown`].
    pub fn close(self) -> Result<(), StackError> {
        let Self { store, built } = self;
        let mut closed = store.close()?;
        let _below = built.unmap();
        closed.controllers.iter_mut().try_for_each(shut_down)
    }
}

pub(crate) fn shut_down(controller: &mut Controller) -> Result<(), StackError> {
    let device = controller.id().to_owned();
    controller.shutdown().map_err(|source| StackError::Shutdown { device, source })
}
