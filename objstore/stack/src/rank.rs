//! The plane of a rank with its devices, in a worker's process.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use objstore::{Plane, Watch};

use crate::{
    chosen::Placement, devices::shut_down, error::StackError, metrics::Endpoint, own::Process,
    stack::Below,
};

/// Interval between checks. An unbind, or a kernel that rings doorbells of a removed drive, waits
/// that long.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// A plane, and the resources that must outlive it.
///
/// A thread watches the devices: the removal of a device fails the plane, and a request of a
/// device's owner to give it back closes it. Every later call returns the reason.
///
/// A process that was forked has none of the threads. There, dropping it leaves the plane alone.
#[derive(Debug)]
pub struct RankStack {
    shared: Arc<Shared>,
    pub(crate) metrics: Option<Endpoint>,
    pub(crate) pacer: Option<Watch>,
    watch: Option<Watch>,
    placement: Placement,
    process: Process,
}

/// Fields are dropped in this order: users before what they use.
#[derive(Debug)]
struct Shared {
    plane: Plane,
    /// `None` once the plane was closed.
    below: Mutex<Option<Below>>,
}

impl Shared {
    fn close(&self, why: &str) -> Result<(), StackError> {
        // Held to the end: another caller returns when the devices were given back.
        let mut below = self.below.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = self.plane.close(why);
        let _devices = below.take().map(Below::unmap);
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
    pub(crate) fn new(plane: Plane, below: Below) -> Result<Self, StackError> {
        let placement = below.placement.clone();
        let shared = Arc::new(Shared { plane, below: Mutex::new(Some(below)) });
        let watched = shared.clone();
        let look = move || watched.look().then_some(CHECK_EVERY);
        let watch = Watch::spawn("ripieno watch", look);
        let watch = watch.map_err(|error| StackError::of_threads(&error))?;
        let (watch, process) = (Some(watch), Process::current());
        Ok(Self { shared, metrics: None, pacer: None, watch, placement, process })
    }

    /// Returns the plane. Its clones are handles of the same plane.
    #[must_use]
    pub fn plane(&self) -> &Plane {
        &self.shared.plane
    }

    /// Returns the endpoint of the metrics, if there is one.
    #[must_use]
    pub fn metrics(&self) -> Option<&Endpoint> {
        self.metrics.as_ref()
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
    /// Returns [`StackError::Failed`], [`StackError::Forked`], or an error of [`Plane::close`].
    pub fn close(&self) -> Result<(), StackError> {
        self.process.check()?;
        self.shared.close("it was closed")
    }
}

impl Drop for RankStack {
    fn drop(&mut self) {
        if self.process.check().is_err() {
            let threads = (self.metrics.take(), self.pacer.take(), self.watch.take());
            std::mem::forget((threads, self.shared.clone()));
        }
    }
}

#[cfg(test)]
mod tests;
