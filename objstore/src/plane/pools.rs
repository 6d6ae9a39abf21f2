//! The pools of engines: the plane's own, and those of other owners, engines in other processes,
//! whose memory this one shares. The jobs of all use the plane's ring, queues and recovery.

use std::collections::BTreeMap;

use gio_uring::{PoolDesc, PoolHandle, Uring};

use super::job::next_id;
use crate::{data_path::Route, error::StoreError, ids::PoolId, registration::KvPool};

/// The pools of a plane. Its own has the default number.
#[derive(Debug)]
pub(super) struct Pools {
    all: BTreeMap<PoolId, Registered>,
}

/// A pool, and its use.
#[derive(Debug)]
struct Registered {
    pool: KvPool,
    /// `None` for a pool that no device reaches.
    target: Option<PoolHandle>,
    /// By block: the job that last used it as a destination.
    used: Vec<u64>,
    /// Set when it is being removed: it takes no new jobs.
    is_ending: bool,
}

impl Registered {
    fn new(pool: KvPool) -> Self {
        // Jobs name the engine's blocks, not its bounce buffers.
        let blocks = pool.engine().map_or(pool.blocks(), |engine| engine.layout.blocks);
        Self { pool, target: None, used: vec![0; blocks as usize], is_ending: false }
    }

    /// Registers it with a ring.
    fn register(
        &mut self,
        ring: &mut Uring,
        desc: &PoolDesc,
        checksums: bool,
    ) -> Result<(), StoreError> {
        if self.pool.path() != Route::Staged {
            self.target = Some(ring.register_pool(&self.pool.describe(desc, checksums))?);
        }
        Ok(())
    }
}

impl Pools {
    /// Creates a plane's own pool.
    pub(super) fn new(own: KvPool) -> Self {
        Self { all: BTreeMap::from([(PoolId::default(), Registered::new(own))]) }
    }

    /// Adds a pool of another owner, and registers it with the ring.
    pub(super) fn add(
        &mut self,
        pool: KvPool,
        ring: &mut Uring,
        desc: &PoolDesc,
        checksums: bool,
    ) -> Result<PoolId, StoreError> {
        let mut added = Registered::new(pool);
        added.register(ring, desc, checksums)?;
        let id = PoolId(next_id().0);
        self.all.insert(id, added);
        Ok(id)
    }

    /// Registers all pools with a ring.
    pub(super) fn register(
        &mut self,
        ring: &mut Uring,
        desc: &PoolDesc,
        checksums: bool,
    ) -> Result<(), StoreError> {
        self.all.values_mut().try_for_each(|pool| pool.register(ring, desc, checksums))
    }

    /// Returns, for each block of a pool that takes jobs, the job that last used it.
    pub(super) fn used(&mut self, pool: PoolId) -> Result<&mut [u64], StoreError> {
        match self.all.get_mut(&pool).filter(|found| !found.is_ending) {
            Some(found) => Ok(&mut found.used),
            None => Err(StoreError::no_such_pool(pool)),
        }
    }

    /// Returns the pool for operations of the ring.
    pub(super) fn target(&self, pool: PoolId) -> Option<&PoolHandle> {
        self.all.get(&pool)?.target.as_ref()
    }

    /// Takes no new jobs for a pool that was added from now on.
    pub(super) fn end(&mut self, pool: PoolId) -> Result<(), StoreError> {
        let added = self.all.get_mut(&pool).filter(|_| pool != PoolId::default());
        added.ok_or_else(|| StoreError::no_such_pool(pool))?.is_ending = true;
        Ok(())
    }

    /// Gives a pool back that is being removed, and of which nothing is in flight.
    pub(super) fn take(&mut self, pool: PoolId) -> Result<KvPool, StoreError> {
        Ok(self.all.remove(&pool).ok_or_else(|| StoreError::no_such_pool(pool))?.pool)
    }

    /// Returns all pools.
    pub(super) fn all(&self) -> Vec<KvPool> {
        self.all.values().map(|found| found.pool.clone()).collect()
    }
}
