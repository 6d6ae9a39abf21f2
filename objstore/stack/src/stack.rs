//! A store with its devices, driver, executor and KV pool.

use std::sync::Arc;

use nvme_driver::{DmaSlice, DmaSpace, platform::buffer::Buffer};
use nvme_emu::Emu;
use objstore::{BlockId, BlockKey, KvPool, PoolId, PoolLayout, RawRing, Row, Store, Watch};

use crate::{
    chosen::Placement,
    devices::{Devices, shut_down},
    error::StackError,
    metrics::Endpoint,
    own::Process,
    pool::{self, EngineMemory},
    request::Request,
};

/// Parts below a store, a plane or a ring, besides the controllers. Fields are dropped in this
/// order: users before what they use.
#[derive(Debug)]
pub(crate) struct Below {
    pub(crate) pool: KvPool,
    /// The route and the locations.
    pub(crate) placement: Placement,
    /// The devices' address space, and the alignment that they need in it.
    pub(crate) space: Arc<dyn DmaSpace>,
    pub(crate) unit: u64,
    pub(crate) devices: Devices,
}

impl Below {
    /// Releases the engine's memory after the store was closed. Drop the rest after the controllers
    /// were shut down.
    pub(crate) fn unmap(self) -> Devices {
        self.devices
    }
}

/// A ring over devices without a store, and what it is on ([`crate::Builder::open_raw`]).
#[derive(Debug)]
pub struct RawStack {
    /// The ring.
    pub ring: RawRing,
    pub(crate) below: Below,
}

impl RawStack {
    /// Returns the memory of its transfers.
    #[must_use]
    pub fn pool(&self) -> &KvPool {
        &self.below.pool
    }

    /// Returns the route, and the locations.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.below.placement
    }

    /// Returns the software controllers, for tests; none for drives.
    #[must_use]
    pub fn emus(&self) -> &[Arc<Emu>] {
        self.below.devices.emus()
    }

    /// Closes the ring, releases the memory, and shuts the devices down.
    ///
    /// # Errors
    /// Returns an error of [`RawRing::close`], or [`StackError::Failed`].
    pub fn close(self) -> Result<(), StackError> {
        let controllers = self.ring.close()?;
        let _devices = self.below.unmap();
        controllers.iter().try_for_each(|controller| shut_down(&mut controller.lock()))
    }
}

/// A store, and what it is on. Dropping it closes the store ([`Stack::close`]), and logs a failure:
/// requests, prefixes and other handles that are left then fail as closed, and can be dropped at
/// any time. This waits for layers in flight, and for devices that do not answer until the timeouts
/// of [`objstore::StoreOptions`].
///
/// A process that was forked has no threads of the store. There, dropping a stack leaves the store
/// alone.
#[derive(Debug)]
pub struct Stack {
    pub(crate) metrics: Option<Endpoint>,
    pub(crate) pacer: Option<Watch>,
    store: Store,
    /// `None` once the store was closed.
    below: Option<Below>,
    process: Process,
}

impl Stack {
    pub(crate) fn new(store: Store, below: Below) -> Self {
        let (metrics, pacer, below) = (None, None, Some(below));
        Self { metrics, pacer, store, below, process: Process::current() }
    }

    fn below(&self) -> &Below {
        self.below.as_ref().expect("it is there until the store is closed")
    }

    /// Returns the store. Its clones are handles of the same store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the software controllers, for tests; none for drives.
    #[must_use]
    pub fn emus(&self) -> &[Arc<Emu>] {
        self.below().devices.emus()
    }

    /// Adds a pool of another engine, in memory of this process
    /// ([`objstore::Plane::add_pool`], [`Store::with_pool`]). Once
    /// [`objstore::Plane::remove_pool`] has returned it, the memory may be freed.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] or [`StackError::Pool`] if the layout does not fit,
    /// [`StackError::Config`] if the devices cannot describe its objects, or an error of
    /// [`objstore::Plane::add_pool`].
    pub fn add_pool(
        &self,
        memory: &EngineMemory,
        layout: &PoolLayout,
    ) -> Result<PoolId, StackError> {
        let Below { space, unit, .. } = self.below();
        pool::check(layout, self.store.shape(), memory.bytes())?;
        if !layout.is_aligned(memory.base().as_ptr().addr() as u64, *unit) {
            let problem =
                format!("objects do not begin at multiples of {unit} bytes; align rows and stride");
            return Err(StackError::Config { field: "pool", problem });
        }
        let pool = pool::register(memory, layout.clone(), &**space, self.store.shape())?;
        Ok(self.store.plane().add_pool(pool)?)
    }

    /// Adds pools of `blocks` blocks in memory of this process, one behind the other, each for one
    /// layer at a time ([`objstore::Plane::start_at`]). Remove the first one first.
    ///
    /// # Errors
    /// Same as [`Stack::add_pool`].
    pub fn add_layers(
        &self,
        memory: &EngineMemory,
        blocks: u32,
        count: u32,
    ) -> Result<Vec<PoolId>, StackError> {
        let Below { space, unit, .. } = self.below();
        let (shape, plane) = (self.store.shape(), self.store.plane());
        let (object, unit) = (u64::from(shape.object_bytes), *unit);
        if !object.is_multiple_of(unit) {
            let problem = format!("objects of {object} bytes are no multiples of {unit} bytes");
            return Err(StackError::Config { field: "pool", problem });
        }
        let (pages, head) = pool::whole_pages(memory.external());
        let (mapped, bytes) = (space.import(pages)?, KvPool::staging_bytes(shape, blocks, 1));
        let mut added = Vec::new();
        for at in 0..u64::from(count) {
            let pool = KvPool::of_layers(mapped.clone(), head as u64 + at * bytes, shape, blocks);
            match pool.map_err(StackError::from).and_then(|pool| Ok(plane.add_pool(pool)?)) {
                Ok(id) => added.push(id),
                Err(error) => {
                    added.into_iter().try_for_each(|id| plane.remove_pool(id).map(drop))?;
                    return Err(error);
                }
            }
        }
        Ok(added)
    }

    /// Writes a block of a pool in host memory: the objects of all rows, one after the other.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] for a block that is not there, another length than that of a
    /// block, or a pool on a GPU.
    pub fn write(&self, block: BlockId, bytes: &[u8]) -> Result<(), StackError> {
        let each = self.object_bytes(bytes.len())?;
        for (row, object) in (0..).map(Row).zip(bytes.chunks_exact(each)) {
            self.object(block, row)?.write(0, object)?;
        }
        Ok(())
    }

    /// Reads a block, as [`Stack::write`] writes it.
    ///
    /// # Errors
    /// Same as [`Stack::write`].
    pub fn read(&self, block: BlockId) -> Result<Vec<u8>, StackError> {
        let mut bytes = vec![0; self.store.shape().block_bytes() as usize];
        let each = self.object_bytes(bytes.len())?;
        for (row, object) in (0..).map(Row).zip(bytes.chunks_exact_mut(each)) {
            self.object(block, row)?.read(0, object)?;
        }
        Ok(bytes)
    }

    /// Returns the bytes of an object, if a block has `len` bytes.
    fn object_bytes(&self, len: usize) -> Result<usize, StackError> {
        let shape = self.store.shape();
        if len as u64 == shape.block_bytes() {
            return Ok(shape.object_bytes as usize);
        }
        let each = shape.block_bytes();
        let problem = format!("{len} bytes were given; a block has {each} ({shape})");
        Err(StackError::Config { field: "block", problem })
    }

    fn object(&self, block: BlockId, row: Row) -> Result<Buffer, StackError> {
        let pool = &self.below().pool;
        let wrong = |problem| StackError::Config { field: "block", problem };
        let missing = || wrong(format!("there is no block {block}; there are {}", pool.blocks()));
        let offset = pool.offset(block, row).ok_or_else(missing)? as usize;
        let bytes = pool.object_bytes() as usize;
        let slice = DmaSlice::new(pool.memory().clone(), offset, bytes)?;
        let remote = || wrong("the pool is not in memory of this process".to_owned());
        Buffer::new(slice).ok_or_else(remote)
    }

    /// Stores blocks under keys, as many leading ones as there is room for, and returns their
    /// number. They are durable then.
    ///
    /// # Errors
    /// Returns an error of [`Request::store`] or of its layers.
    pub fn save(&self, keys: &[BlockKey], blocks: &[BlockId]) -> Result<usize, StackError> {
        let request = Request::store(&self.store, keys, blocks)?;
        request.move_all()?;
        Ok(request.commit()?.accepted)
    }

    /// Loads those of the keys that are stored, each into its block, and returns which they are.
    ///
    /// # Errors
    /// Returns an error of [`Request::fetch`] or of its layers.
    pub fn load(&self, keys: &[BlockKey], blocks: &[BlockId]) -> Result<Vec<bool>, StackError> {
        let (request, found) = Request::fetch(&self.store, keys, blocks)?;
        request.move_all()?;
        Ok(found)
    }

    /// Returns true when blocks are copied through bounce buffers, because the devices cannot
    /// describe the engine's memory.
    #[must_use]
    pub fn is_bounced(&self) -> bool {
        self.below().pool.is_bounced()
    }

    /// Returns the endpoint of the metrics, if there is one.
    #[must_use]
    pub fn metrics(&self) -> Option<&Endpoint> {
        self.metrics.as_ref()
    }

    /// Returns the route, the locations, and the reasons against better routes.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.below().placement
    }

    /// Closes the store, shuts the devices down, and releases the engine's memory. Other handles of
    /// the store then fail as closed.
    ///
    /// # Errors
    /// Returns [`StackError::Store`] if closing the store fails, [`StackError::Failed`], or
    /// [`StackError::Forked`].
    pub fn close(mut self) -> Result<(), StackError> {
        self.shut()
    }

    fn shut(&mut self) -> Result<(), StackError> {
        let Some(below) = self.below.take() else { return Ok(()) };
        // Their threads use the store.
        let users = (self.metrics.take(), self.pacer.take());
        if let Err(error) = self.process.check() {
            std::mem::forget((users, self.store.clone(), below));
            return Err(error);
        }
        drop(users);
        let closed = self.store.clone().close();
        let _devices = below.unmap();
        closed?.controllers.iter_mut().try_for_each(shut_down)
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        match self.shut() {
            Ok(()) | Err(StackError::Forked { .. }) => {}
            Err(error) => tracing::error!(%error, "closing a store that was dropped"),
        }
    }
}
