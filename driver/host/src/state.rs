//! The state of a controller, and the count of its resets.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::error::FailCause;

/// The state of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// CC.EN is 0 or not known yet.
    Disabled,
    /// Initial set-up is in progress.
    Enabling,
    /// The controller accepts commands.
    Ready,
    /// A reset and the set-up after it are in progress.
    Resetting,
    /// The controller is no longer used.
    Failed(FailCause),
    /// The controller was shut down in an orderly way.
    Shutdown,
}

/// Number of resets of one controller since it was attached. Clones count the same controller, and
/// reading one does not block on users of the controller.
///
/// A controller that loses power, and with it its volatile cache, does nothing until it is reset.
/// While the count stays the same, no completed write was lost.
#[derive(Debug, Clone, Default)]
pub struct ResetCount(Arc<AtomicU64>);

impl ResetCount {
    /// Returns the number of resets so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        // Relaxed: a caller that compares two counts has owned the controller between them, and so
        // has the thread that reset it.
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}
