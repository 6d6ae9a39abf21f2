//! The whole state as records, piece by piece.

use super::Index;
use crate::{
    ids::FileId,
    record::{Record, USE_BYTES, UseKind, commit_bytes},
};

/// Number of age bands in which files are written.
const BANDS: usize = 16;

/// Files sampled to set the limits of the bands.
const SAMPLES: u32 = 4096;

/// Limits on the files that one call visits, and on those that it writes: together some hundred
/// microseconds, a delay that lookups may see.
const FILES_A_CALL: u32 = 1 << 14;
const TOLD_A_CALL: u32 = 1 << 11;

// Visiting a file counts as a byte copied (`Journal::copy`). All visits of a snapshot must cost
// less than a third of the largest snapshot, or compactions would end too late.
const _: () = assert!(3 * BANDS <= commit_bytes(0) + USE_BYTES);

/// Progress of a snapshot. The default is its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotCursor {
    started: bool,
    band: usize,
    file: u32,
    looked: u64,
}

impl SnapshotCursor {
    /// Returns the number of file visits so far. Each file is visited several times.
    #[must_use]
    pub fn looked(&self) -> u64 {
        self.looked
    }
}

/// The order in which a snapshot writes files: the oldest first, in a few bands. Recovery takes the
/// order of commits for the order of uses.
#[derive(Debug, Default)]
struct Bands {
    /// Files inserted before the snapshot began.
    inserted: u64,
    /// Ages at that time, descending: the limits between bands.
    limits: Vec<u32>,
}

/// The clock of the files' ages, and the bands of the snapshot in progress.
#[derive(Debug, Default)]
pub struct Ages {
    /// Files handed to the policy so far.
    pub inserted: u64,
    bands: Bands,
}

impl Index {
    /// Appends the next piece of the whole state to `out`
    /// ([`Catalog::snapshot`](crate::Catalog::snapshot)).
    pub fn snapshot(
        &mut self,
        cursor: SnapshotCursor,
        max_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Option<SnapshotCursor> {
        let end = out.len() + max_bytes;
        let mut cursor = cursor;
        if !cursor.started {
            self.ages.bands = self.age_bands();
            self.tenants.all.iter().for_each(|tenant| tenant.record().encode(out));
            cursor.started = true;
        }
        let mut told = 0;
        for _ in 0..FILES_A_CALL {
            if cursor.file == self.files() {
                (cursor.band, cursor.file) = (cursor.band + 1, 0);
            }
            if cursor.band > self.ages.bands.limits.len() || self.files() == 0 {
                return None;
            }
            if out.len() >= end || told == TOLD_A_CALL {
                break;
            }
            let file = FileId(cursor.file);
            // Checks the band first: it touches less memory.
            if self.band(file) == cursor.band && self.is_stored(file) {
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
        let (namespace, checksums) = (self.namespace_of(file), self.checksums(file).into());
        Record::Commit { file, namespace, key: entry.key, checksums }.encode(out);
        if self.policy.is_known(file) {
            Record::Use { first: file, count: 1, how: UseKind::Known }.encode(out);
        }
    }

    /// Computes the bands for a snapshot that begins now.
    fn age_bands(&self) -> Bands {
        let step = (self.files() / SAMPLES).max(1) as usize;
        let files = (0..self.files()).step_by(step).map(FileId);
        let stored = files.filter(|file| self.is_stored(*file));
        let mut ages: Vec<u32> = stored.map(|file| self.policy.age(file)).collect();
        ages.sort_unstable_by(|a, b| b.cmp(a));
        let limit = |band| ages.get(band * ages.len() / BANDS).copied();
        Bands { inserted: self.ages.inserted, limits: (1..BANDS).filter_map(limit).collect() }
    }

    /// Returns the current band of `file`. A use moves it to the last band, which is either still
    /// to come or already has this file: no file that stays stored is left out.
    fn band(&self, file: FileId) -> usize {
        let since =
            u32::try_from(self.ages.inserted - self.ages.bands.inserted).unwrap_or(u32::MAX);
        let age = self.policy.age(file).saturating_sub(since);
        self.ages.bands.limits.partition_point(|limit| *limit > age)
    }
}
