//! Closing a plane.

use nvme_driver::wait_until;

use super::{Plane, SharedController, streams::Streams};
use crate::{error::StoreError, registration::KvPool};

/// The parts of a closed plane.
#[derive(Debug)]
pub struct ClosedPlane {
    /// The controllers, in the order of the configuration.
    pub controllers: Vec<SharedController>,
    /// The engine's pool, still registered.
    pub pool: KvPool,
}

impl Plane {
    /// Waits for everything in flight, stops the I/O kernel, takes the queues back and returns the
    /// controllers and the pool, which is still registered ([`KvPool::unregister`]). No stream
    /// uses memory of the plane any more.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if the kernel did not stop, a controller kept a queue, or a
    /// stream did not get past its operations for the store in time; memory is leaked then.
    pub fn close(mut self) -> Result<ClosedPlane, StoreError> {
        self.drain()?;
        self.shut()?;
        let controllers = std::mem::take(&mut self.devices).into_iter();
        let pool = self.pool.clone();
        // This drops the plane's own handle of the pool.
        let controllers = controllers.map(|device| device.controller).collect();
        drop(self);
        Ok(ClosedPlane { controllers, pool })
    }

    /// Stops the kernel and takes the queues back.
    fn shut(&mut self) -> Result<(), StoreError> {
        let deadline = self.clock.now() + self.options.stop_timeout;
        let quiesced = match self.ring()?.stop(deadline) {
            Ok(quiesced) => quiesced,
            Err(error) => return Err(self.fail(error.to_string())),
        };
        for at in 0..self.devices.len() {
            let device = &mut self.devices[at];
            while let Some(qid) = device.queues.last().copied() {
                // If deleting the queue fails, a reset is worth it.
                let mut controller = device.controller.lock();
                let taken = controller.reclaim(qid, &quiesced).or_else(|_| {
                    controller.recover(&quiesced)?;
                    controller.reclaim(qid, &quiesced)
                });
                drop(controller);
                if let Err(error) = taken {
                    return Err(self.fail(error.to_string()));
                }
                device.queues.pop();
            }
        }
        self.wait_for_streams()?;
        // It is stopped, and nothing is granted: dropping it frees its memory.
        self.ring = None;
        self.failed = Some("it was closed".to_owned());
        Ok(())
    }

    /// Waits until no stream uses events, tables or blocks any more. The ring has stopped: every
    /// event that a stream waits for has its value.
    fn wait_for_streams(&mut self) -> Result<(), StoreError> {
        let deadline = self.clock.now() + self.options.stop_timeout;
        let past = || self.streams.as_ref().is_none_or(Streams::is_past);
        if wait_until(&*self.clock, deadline, past) {
            return Ok(());
        }
        let cause = "a stream did not get past its operations for the store in time";
        Err(self.fail(cause.to_owned()))
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        if self.failed.is_none() && self.ring.is_some() {
            // On failure, memory that a device might reach was leaked; a drop can do no more.
            if let Err(error) = self.shut() {
                tracing::error!(%error, "dropping a plane");
            }
        }
    }
}
