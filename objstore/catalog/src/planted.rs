//! Bugs that a test can switch on, each in one place, to prove that the tests detect them.
//!
//! Without the feature `planted-bugs` the switch is a constant, and no bug is compiled in.

/// A bug that can be switched on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlantedBug {
    /// The superblock names the new half before the records copied into it are flushed.
    NoFlushBeforeSwitch,
    /// The superblock names the new half before it has the whole snapshot.
    SwitchBeforeSnapshot,
    /// A switch updates only one copy of the superblock, and the older one wins.
    StaleSuperblock,
    /// A group is valid whatever its CRC. The journal's own tests detect it: torn bytes are seldom
    /// a record.
    NoGroupCrc,
    /// A group is valid wherever it was found. The journal's own tests detect it.
    NoGroupPosition,
    /// A file is reused before the journal records that it lost its key.
    ReuseBeforeEvictRecord,
    /// Drives deallocate a group before the journal records that its files lost their keys.
    DeallocateBeforeEvictRecord,
    /// A new epoch leaves a namespace's keys in place.
    EpochIgnored,
    /// A write is committed when the first rank has reported. A store has one rank in a process:
    /// the catalog's own tests detect it.
    CommitBeforeAllRanks,
    /// A block is committed, or reported by a rank, without a flush of its devices.
    CommitBeforeFlush,
    /// A record is not durable when its commit returns.
    RecordWithoutFua,
    /// A commit returns before its record is written.
    AcknowledgeBeforeRecord,
    /// Checksums are those of the first file of the write.
    ChecksumOfAnother,
    /// Retrieved bytes are not compared with their checksums.
    ChecksumIgnored,
    /// A snapshot leaves pins out.
    SnapshotWithoutPins,
    /// A snapshot chooses its next files as if none had been inserted since it began.
    BandsWithoutAge,
    /// The last group that an opening journal replays is not written again, and may be lost later.
    LastGroupNotRewritten,
    /// Records appended during a compaction are missing in the new half.
    AppendNotCopied,
    /// A compaction ends without the last group of its snapshot.
    EndNotCopied,
    /// A cleared namespace is back after the store is opened.
    ClearNotReplayed,
    /// A plane flushes only the first of several devices.
    FirstDeviceFlushed,
    /// A plane continues after a failed flush.
    FlushErrorIgnored,
    /// A plane does not check whether a reset device may have lost its unflushed writes.
    RecoveryIgnored,
    /// Files are freed when their records are passed to the journal, not when they are durable.
    FreeBeforeAppend,
    /// Data from host memory is not compared with its checksums.
    HitsUnchecked,
    /// Only the first row of data from host memory is compared with its checksum.
    HitsCheckedOnce,
    /// The catalog of a store is changed after a failed flush of its plane.
    SealsApart,
    /// A rank with room for fewer files than the catalog has is opened.
    RankWithFewerFiles,
}

#[cfg(any(test, feature = "planted-bugs"))]
impl PlantedBug {
    /// The bugs that the crash harness must detect.
    pub const ALL: &[Self] = &[
        Self::NoFlushBeforeSwitch,
        Self::SwitchBeforeSnapshot,
        Self::StaleSuperblock,
        Self::ReuseBeforeEvictRecord,
        Self::DeallocateBeforeEvictRecord,
        Self::EpochIgnored,
        Self::CommitBeforeFlush,
        Self::RecordWithoutFua,
        Self::AcknowledgeBeforeRecord,
        Self::ChecksumOfAnother,
        Self::ChecksumIgnored,
        Self::SnapshotWithoutPins,
        Self::BandsWithoutAge,
        Self::LastGroupNotRewritten,
        Self::AppendNotCopied,
        Self::EndNotCopied,
        Self::ClearNotReplayed,
        Self::FirstDeviceFlushed,
        Self::FlushErrorIgnored,
        Self::RecoveryIgnored,
        Self::FreeBeforeAppend,
        Self::HitsUnchecked,
        Self::HitsCheckedOnce,
        Self::SealsApart,
        Self::RankWithFewerFiles,
    ];
}

#[cfg(any(test, feature = "planted-bugs"))]
mod switch {
    use std::cell::Cell;

    use super::PlantedBug;

    thread_local! {
        static PLANTED: Cell<Option<PlantedBug>> = const { Cell::new(None) };
    }

    /// Switches a bug on for the calling thread, and the previous one off.
    pub fn plant(bug: Option<PlantedBug>) {
        PLANTED.set(bug);
    }

    /// Returns true when a bug is switched on for the calling thread.
    #[must_use]
    pub fn planted(bug: PlantedBug) -> bool {
        PLANTED.get() == Some(bug)
    }
}

#[cfg(any(test, feature = "planted-bugs"))]
pub use switch::{plant, planted};

#[cfg(not(any(test, feature = "planted-bugs")))]
/// Returns `false`: no bug is compiled in.
#[must_use]
pub const fn planted(_: PlantedBug) -> bool {
    false
}
