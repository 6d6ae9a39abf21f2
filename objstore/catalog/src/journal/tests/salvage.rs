//! Salvage and rewriting of a damaged journal.

use proptest::prelude::*;

use super::{
    history::{format, formatted, superblock},
    model::Numbers,
};
use crate::{
    BlockKey, Catalog, CatalogConfig, Namespace, NamespaceId, PolicyKind, SnapshotCursor,
    block_io::tests::{Faults, Medium},
    ids::FileId,
    journal::{Journal, JournalError, JournalSalvage, rewrite_journal, salvage_journal},
    record::Record,
};

fn evict(file: u32) -> Vec<u8> {
    let mut out = Vec::new();
    Record::Evict { first: FileId(file), count: 1 }.encode(&mut out);
    out
}

/// Returns the files of all Evict records that are replayed when the store is opened.
fn open(medium: &Medium) -> Result<Vec<u32>, JournalError> {
    let mut files = Vec::new();
    let apply = |record: Record<'_>| {
        files.extend(evicted(&record));
        Ok::<_, String>(())
    };
    let opened =
        Journal::open(Box::new(medium.clone()), superblock(medium).unwrap(), apply, |_, _| {});
    opened.map(|_| files)
}

fn evicted(record: &Record<'_>) -> Option<u32> {
    match record {
        Record::Evict { first, .. } => Some(first.0),
        _ => None,
    }
}

fn salvage(medium: &Medium) -> (JournalSalvage, Vec<u32>) {
    let mut files = Vec::new();
    let visit = |record: Record<'_>| {
        files.extend(evicted(&record));
        true
    };
    let superblock = superblock(medium).unwrap();
    let salvage = salvage_journal(&mut medium.clone(), &superblock, visit, |done, all| {
        assert!(done <= all);
    });
    (salvage.unwrap(), files)
}

/// Adds groups of one record and one LBA each, behind the first one.
fn with_groups(groups: u32) -> Medium {
    let medium = formatted();
    let superblock = superblock(&medium).unwrap();
    let nothing = |_: Record<'_>| Ok::<_, String>(());
    let mut journal =
        Journal::open(Box::new(medium.clone()), superblock, nothing, |_, _| {}).unwrap();
    (0..groups).for_each(|file| _ = journal.append(&evict(file)).unwrap());
    medium
}

#[test]
fn only_what_a_damaged_group_had_is_missing() {
    let groups = 40;
    let whole = with_groups(groups);
    let area = superblock(&whole).unwrap().journal.unwrap();
    assert_eq!(salvage(&whole).1, Vec::from_iter(0..groups));
    for at in 0..u64::from(groups) {
        let byte = area.half_offset(area.active) + (at + 1) * 512;
        let (rotten, unreadable) = (whole.copy(), whole.copy());
        rotten.corrupt(byte + 50, |bytes| bytes[0] ^= 4);
        unreadable.plan(Faults { unreadable: Some(byte + 99), ..Faults::default() });
        for medium in [rotten, unreadable] {
            let (found, files) = salvage(&medium);
            let expected: Vec<u32> = (0..groups).filter(|file| u64::from(*file) != at).collect();
            assert_eq!(files, expected);
            // The last one could be an interrupted append.
            let seen = u64::from(at + 1 < u64::from(groups));
            assert_eq!((found.gaps, found.gap_bytes), (seen, seen * 512), "{found:?}");
            assert_eq!(medium.written_bytes(), 0);
        }
    }
}

/// Power fails at each write of a rewrite, which is then repeated with fewer records: the remains
/// of the first one are no part of the second.
#[test]
fn an_interrupted_rewriting_is_repeated() {
    let damaged = with_groups(30);
    let area = superblock(&damaged).unwrap().journal.unwrap();
    damaged.corrupt(area.half_offset(area.active) + 10 * 512, |bytes| bytes[..512].fill(0));
    let rewrite = |medium: &Medium, files: u32| {
        let mut superblock = superblock(medium).unwrap();
        let mut file = 0;
        rewrite_journal(&mut medium.clone(), &mut superblock, |records| {
            records.extend(evict(file));
            file += 1;
            file < files
        })
    };
    let mut numbers = Numbers(1);
    let (mut old, mut new) = (0, 0);
    for at in 0.. {
        let medium = damaged.copy();
        medium.plan(Faults { power_loss: Some(at), ..Faults::default() });
        let done = rewrite(&medium, 1000).is_ok();
        medium.restart(&mut |bound| numbers.below(bound));
        match open(&medium) {
            Ok(files) => {
                assert_eq!(files, Vec::from_iter(0..1000), "power failed at {at}");
                new += 1;
            }
            Err(JournalError::Damaged { .. }) if !done => old += 1,
            Err(error) => panic!("power failed at {at}: {error}"),
        }
        rewrite(&medium, 20).unwrap();
        assert_eq!(open(&medium), Ok(Vec::from_iter(0..20)), "power failed at {at}");
        if done {
            break;
        }
    }
    assert!(old > 5 && new > 0, "{old} {new}");
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_has_changed() {
    let medium = with_groups(3);
    let mut superblock = superblock(&medium).unwrap();
    let endless = |records: &mut Vec<u8>| {
        records.extend(evict(1));
        true
    };
    let error = rewrite_journal(&mut medium.clone(), &mut superblock, endless).unwrap_err();
    assert!(matches!(error, JournalError::Outgrown { .. }), "{error}");
    assert_eq!(open(&medium), Ok(vec![0, 1, 2]));
}

const FILES: u32 = 48;

fn config() -> CatalogConfig {
    CatalogConfig {
        files: FILES,
        file_bytes: 1,
        ranks: 1,
        words_per_file: 2,
        namespaces_max: 2,
        journal: true,
        files_ahead: 0,
        seed: 1,
        policy: PolicyKind::default(),
        write_budget: None,
    }
}

fn key(number: u32) -> BlockKey {
    let mut key = [0; 32];
    key[..4].copy_from_slice(&number.to_le_bytes());
    BlockKey(key)
}

/// A catalog with a journal, as a store has them.
struct Kept {
    medium: Medium,
    catalog: Catalog,
    journal: Journal,
    /// Blocks that were ever stored: (digest of the namespace, key) in a file.
    told: Vec<([u8; 32], BlockKey, FileId)>,
}

impl Kept {
    fn new() -> Self {
        let medium = format(2 << 20, FILES, 2);
        let superblock = superblock(&medium).unwrap();
        let nothing = |_: Record<'_>| Ok::<_, String>(());
        let journal =
            Journal::open(Box::new(medium.clone()), superblock, nothing, |_, _| {}).unwrap();
        let mut kept = Self { medium, catalog: Catalog::new(config()), journal, told: Vec::new() };
        (0..2).for_each(|salt| _ = kept.open(salt));
        kept.write();
        kept
    }

    fn open(&mut self, salt: u8) -> NamespaceId {
        let descriptor = Namespace { tenant_salt: vec![salt], ..Namespace::default() };
        self.catalog.namespace(&descriptor).unwrap()
    }

    fn write(&mut self) {
        while let Some(group) = self.catalog.pending(300) {
            self.journal.append(&group.records).unwrap();
            self.catalog.durable(group.lsn);
        }
        if self.journal.wants_compaction() {
            self.compact();
        }
    }

    fn compact(&mut self) {
        self.journal.begin_compaction().unwrap();
        let mut cursor = Some(SnapshotCursor::default());
        while let Some(at) = cursor {
            let mut records = Vec::new();
            cursor = self.catalog.snapshot(at, 200, &mut records);
            self.journal.copy(&records, 0).unwrap();
        }
        self.journal.finish_compaction().unwrap();
    }

    fn store(&mut self, namespace: NamespaceId, numbers: std::ops::Range<u32>) {
        let keys: Vec<BlockKey> = numbers.map(key).collect();
        let write = self.catalog.begin(namespace, &keys).unwrap();
        let digest = digest(&self.catalog, namespace);
        let files: Vec<u32> = write.own().flat_map(|file| [file.0, !file.0]).collect();
        self.catalog.written(write.id, 0, &files).unwrap();
        self.catalog.commit(write.id).unwrap();
        for (position, key) in write.positions.iter().zip(keys) {
            self.told.push((digest, key, position.file));
        }
    }

    fn step(&mut self, kind: u8, a: u32) {
        let ids: Vec<NamespaceId> = self.catalog.namespaces().map(|(id, ..)| id).collect();
        let namespace = ids[a as usize % 2];
        match kind {
            0..6 => self.store(namespace, a..a + 3),
            6 => _ = self.catalog.evict(None, a % 5).unwrap(),
            8 if a.is_multiple_of(4) => _ = self.catalog.bump_epoch(namespace).unwrap(),
            9 if a.is_multiple_of(4) => self.catalog.clear(namespace).unwrap(),
            10 => self.compact_after_writing(),
            11 => {
                self.catalog.clear(namespace).unwrap();
                self.open((a % 5) as u8);
            }
            _ => _ = self.catalog.remove(namespace, &[key(a)]).unwrap(),
        }
        self.write();
    }

    fn compact_after_writing(&mut self) {
        self.write();
        self.compact();
    }
}

fn digest(catalog: &Catalog, namespace: NamespaceId) -> [u8; 32] {
    catalog.namespaces().find(|(id, ..)| *id == namespace).unwrap().2
}

/// Salvages the journal, rewrites it, and opens it.
fn salvaged(medium: &Medium) -> (Catalog, JournalSalvage) {
    let superblock = superblock(medium).unwrap();
    let mut catalog = Catalog::new(CatalogConfig { journal: false, ..config() });
    let visit = |record: Record<'_>| catalog.salvage(&record).is_ok();
    let found = salvage_journal(&mut medium.clone(), &superblock, visit, |_, _| {}).unwrap();
    catalog.recovered();
    let mut cursor = Some(SnapshotCursor::default());
    rewrite_journal(&mut medium.clone(), &mut superblock.clone(), |records| {
        cursor = cursor.and_then(|at| catalog.snapshot(at, 500, records));
        cursor.is_some()
    })
    .unwrap();
    let mut again = Catalog::new(config());
    let superblock = self::superblock(medium).unwrap();
    Journal::open(Box::new(medium.clone()), superblock, |record| again.apply(&record), |_, _| {})
        .unwrap();
    again.recovered();
    assert_eq!(again.counts().stored, catalog.counts().stored);
    (again, found)
}

#[test]
fn namespaces_that_are_lost_come_from_the_other_half() {
    let mut kept = Kept::new();
    let a = NamespaceId(0);
    kept.store(a, 0..20);
    kept.compact_after_writing();
    kept.store(a, 20..30);
    kept.write();
    let area = superblock(&kept.medium).unwrap().journal.unwrap();
    // The first group, which has all namespaces.
    let first = |bytes: &mut [u8]| bytes[..512].fill(0xee);
    let medium = kept.medium.copy();
    medium.corrupt(area.half_offset(area.active), first);
    let (again, found) = salvaged(&medium);
    let is_there = |number: &u32| again.lookup(a, &[key(*number)]) == Ok(1);
    let there = (0..30).filter(is_there).count();
    assert!((20..30).all(|number| is_there(&number)) && there < 30, "{there} of 30");
    assert_eq!((found.gaps, found.refused), (1, 0));
    // A new epoch that only the other half has: no block of an earlier one is kept.
    kept.catalog.bump_epoch(a).unwrap();
    kept.write();
    kept.store(a, 40..44);
    kept.compact_after_writing();
    let area = superblock(&kept.medium).unwrap().journal.unwrap();
    kept.medium.corrupt(area.half_offset(area.active), first);
    let (again, _) = salvaged(&kept.medium);
    assert_eq!(again.usage(a).unwrap().epoch, 1);
    assert_eq!((0..44).filter(|number| again.lookup(a, &[key(*number)]) == Ok(1)).count(), 0);
}

/// Numbers are not in the order of slots after a replacement.
#[test]
fn namespaces_that_were_replaced_are_not_missed_by_the_others() {
    let mut kept = Kept::new();
    let (first, second) = (kept.open(2), kept.open(1));
    assert_eq!([first, second], [2, 1].map(NamespaceId));
    // Neither half has number 0 any more.
    (0..2).for_each(|_| kept.compact_after_writing());
    [first, second].into_iter().for_each(|space| kept.store(space, 0..20));
    kept.write();
    let area = superblock(&kept.medium).unwrap().journal.unwrap();
    kept.medium.corrupt(area.half_offset(area.active), |bytes| bytes[..512].fill(0xee));
    let (again, found) = salvaged(&kept.medium);
    assert_eq!((found.gaps, found.refused, again.counts().stored), (1, 0, 40));
    for space in [first, second] {
        assert_eq!(digest(&again, space), digest(&kept.catalog, space));
    }
}

/// A namespace that came back in another slot is in the halves with two numbers.
#[test]
fn a_namespace_that_came_back_keeps_its_blocks() {
    let mut kept = Kept::new();
    kept.compact_after_writing();
    // Salt 2 replaces 0, and 0 replaces 1, which replaces 2.
    assert_eq!([2, 0, 1].map(|salt| kept.open(salt)), [2, 3, 4].map(NamespaceId));
    let spaces = [4, 3].map(NamespaceId);
    spaces.into_iter().for_each(|space| kept.store(space, 0..20));
    kept.compact_after_writing();
    let (again, found) = salvaged(&kept.medium);
    assert_eq!((found.gaps, found.refused, again.counts().stored), (0, 0, 40));
    for space in spaces {
        assert_eq!(digest(&again, space), digest(&kept.catalog, space));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// However damaged the journal is, every block that is kept was once stored.
    #[test]
    fn what_is_kept_was_stored_once(
        steps in proptest::collection::vec((0..13u8, 0..40u32), 1..120),
        damage in proptest::collection::vec((any::<u32>(), 1..2000usize, any::<u8>()), 1..8),
    ) {
        let mut kept = Kept::new();
        steps.iter().for_each(|(kind, a)| kept.step(*kind, *a));
        let area = superblock(&kept.medium).unwrap().journal.unwrap();
        let bytes = 2 * area.half_bytes as u32;
        for (at, length, with) in damage {
            let at = at % bytes;
            let length = length.min((bytes - at) as usize);
            kept.medium.corrupt(area.offset + u64::from(at), |bytes| bytes[..length].fill(with));
        }
        let (again, _) = salvaged(&kept.medium);
        for stored in again.stored_from(FileId(0)) {
            let block = (digest(&again, stored.namespace), stored.key, stored.file);
            prop_assert!(kept.told.contains(&block), "{:?}", stored);
            prop_assert_eq!(again.checksums(stored.file), [stored.file.0, !stored.file.0]);
        }
    }
}
