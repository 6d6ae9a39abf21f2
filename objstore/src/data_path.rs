//! The routes of data between SSD and an engine's memory.

use std::fmt;

/// The route of data between SSD and the engine's KV memory (decision 7). The store reports it;
/// it never falls back silently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// SSD to GPU memory and back, peer to peer.
    Direct,
    /// SSD to pinned host memory, copied from and to the GPU.
    Staged,
    /// SSD to host memory.
    Host,
}

impl Route {
    /// All routes, the best first.
    pub const ALL: [Self; 3] = [Self::Direct, Self::Staged, Self::Host];

    /// Returns the name in messages and options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
