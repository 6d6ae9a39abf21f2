//! What requests that wait are going to load, read ahead to host memory.

use kv_tier::{RequestId, When};

use super::Engine;

/// Requests of the queue whose blocks are read ahead.
const REQUESTS: usize = 8;

impl Engine<'_> {
    /// Says which requests run soon: with the next steps, one after the other.
    pub(super) fn look_ahead(&mut self) -> anyhow::Result<()> {
        let now = self.now();
        for (at, request) in self.waiting.iter().copied().enumerate().take(REQUESTS) {
            let keys = self.setup.loadable(request);
            let when = When::In(at as u32 + 1);
            self.store.prefetch(RequestId(request as u64), keys, when, now)?;
        }
        Ok(())
    }

    /// A request runs now: what it loads from is known to be asked for.
    pub(super) fn looked_ahead(&mut self, request: usize) -> anyhow::Result<()> {
        self.store.run(RequestId(request as u64))?;
        Ok(())
    }
}
