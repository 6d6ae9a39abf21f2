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
    /// A group counts whatever its CRC says. The journal's own tests find it: what is torn is
    /// seldom a record.
    NoGroupCrc,
    /// A group counts wherever it was found. The journal's own tests find it.
    NoGroupPosition,
    /// A file is used again although the journal does not have yet that it lost its key.
    ReuseBeforeEvictRecord,
    /// Drives are told that a group is not needed before the journal has that its files lost their
    /// keys.
    DeallocateBeforeEvictRecord,
    /// A new epoch leaves a namespace's keys as they are.
    EpochIgnored,
    /// A write is committed when the first rank has reported. A store has one rank in a process:
    /// the catalog's own tests find it.
    CommitBeforeAllRanks,
    /// What was stored is committed without a flush of the devices that have it.
    CommitBeforeFlush,
    /// A record is not permanent when its commit returns.
    RecordWithoutFua,
    /// A commit returns before its record was written.
    AcknowledgeBeforeRecord,
    /// What is in host memory is committed before it was written to the devices.
    RecordBeforeWriteBack,
    /// And it is when the first part of it was.
    RecordAfterFirstPart,
    /// Checksums are those of the file's neighbour.
    ChecksumOfAnother,
    /// Retrieved bytes are not compared with their checksums.
    ChecksumIgnored,
    /// A snapshot leaves pins out.
    SnapshotWithoutPins,
    /// The files that a snapshot tells of next are chosen as if none had come since it began.
    BandsWithoutAge,
    /// What is read of a journal that is opened may be lost later.
    NoFlushOnOpen,
    /// What is appended during a compaction is not in its new half.
    AppendNotCopied,
    /// A compaction ends without the last group of its snapshot.
    EndNotCopied,
    /// A namespace that was cleared is back when the store is opened.
    ClearNotReplayed,
    /// Of several devices a commit flushes the first.
    FirstDeviceFlushed,
    /// A commit goes on when a flush has failed.
    FlushErrorIgnored,
    /// A commit does not ask whether a device has forgotten what it was to make permanent.
    RecoveryIgnored,
    /// Files are free when their records are handed to the journal, and not when it has them.
    FreeBeforeAppend,
    /// What was written back is not compared with what was stored.
    WriteBackNotCompared,
    /// What comes from host memory is not compared with its checksums.
    HitsUnchecked,
    /// And only the first row of it is.
    HitsCheckedOnce,
    /// Of several devices a rank flushes the first.
    RankFlushesFirst,
    /// A rank reports what it stored without a flush.
    RankNeverFlushes,
    /// A rank does not ask whether a device has forgotten what it reports.
    RankIgnoresRecovery,
    /// A rank with room for fewer files than the catalog has is opened.
    RankWithFewerFiles,
}

#[cfg(any(test, feature = "planted-bugs"))]
impl PlantedBug {
    /// All that the crash harness has to find.
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
        Self::RecordBeforeWriteBack,
        Self::RecordAfterFirstPart,
        Self::ChecksumOfAnother,
        Self::ChecksumIgnored,
        Self::SnapshotWithoutPins,
        Self::BandsWithoutAge,
        Self::NoFlushOnOpen,
        Self::AppendNotCopied,
        Self::EndNotCopied,
        Self::ClearNotReplayed,
        Self::FirstDeviceFlushed,
        Self::FlushErrorIgnored,
        Self::RecoveryIgnored,
        Self::FreeBeforeAppend,
        Self::WriteBackNotCompared,
        Self::HitsUnchecked,
        Self::HitsCheckedOnce,
        Self::RankFlushesFirst,
        Self::RankNeverFlushes,
        Self::RankIgnoresRecovery,
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

    /// Switches a bug on for the calling thread, and the one before off.
    pub fn plant(bug: Option<PlantedBug>) {
        PLANTED.set(bug);
    }

    /// Whether a bug is switched on for the calling thread.
    #[must_use]
    pub fn planted(bug: PlantedBug) -> bool {
        PLANTED.get() == Some(bug)
    }
}

#[cfg(any(test, feature = "planted-bugs"))]
pub use switch::{plant, planted};

#[cfg(not(any(test, feature = "planted-bugs")))]
/// Whether a bug is switched on: it is not.
#[must_use]
pub const fn planted(_: PlantedBug) -> bool {
    false
}
