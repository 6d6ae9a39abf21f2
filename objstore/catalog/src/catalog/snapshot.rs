//! The whole state as records, piece by piece.

use super::{Catalog, State, sharing};
use crate::{
    ids::{FileId, NamespaceId},
    planted::{PlantedBug, planted},
    record::{Record, USE_BYTES, UseKind, commit_bytes},
};

/// Steps in which the age of files is told.
const BANDS: usize = 16;

/// Files whose ages decide where the steps are.
const SAMPLES: u32 = 4096;

/// Files that one call looks at, and tells of, at the most: together some hundred microseconds,
/// which lookups may have to wait for.
const FILES_A_CALL: u32 = 1 << 14;
const TOLD_A_CALL: u32 = 1 << 11;

// Looking at a file counts as a byte copied (`Journal::copy`). All that a snapshot looks at must be
// less than a third of the largest snapshot, or compactions would end too late.
const _: () = assert!(3 * BANDS <= commit_bytes(0) + USE_BYTES);

/// How far a snapshot got. The default is its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotCursor {
    started: bool,
    band: usize,
    file: u32,
    looked: u64,
}

impl SnapshotCursor {
    /// Files that were looked at so far. Each is looked at several times.
    #[must_use]
    pub fn looked(&self) -> u64 {
        self.looked
    }
}

/// The order in which a snapshot tells of files: the oldest first, in a few steps. Recovery takes
/// the order of commits for that of uses.
#[derive(Debug, Default)]
pub struct Bands {
    /// Files inserted when the snapshot began.
    inserted: u64,
    /// Ages at that time, falling: where the next band begins.
    limits: Vec<u32>,
}

impl Catalog {
    /// Appends the next piece of the whole state to `out`, as records of about `max_bytes`, and
    /// says where to go on; `None` at the end. A piece may be shorter, or have no records. The
    /// first one has all namespaces. The oldest files come first, so that recovery knows roughly
    /// what to evict.
    ///
    /// It is the state after all records made so far. So in the journal's new half it has to come
    /// behind them, and before all later ones: take what is pending first, in the same moment. One
    /// snapshot at a time: a new one ends the one before.
    ///
    /// # Panics
    /// When records are pending.
    pub fn snapshot(
        &mut self,
        cursor: SnapshotCursor,
        max_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Option<SnapshotCursor> {
        assert!(self.log.is_empty(), "records come before a snapshot that has their effect");
        let end = out.len() + max_bytes;
        let mut cursor = cursor;
        if !cursor.started {
            self.bands = self.age_bands();
            for (id, tenant) in (0..).map(NamespaceId).zip(&self.namespaces) {
                sharing::record(id, tenant).encode(out);
            }
            cursor.started = true;
        }
        let mut told = 0;
        for _ in 0..FILES_A_CALL {
            if cursor.file == self.config.files {
                (cursor.band, cursor.file) = (cursor.band + 1, 0);
            }
            if cursor.band > self.bands.limits.len() || self.config.files == 0 {
                return None;
            }
            if out.len() >= end || told == TOLD_A_CALL {
                break;
            }
            let file = FileId(cursor.file);
            // The band first: it is in less memory.
            let is_told = self.band(file) == cursor.band
                && self.is_stored(file)
                && self.entry(file).state == State::Stored;
            if is_told {
                self.encode_file(file, out);
                told += 1;
            }
            cursor.file += 1;
            cursor.looked += 1;
        }
        Some(cursor)
    }

    fn encode_file(&self, file: FileId, out: &mut Vec<u8>) {
        let entry = self.entry(file);
        let namespace = NamespaceId(self.spaces[entry.space as usize].namespace);
        let checksums = self.checksums(file).into();
        Record::Commit { file, namespace, key: entry.key, checksums }.encode(out);
        if entry.pinned && !planted(PlantedBug::SnapshotWithoutPins) {
            Record::Pin { file, pinned: true }.encode(out);
        } else if self.policy.is_known(file) {
            Record::Use { first: file, count: 1, how: UseKind::Known }.encode(out);
        }
    }

    /// Where the bands of a snapshot that begins now are.
    fn age_bands(&self) -> Bands {
        let step = (self.config.files / SAMPLES).max(1) as usize;
        let files = (0..self.config.files).step_by(step).map(FileId);
        let stored = files.filter(|file| self.is_stored(*file));
        let mut ages: Vec<u32> = stored.map(|file| self.policy.age(file)).collect();
        ages.sort_unstable_by(|a, b| b.cmp(a));
        let limit = |band| ages.get(band * ages.len() / BANDS).copied();
        Bands { inserted: self.inserted, limits: (1..BANDS).filter_map(limit).collect() }
    }

    /// The band that `file` is in now. A use moves it to the last one, whose turn is yet to come or
    /// has come for this file: so none that is stored all the time is left out.
    fn band(&self, file: FileId) -> usize {
        let since = u32::try_from(self.inserted - self.bands.inserted).unwrap_or(u32::MAX);
        let since = if planted(PlantedBug::BandsWithoutAge) { 0 } else { since };
        let age = self.policy.age(file).saturating_sub(since);
        self.bands.limits.partition_point(|limit| *limit > age)
    }
}
