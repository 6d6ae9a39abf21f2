//! The I/O kernel over devices without files, for measurements.

use std::{mem, sync::Arc};

use gio_uring::{Completion, IoCtx, IocbId, Progress, UringCounters};
use kv_catalog::Region;
use nvme_driver::{Clock, Nanos};
use nvme_spec::{ids::Nsid, nvm::Direction};

use super::{
    devices::{Devices, PlaneDevice},
    transport::Transport,
};
use crate::{
    config::{ExecutorFactory, StoreOptions},
    device::SharedController,
    error::StoreError,
    registration::KvPool,
};

/// A ring of explicit contexts over devices: the same queues, rings and I/O kernel as a plane's,
/// and no files. It writes only what it is told to.
///
/// A command that fails or times out is an error of its operation. There is no recovery: close the
/// ring.
#[derive(Debug)]
pub struct RawRing {
    transport: Transport,
    /// Memory that devices may reach while they have queues.
    pool: KvPool,
    /// [`Clock::happened`] before the last poll.
    seen: u64,
}

impl RawRing {
    /// Creates the queues and starts the I/O kernel on them. Contexts, at most `contexts_max` of an
    /// operation, name memory of `pool`.
    ///
    /// # Errors
    /// Returns [`StoreError::Driver`], [`StoreError::Config`], or an error of the ring.
    pub fn open(
        devices: Vec<PlaneDevice>,
        executor: ExecutorFactory,
        clock: Arc<dyn Clock>,
        pool: KvPool,
        options: &StoreOptions,
        contexts_max: u32,
    ) -> Result<Self, StoreError> {
        let devices = Devices::new(devices, options, clock.now())?;
        let options = options.clone();
        let transport = Transport::new(devices, executor, clock, options, contexts_max)?;
        Ok(Self { transport, pool, seen: 0 })
    }

    /// Returns the region of each device that contexts should stay in.
    #[must_use]
    pub fn regions(&self) -> Vec<Region> {
        self.transport.devices.regions()
    }

    /// Returns the controllers and the namespaces in use: for logs, and for I/O on host queues.
    pub fn controllers(&self) -> impl Iterator<Item = (&SharedController, Nsid)> {
        self.transport.devices.all.iter().map(|device| (&device.controller, device.nsid))
    }

    /// Submits an operation; see [`gio_uring::Uring::submit_explicit`].
    ///
    /// # Errors
    /// Returns an error of the ring.
    pub fn submit(
        &mut self,
        direction: Direction,
        contexts: &[IoCtx],
    ) -> Result<IocbId, StoreError> {
        Ok(self.transport.ring()?.submit_explicit(direction, false, contexts)?)
    }

    /// Polls the executor; never blocks.
    ///
    /// # Errors
    /// Returns an error of the ring: its kernel failed.
    pub fn poll(&mut self) -> Result<Progress, StoreError> {
        self.seen = self.transport.clock.happened();
        Ok(self.transport.ring()?.poll()?)
    }

    /// Pauses between fruitless polls, of which there have been `idle`; see [`Clock::pause_since`].
    pub fn pause(&self, idle: u32) {
        self.transport.clock.pause_since(self.seen, idle, Nanos::MAX);
    }

    /// Returns the completion of an operation, if present; the operation is over then.
    ///
    /// # Errors
    /// Returns an error of the ring.
    pub fn try_completion(&mut self, id: IocbId) -> Result<Option<Completion>, StoreError> {
        Ok(self.transport.ring()?.try_completion(id)?)
    }

    /// Returns the counters of the I/O kernel.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] after a failure.
    pub fn counters(&mut self) -> Result<UringCounters, StoreError> {
        Ok(self.transport.ring()?.counters())
    }

    /// Stops the I/O kernel, takes the queues back and returns the controllers.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if the kernel does not stop; memory is leaked then.
    pub fn close(mut self) -> Result<Vec<SharedController>, StoreError> {
        self.shut()?;
        Ok(self.transport.devices.take_controllers())
    }

    fn shut(&mut self) -> Result<(), StoreError> {
        self.transport.shut().map_err(|cause| {
            self.transport.fail(&cause);
            // A device might still reach it.
            mem::forget(self.pool.clone());
            StoreError::Failed { cause }
        })
    }
}

impl Drop for RawRing {
    fn drop(&mut self) {
        if self.transport.is_open()
            && let Err(error) = self.shut()
        {
            tracing::error!(%error, "dropping a raw ring");
        }
    }
}
