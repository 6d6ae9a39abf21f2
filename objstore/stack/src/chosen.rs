//! The chosen locations of memory, and the reasons for the choice.

use std::fmt;

use nvme_driver::platform::vfio::PciAddress;
use objstore::Route;

/// Location of the drives' queues and descriptors, and of a KV pool allocated for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryPlace {
    /// Memory of this process.
    #[default]
    Host,
    /// A BAR of another function.
    Peer {
        /// The function.
        address: PciAddress,
        /// The BAR's number.
        bar: u8,
    },
}

impl fmt::Display for MemoryPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Peer { address, bar } => write!(f, "peer:{address}/{bar}"),
        }
    }
}

/// A route that was tried and not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotTaken {
    /// The route.
    pub route: Route,
    /// The reason.
    pub why: String,
    /// Advice to enable it; may be empty.
    pub fix: String,
}

impl fmt::Display for NotTaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.route, self.why)?;
        if self.fix.is_empty() { Ok(()) } else { write!(f, "; {}", self.fix) }
    }
}

/// Location of queues and pool, and the reasons against better routes.
#[derive(Debug, Clone)]
pub struct Placement {
    /// The route of the data.
    pub route: Route,
    /// Location of queues and descriptors.
    pub queues: String,
    /// Location of the KV pool.
    pub pool: String,
    /// Better routes, with the reasons why they were not taken.
    pub not_taken: Vec<NotTaken>,
}

impl Placement {
    /// Returns the locations as a short text.
    #[must_use]
    pub fn memory(&self) -> String {
        let Self { queues, pool, .. } = self;
        if queues == pool {
            return pool.clone();
        }
        format!("queues in {queues}, KV pool in {pool}")
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.route, self.memory())?;
        self.not_taken.iter().try_for_each(|not| write!(f, "; not {not}"))
    }
}
