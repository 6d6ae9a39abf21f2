//! The plane of a rank with its devices, in a worker's process.

use std::sync::{Arc, Mutex, PoisonError};

use nvme_driver::{Clock, ControllerOptions};
use objstore::{KvShape, Plane, RankConfig, RankId, Route, StoreOptions};

use crate::{
    build::{Built, Parts, Plan},
    chosen::Placement,
    error::StackError,
    executor::Executor,
    place::Place,
    pool::PoolMemory,
    stack::shut_down,
};

mod watch;

use watch::Watch;

/// Parameters of a rank's plane.
#[derive(Debug)]
pub struct RankStackConfig {
    /// Its devices: [`crate::Ranks::place`].
    pub place: Place,
    /// The rank and its store.
    pub id: RankId,
    /// The executor of the I/O kernel.
    pub executor: Executor,
    /// The required route; `None`: the best that works.
    pub require: Option<Route>,
    /// Shape of a KV block.
    pub shape: KvShape,
    /// Location of the KV pool.
    pub pool: PoolMemory,
    /// Options for attaching to controllers.
    pub controller: ControllerOptions,
    /// Options of the plane.
    pub options: StoreOptions,
}

/// A plane, and the resources that must outlive it.
///
/// A thread of its own watches the devices: the removal of a device fails the plane, and a request
/// of a device's owner to give it back closes it. Every later call returns the reason.
#[derive(Debug)]
pub struct RankStack {
    shared: Arc<Shared>,
    _watch: Watch,
    placement: Placement,
}

/// Fields are dropped in this order: users before what they use.
#[derive(Debug)]
struct Shared {
    plane: Plane,
    /// `None` once the plane was closed.
    built: Mutex<Option<Built>>,
}

impl Shared {
    fn close(&self, why: &str) -> Result<(), StackError> {
        // Held to the end: another caller returns when the devices were given back.
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = self.plane.close(why);
        let _below = built.take().map(Built::unmap);
        let controllers = closed?.map(|closed| closed.controllers).unwrap_or_default();
        controllers.iter().try_for_each(|controller| shut_down(&mut controller.lock()))
    }

    /// Checks the devices, for the watch thread. Returns true while there is anything to watch.
    fn look(&self) -> bool {
        let synced = self.plane.sync().and_then(|()| self.plane.requested_devices());
        // The next caller receives an error.
        let Ok(requested) = synced else { return false };
        let Some(device) = requested.first() else { return true };
        let why = format!("the owner of device {device} wants it back, so the store was closed");
        tracing::warn!(%device, "its owner wants it back; closing the store");
        if let Err(error) = self.close(&why) {
            tracing::error!(%error, "closing the store for the owner of a device");
        }
        false
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Other handles of the plane may be left.
        if let Err(error) = self.close("its devices were given back") {
            tracing::error!(%error, "dropping the plane of a rank");
        }
    }
}

impl RankStack {
    /// Builds the devices and opens the plane on them.
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails, or an error of [`Plane::open_rank`].
    pub fn open(config: RankStackConfig, clock: Arc<dyn Clock>) -> Result<Self, StackError> {
        let RankStackConfig { place, id, executor, require, shape, pool, controller, options } =
            config;
        let plan = Plan {
            place,
            executor,
            require,
            shape: &shape,
            pool: &pool,
            controller: &controller,
            options,
            format: None,
            clock: &clock,
        };
        let (plane, built) = plan.open(|parts| {
            let Parts { devices, pool, gpu, executor, options } = parts;
            let clock = clock.clone();
            let config = RankConfig { id, devices, executor, clock, shape, pool, gpu, options };
            Ok(Plane::open_rank(config)?)
        })?;
        Self::over(plane, built)
    }

    fn over(plane: Plane, built: Built) -> Result<Self, StackError> {
        let placement = built.placement.clone();
        let shared = Arc::new(Shared { plane, built: Mutex::new(Some(built)) });
        let watched = shared.clone();
        let watch = Watch::spawn(move || watched.look()).map_err(StackError::Watch)?;
        Ok(Self { shared, _watch: watch, placement })
    }

    /// Returns the plane. Its clones are handles of the same plane.
    #[must_use]
    pub fn plane(&self) -> &Plane {
        &self.shared.plane
    }

    /// Returns the route, the locations, and the reasons against better routes.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Waits for I/O in flight, shuts the devices down, and releases the engine's memory. Every
    /// later call fails as closed.
    ///
    /// # Errors
    /// Returns [`StackError::Shutdown`], or an error of [`Plane::close`].
    pub fn close(&self) -> Result<(), StackError> {
        self.shared.close("it was closed")
    }
}

#[cfg(test)]
mod tests;
