//! A store with everything below it.

use std::{ptr::NonNull, sync::Arc};

use nvme_driver::{Clock, Controller, ControllerOptions};
use objstore::{BlockId, Format, KvShape, Namespace, Store, StoreConfig, StoreOptions};

use crate::{
    bounce::Bounced,
    build::{Built, Parts, Placement, Plan},
    error::StackError,
    executor::Executor,
    place::Place,
    pool::PoolMemory,
    route::Route,
};

/// What a store is built from.
#[derive(Debug)]
pub struct StackConfig {
    /// The store's devices.
    pub place: Place,
    /// Who runs the I/O kernel.
    pub executor: Executor,
    /// The way of the data; `None`: the best that works.
    pub require: Option<Route>,
    /// What a KV block is made of.
    pub shape: KvShape,
    /// The namespace of the first handle.
    pub namespace: Namespace,
    /// Where the KV pool is.
    pub pool: PoolMemory,
    /// How the driver attaches to controllers.
    pub controller: ControllerOptions,
    /// The numbers of the store.
    pub options: StoreOptions,
}

/// A store, and what has to live as long. Fields are dropped in this order: who uses before who is
/// used.
#[derive(Debug)]
pub struct Stack {
    store: Store,
    built: Built,
}

impl Stack {
    /// Builds the devices and opens the store on them.
    ///
    /// # Errors
    /// [`StackError`] of the part that refuses.
    pub fn open(config: StackConfig, clock: Arc<dyn Clock>) -> Result<Self, StackError> {
        Self::build(config, None, clock)
    }

    /// As [`Stack::open`], for a home that was just created, or for drives: formats the devices
    /// first, and says that a home is ready.
    ///
    /// # Errors
    /// As for [`Stack::open`], and [`StackError::NotEmpty`].
    pub fn create(
        config: StackConfig,
        format: &Format,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        Self::build(config, Some(format), clock)
    }

    /// As [`Stack::open`] for a home that is ready, and as [`Stack::create`] for one that was just
    /// created: what comes after [`crate::Home::open_or_create`].
    ///
    /// # Errors
    /// As for [`Stack::open`].
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

    /// The store. Clones of it are handles of the same one.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// First byte of a pool that was allocated.
    #[must_use]
    pub fn pool_host(&self) -> Option<NonNull<u8>> {
        self.built.pool.memory().host()
    }

    /// Whether blocks are copied between the engine's memory and bounce buffers, because the
    /// devices cannot describe where they are.
    #[must_use]
    pub fn is_bounced(&self) -> bool {
        self.built.bounce.is_some()
    }

    /// The way of the data, where things are, and why not in a better place.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.built.placement
    }

    /// Bounce buffers for a request, if they are needed.
    pub(crate) fn bounce(&self, blocks: &[BlockId]) -> Result<Option<Bounced>, StackError> {
        self.built.bounce.as_ref().map(|bounce| bounce.take(blocks)).transpose()
    }

    /// Closes the store, shuts the devices down, and gives the engine's memory back. Other handles
    /// of the store say then that it was closed.
    ///
    /// # Errors
    /// [`StackError::Store`] when it does not end as it should; [`StackError::Shutdown`].
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
