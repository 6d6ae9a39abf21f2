//! A controller that several parts of a store share.

use std::{
    any::Any,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError},
};

use kv_catalog::{NotDurable, Seal};
use nvme_driver::{Controller, ResetCount};
use nvme_spec::ids::Nsid;

/// Threads or memory that a controller needs.
pub type Below = Arc<dyn Any + Send + Sync>;

/// A controller that a plane and a journal share. The holder of the lock may do I/O on its host
/// queue and control it; nothing on the data path takes the lock.
#[derive(Debug, Clone)]
pub struct SharedController {
    shared: Arc<Shared>,
    resets: ResetCount,
}

/// Fields are dropped in this order: a controller that is dropped shuts down, with what is below.
#[derive(Debug)]
struct Shared {
    controller: Mutex<Controller>,
    below: OnceLock<Below>,
}

impl SharedController {
    /// Shares `controller`.
    #[must_use]
    pub fn new(controller: Controller) -> Self {
        let resets = controller.resets().clone();
        let (controller, below) = (Mutex::new(controller), OnceLock::new());
        Self { shared: Arc::new(Shared { controller, below }), resets }
    }

    /// Keeps `below` as long as anything shares the controller. Only one value can be kept.
    pub fn keep(&self, below: Below) {
        let _ = self.shared.below.set(below);
    }

    /// Locks the controller. A thread that panicked while holding the lock leaves no half-done
    /// state: the driver's calls are complete in themselves.
    pub fn lock(&self) -> MutexGuard<'_, Controller> {
        kv_catalog::lock(&self.shared.controller)
    }

    /// Locks the controller, unless another thread holds the lock.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Controller>> {
        match self.shared.controller.try_lock() {
            Ok(controller) => Some(controller),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Flushes the volatile cache of a namespace, unless `seal` is broken: the only flush of a
    /// store. A failure breaks the seal before any other thread can flush.
    pub(crate) fn flush(&self, nsid: Nsid, seal: &Seal) -> Result<(), NotDurable> {
        let mut controller = self.lock();
        seal.check()?;
        // The error names the controller.
        controller.flush(nsid).map_err(|error| seal.fail(error.to_string()))
    }

    /// Returns the number of resets, without waiting for the lock.
    pub(crate) fn resets(&self) -> u64 {
        self.resets.get()
    }

    /// Returns the controller, and what it kept, if nothing else shares it any more.
    pub(crate) fn into_inner(self) -> Option<(Controller, Option<Below>)> {
        let Shared { controller, below } = Arc::try_unwrap(self.shared).ok()?;
        let controller = controller.into_inner().unwrap_or_else(PoisonError::into_inner);
        Some((controller, below.into_inner()))
    }
}
