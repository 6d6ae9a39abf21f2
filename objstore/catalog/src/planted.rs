//! Bugs that a test can switch on, each in one place: what shows that the tests would find them.
//!
//! Without the feature `planted-bugs` the switch is a constant, and nothing of this is compiled in.

/// A bug that can be switched on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlantedBug {
    /// The superblock names the new half before what was copied into it is flushed.
    NoFlushBeforeSwitch,
    /// The superblock names the new half before all of the snapshot is in it.
    SwitchBeforeSnapshot,
    /// A switch updates only one copy of the superblock, and the older one wins.
    StaleSuperblock,
    /// A group counts whatever its CRC says.
    NoGroupCrc,
    /// A group counts wherever it was found.
    NoGroupPosition,
    /// A file is used again although the journal does not have yet that it lost its key.
    ReuseBeforeEvictRecord,
    /// A new epoch leaves a namespace's keys as they are.
    EpochIgnored,
    /// A write is committed when the first rank has reported. A store has one rank in a process:
    /// the catalog's own tests find it.
    CommitBeforeAllRanks,
}

#[cfg(any(test, feature = "planted-bugs"))]
impl PlantedBug {
    /// All that a store of one rank can have.
    pub const ALL: &[Self] = &[
        Self::NoFlushBeforeSwitch,
        Self::SwitchBeforeSnapshot,
        Self::StaleSuperblock,
        Self::NoGroupCrc,
        Self::NoGroupPosition,
        Self::ReuseBeforeEvictRecord,
        Self::EpochIgnored,
    ];
}

#[cfg(any(test, feature = "planted-bugs"))]
mod switch {
    use std::cell::Cell;

    use super::PlantedBug;

    thread_local! {
        static PLANTED: Cell<Option<PlantedBug>> = const { Cell::new(None) };
    }

    /// Switches a bug on for the calling thread, and the one before off.
    pub fn plant(bug: Option<PlantedBug>) {
        PLANTED.set(bug);
    }

    pub(crate) fn planted(bug: PlantedBug) -> bool {
        PLANTED.get() == Some(bug)
    }
}

#[cfg(any(test, feature = "planted-bugs"))]
pub use switch::plant;
#[cfg(any(test, feature = "planted-bugs"))]
pub(crate) use switch::planted;

#[cfg(not(any(test, feature = "planted-bugs")))]
pub(crate) const fn planted(_: PlantedBug) -> bool {
    false
}
