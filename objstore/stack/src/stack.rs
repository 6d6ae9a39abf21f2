//! A store with everything below it.

use std::{ptr::NonNull, sync::Arc};

use nvme_driver::{Clock, Controller, ControllerOptions, DescriptorMode, DmaSpace};
use objstore::{
    BlockId, Format, KvPool, KvShape, Namespace, Store, StoreConfig, StoreDevice, StoreOptions,
};

use crate::{
    bounce::{self, Bounce, Bounced},
    emulation::Emulation,
    error::StackError,
    executor::Executor,
    home::Home,
    pool::{self, EngineMemory, PoolLayout},
};

/// Where the KV pool is.
#[derive(Debug, Clone)]
pub enum PoolMemory {
    /// In memory of the engine.
    Engine {
        /// The memory.
        memory: EngineMemory,
        /// Where the blocks are in it.
        layout: PoolLayout,
    },
    /// In memory that is allocated for it, one tensor after another.
    Own {
        /// Blocks.
        blocks: u32,
    },
}

/// What a store is built from.
#[derive(Debug)]
pub struct StackConfig {
    /// The place of the store's devices.
    pub home: Home,
    /// Who runs the I/O kernel.
    pub executor: Executor,
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
    bounce: Option<Arc<Bounce>>,
    pool: KvPool,
    _emulation: Emulation,
    _home: Home,
}

impl Stack {
    /// Builds the devices and opens the store on them.
    ///
    /// # Errors
    /// [`StackError`] of the part that refuses.
    pub fn open(config: StackConfig, clock: Arc<dyn Clock>) -> Result<Self, StackError> {
        Self::build(config, None, clock)
    }

    /// As [`Stack::open`], for a home that was just created: formats the devices first, and says
    /// that the home is ready.
    ///
    /// # Errors
    /// As for [`Stack::open`].
    pub fn create(
        config: StackConfig,
        format: &Format,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        Self::build(config, Some(format), clock)
    }

    /// As [`Stack::open`] for a home that is ready, and as [`Stack::create`] for one that was just
    /// created: what comes after [`Home::open_or_create`].
    ///
    /// # Errors
    /// As for [`Stack::open`].
    pub fn open_or_create(
        config: StackConfig,
        format: &Format,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        let format = (!config.home.is_ready()).then_some(format);
        Self::build(config, format, clock)
    }

    fn build(
        config: StackConfig,
        format: Option<&Format>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        let StackConfig { mut home, executor, shape, namespace, pool, controller, options } =
            config;
        let (emulation, controllers, domain) = Emulation::of_home(&home, &clock, &controller)?;
        let on_files = home.devices().any(|device| device.path.starts_with(home.dir()));
        let (registered, bounce) = register(pool, &shape, &*domain, &controllers)?;
        let devices: Vec<StoreDevice> = controllers.into_iter().map(StoreDevice::new).collect();
        if let Some(format) = format {
            Store::format(&devices, format)?;
            home.set_ready()?;
        }
        let store = Store::open(StoreConfig {
            devices,
            executor: executor.factory(&clock),
            clock,
            shape,
            namespace,
            pool: registered.clone(),
            gpu: None,
            // Files keep the space that they have: zeroing it would only make work.
            options: StoreOptions { deallocate: options.deallocate && !on_files, ..options },
        })?;
        Ok(Self { store, bounce, pool: registered, _emulation: emulation, _home: home })
    }

    /// The store. Clones of it are handles of the same one.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// First byte of a pool that was allocated.
    #[must_use]
    pub fn pool_host(&self) -> Option<NonNull<u8>> {
        self.pool.memory().host()
    }

    /// Whether blocks are copied between the engine's memory and bounce buffers, because the
    /// devices cannot describe where they are.
    #[must_use]
    pub fn is_bounced(&self) -> bool {
        self.bounce.is_some()
    }

    /// Bounce buffers for a request, if they are needed.
    pub(crate) fn bounce(&self, blocks: &[BlockId]) -> Result<Option<Bounced>, StackError> {
        self.bounce.as_ref().map(|bounce| bounce.take(blocks)).transpose()
    }

    /// Closes the store, shuts the devices down, and gives the engine's memory back. Other handles
    /// of the store say then that it was closed.
    ///
    /// # Errors
    /// [`StackError::Store`] when it does not end as it should; [`StackError::Shutdown`].
    pub fn close(self) -> Result<(), StackError> {
        let Self { store, bounce, pool, _emulation, _home } = self;
        let mut closed = store.close()?;
        drop((bounce, pool));
        closed.controllers.iter_mut().try_for_each(shut_down)
    }
}

pub(crate) fn shut_down(controller: &mut Controller) -> Result<(), StackError> {
    let device = controller.id().to_owned();
    controller.shutdown().map_err(|source| StackError::Shutdown { device, source })
}

/// What addresses and lengths have to be multiples of for a controller.
fn granularity(controller: &Controller) -> u64 {
    match controller.info().descriptor_mode {
        DescriptorMode::Sgl { granularity, .. } => granularity.into(),
        // A PRP entry is a multiple of four bytes.
        DescriptorMode::Prp { .. } => 4,
    }
}

/// Registers the pool, or bounce buffers in its place.
pub(crate) fn register(
    memory: PoolMemory,
    shape: &KvShape,
    space: &dyn DmaSpace,
    controllers: &[Controller],
) -> Result<(KvPool, Option<Arc<Bounce>>), StackError> {
    let unit = controllers.iter().map(granularity).max().unwrap_or(1);
    let lba_bytes = controllers.iter().flat_map(Controller::namespaces);
    let lba_bytes = lba_bytes.map(|space| 1 << space.lba_shift).max().unwrap_or(512);
    match memory {
        PoolMemory::Own { blocks } => Ok((pool::allocate(blocks, space, shape)?, None)),
        PoolMemory::Engine { memory, layout } => {
            let registered = pool::register(&memory, layout.clone(), space, shape)?;
            // The store proves with an LBA at both ends that devices reach the pool, and may not
            // use what is beside it.
            let has_room = layout.span(shape) >= 2 * lba_bytes;
            if has_room && layout.is_aligned(memory.base(), unit) {
                return Ok((registered, None));
            }
            drop(registered);
            let blocks = bounce::blocks(shape, layout.blocks);
            tracing::info!(blocks, unit, "the KV pool is not aligned: bounce buffers are used");
            let ours = pool::allocate(blocks, space, shape)?;
            let bounce = Bounce::new(memory, layout, ours.clone(), *shape);
            Ok((ours, Some(bounce)))
        }
    }
}
