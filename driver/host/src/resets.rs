//! How often a controller was reset.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Counts the resets of one controller since it was attached. Clones count the same controller,
/// and reading one waits for nobody who uses the controller.
///
/// A controller that lost its power, and with it what was in its volatile cache, does nothing
/// until it is reset: while the count stays the same, nothing was forgotten.
#[derive(Debug, Clone, Default)]
pub struct ResetCount(Arc<AtomicU64>);

impl ResetCount {
    /// Resets so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        // Relaxed: who compares two counts has had the controller in between, and so has who reset
        // it.
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}
