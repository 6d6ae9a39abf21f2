//! Identifiers and positions as newtypes, so that an index cannot be passed for a count.

use core::fmt;

macro_rules! newtype {
    ($(#[$meta:meta])* $name:ident($int:ty)) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub $int);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

newtype!(
    /// A namespace identifier (Base, "Namespace Identifier").
    Nsid(u32)
);
newtype!(
    /// A command identifier, unique among a queue's outstanding commands.
    Cid(u16)
);
newtype!(
    /// A queue identifier; submission and completion queues count separately.
    QueueId(u16)
);
newtype!(
    /// A logical block address: a position.
    Lba(u64)
);
newtype!(
    /// A number of logical blocks: a count, not zero-based.
    Lbas(u32)
);

impl Nsid {
    /// Broadcast identifier: all namespaces.
    pub const ALL: Self = Self(0xffff_ffff);
}

impl QueueId {
    /// The admin queue pair.
    pub const ADMIN: Self = Self(0);
}
