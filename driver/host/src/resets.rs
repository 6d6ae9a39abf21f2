//! Reset counter of a controller.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

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
