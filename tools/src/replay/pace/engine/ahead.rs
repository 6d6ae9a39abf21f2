//! Prefetches blocks of waiting requests to host memory.

use kv_tier::{RequestId, When};

use super::Engine;

/// Number of waiting requests to prefetch for.
const REQUESTS: usize = 8;

impl Engine<'_> {
    /// Announces the next requests, one per step.
    pub(super) fn look_ahead(&mut self) -> anyhow::Result<()> {
        let now = self.now();
        for (at, request) in self.waiting.iter().copied().enumerate().take(REQUESTS) {
            let keys = self.setup.loadable(request);
            let when = When::In(at as u32 + 1);
            self.store.prefetch(RequestId(request as u64), keys, when, now)?;
        }
        Ok(())
    }

    /// Ends the prefetching for a request that now runs.
    pub(super) fn looked_ahead(&mut self, request: usize) -> anyhow::Result<()> {
        self.store.run(RequestId(request as u64))?;
        Ok(())
    }
}
