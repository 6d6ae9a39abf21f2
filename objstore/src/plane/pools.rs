//! Pools of other owners, beside the plane's own: engines in other processes, whose memory this one
//! shares. Their jobs use the plane's ring, queues and recovery.

use std::collections::BTreeMap;

use gio_uring::{PoolDesc, PoolHandle, Uring};

use super::{job::next_id, target::with_objects};
use crate::{error::StoreError, ids::PoolId, registration::KvPool};

/// The pools that were added to a plane.
#[derive(Debug, Default)]
pub(super) struct Pools {
    added: BTreeMap<PoolId, Added>,
}

/// A pool that was added.
#[derive(Debug)]
struct Added {
    pool: KvPool,
    target: PoolHandle,
    /// By block: the job that last used it as a destination.
    used: Vec<u64>,
    /// Set when it is being removed: it takes no new jobs.
    is_ending: bool,
}

impl Pools {
    /// Registers a pool with the ring.
    pub(super) fn add(
        &mut self,
        pool: KvPool,
        ring: &mut Uring,
        desc: &PoolDesc,
        checksums: bool,
    ) -> Result<PoolId, StoreError> {
        let target = ring.register_pool(&with_objects(desc, &pool, checksums))?;
        let id = PoolId(next_id().0);
        let used = vec![0; pool.blocks() as usize];
        self.added.insert(id, Added { pool, target, used, is_ending: false });
        Ok(id)
    }

    /// Registers all pools with another ring.
    pub(super) fn register(
        &mut self,
        ring: &mut Uring,
        desc: &PoolDesc,
        checksums: bool,
    ) -> Result<(), StoreError> {
        for added in self.added.values_mut() {
            added.target = ring.register_pool(&with_objects(desc, &added.pool, checksums))?;
        }
        Ok(())
    }

    /// Returns the number of blocks of a pool that takes jobs, and the job that last used each.
    pub(super) fn blocks(&mut self, pool: PoolId) -> Result<(u32, &mut [u64]), StoreError> {
        match self.added.get_mut(&pool).filter(|added| !added.is_ending) {
            Some(added) => Ok((added.pool.blocks(), &mut added.used)),
            None => Err(StoreError::NoSuchPool { pool }),
        }
    }

    /// Returns the pool for operations of the ring.
    pub(super) fn target(&self, pool: PoolId) -> Option<&PoolHandle> {
        self.added.get(&pool).map(|added| &added.target)
    }

    /// Takes no new jobs for a pool from now on.
    pub(super) fn end(&mut self, pool: PoolId) -> Result<(), StoreError> {
        let added = self.added.get_mut(&pool).ok_or(StoreError::NoSuchPool { pool })?;
        added.is_ending = true;
        Ok(())
    }

    /// Gives a pool back of which nothing is in flight.
    pub(super) fn take(&mut self, pool: PoolId) -> Result<KvPool, StoreError> {
        let added = self.added.remove(&pool).ok_or(StoreError::NoSuchPool { pool })?;
        Ok(added.pool)
    }

    /// Returns all pools.
    pub(super) fn all(&self) -> Vec<KvPool> {
        self.added.values().map(|added| added.pool.clone()).collect()
    }
}
