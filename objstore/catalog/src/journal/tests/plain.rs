//! Journals without faults: contents and counters.

use std::ops::Range;

use super::history::{format, formatted, superblock};
use crate::{
    block_io::{
        BlockIo as _,
        tests::{Faults, Medium},
    },
    ids::{FileId, NamespaceId},
    journal::{Journal, JournalError, RecordCounts, scan_journal},
    key::BlockKey,
    record::{Record, UseKind},
};

pub fn evict(files: u32) -> Vec<u8> {
    let mut out = Vec::new();
    for file in 0..files {
        Record::Evict { first: FileId(file), count: 1 }.encode(&mut out);
    }
    out
}

pub fn open(medium: &Medium) -> Journal {
    let superblock = superblock(medium).unwrap();
    let nothing = |_: Record<'_>| Ok::<_, String>(());
    Journal::open(Box::new(medium.clone()), superblock, nothing, |_, _| {}).unwrap()
}

#[test]
fn a_scan_says_what_is_there_and_writes_nothing() {
    let medium = formatted();
    let mut journal = open(&medium);
    journal.append(&evict(3)).unwrap();
    let mut other = Vec::new();
    Record::Clear { namespace: NamespaceId(1) }.encode(&mut other);
    journal.append(&other).unwrap();
    drop(journal);
    medium.plan(Default::default());
    let superblock = superblock(&medium).unwrap();
    let (mut seen, mut progress) = (0, Vec::new());
    let visit = |_: Record<'_>| {
        seen += 1;
        Ok::<_, String>(())
    };
    let scan = scan_journal(&mut medium.clone(), &superblock, visit, |done, _| progress.push(done))
        .unwrap();
    assert_eq!(medium.done(), []);
    assert_eq!((seen, scan.groups, scan.end, scan.damage), (4, 3, 1536, None));
    assert_eq!(scan.records, RecordCounts { evict: 3, clear: 1, ..RecordCounts::default() });
    assert_eq!(progress, [512, 1024, 1536]);
}

/// `inspect` and `fsck` show a damaged journal that does not open.
#[test]
fn a_scan_goes_on_to_the_damage_and_says_what_it_is() {
    let medium = formatted();
    let mut journal = open(&medium);
    for _ in 0..40 {
        journal.append(&evict(1)).unwrap();
    }
    let superblock = superblock(&medium).unwrap();
    let area = superblock.journal.unwrap();
    // Longer than the search when opening.
    medium.corrupt(area.half_offset(area.active) + 1024, |bytes| bytes[..36 * 512].fill(0));
    let nothing = |_: Record<'_>| Ok::<_, String>(());
    let scan = scan_journal(&mut medium.clone(), &superblock, nothing, |_, _| {}).unwrap();
    assert_eq!((scan.groups, scan.end), (2, 1024));
    let damage = scan.damage.unwrap().to_string();
    assert!(damage.contains("sim0: the group at byte 1024 of half A"), "{damage}");
    assert!(damage.contains("a later group is at byte 19456"), "{damage}");
}

#[test]
fn what_is_written_is_counted() {
    let medium = formatted();
    let mut journal = open(&medium);
    medium.plan(Default::default());
    let records = evict(400);
    journal.append(&records).unwrap();
    journal.append(&[]).unwrap();
    let payload = journal.payload_bytes_max();
    let groups = records.len().div_ceil(payload - payload % 12) as u64;
    let counts = journal.counts();
    assert_eq!((counts.appended_bytes, counts.groups), (records.len() as u64, groups));
    assert_eq!(counts.written_bytes, medium.written_bytes());
    journal.begin_compaction().unwrap();
    journal.copy(&evict(10), 0).unwrap();
    journal.finish_compaction().unwrap();
    assert_eq!(journal.counts().written_bytes, medium.written_bytes());
    assert_eq!(journal.counts().compactions, 1);
}

/// A process is killed while the drive still carries out its last write, which the next process
/// reads from the drive's cache. Power loss must not remove it from below later appends.
#[test]
fn a_process_that_was_killed_leaves_nothing_in_doubt() {
    let medium = formatted();
    let mut journal = open(&medium);
    medium.plan(Faults { fail: Some(0), ..Faults::default() });
    journal.append(&evict(1)).unwrap_err();
    drop(journal);
    open(&medium).append(&evict(2)).unwrap();
    medium.restart(&mut |bound| bound - 1);
    let superblock = superblock(&medium).unwrap();
    let nothing = |_: Record<'_>| Ok::<_, String>(());
    let scan = scan_journal(&mut medium.clone(), &superblock, nothing, |_, _| {}).unwrap();
    assert_eq!((scan.damage, scan.records.evict), (None, 3));
}

/// A caller that does not compact gets an error before anything is written, and can continue.
#[test]
fn a_full_half_is_compacted_and_takes_more() {
    let medium = formatted();
    let mut journal = open(&medium);
    let full = loop {
        if let Err(full) = journal.append(&evict(100)) {
            break full;
        }
    };
    assert!(matches!(full, JournalError::Full { needed: 1536, room: 1024, .. }), "{full:?}");
    assert!(journal.wants_compaction() && journal.failed.is_none());
    let end = journal.active.end;
    journal.begin_compaction().unwrap();
    assert!(journal.copy_due());
    journal.copy(&evict(1), 0).unwrap();
    // The active half has no room, so the copy cannot wait.
    assert!(journal.copy_due() && journal.active.end == end);
    journal.finish_compaction().unwrap();
    journal.append(&evict(100)).unwrap();
    assert!(!journal.copy_due() && !journal.wants_compaction());
}

/// The other half is no larger: a state that does not fit exceeds the store's parameters.
#[test]
fn a_state_that_does_not_fit_ends_the_journal() {
    let medium = formatted();
    let mut journal = open(&medium);
    journal.begin_compaction().unwrap();
    let outgrown = loop {
        if let Err(outgrown) = journal.copy(&evict(100), 0) {
            break outgrown;
        }
    };
    assert_eq!(outgrown, JournalError::Outgrown { device: "sim0".into(), half_bytes: 48 << 10 });
    assert_eq!(journal.failed.as_deref(), Some(outgrown.to_string().as_str()));
}

/// Lookups wait while a piece is taken, so pieces are small. Small pieces, with the appends in
/// between, take no more room than one long piece.
#[test]
fn small_pieces_are_written_as_whole_groups() {
    let medium = formatted();
    let mut journal = open(&medium);
    journal.begin_compaction().unwrap();
    for _ in 0..500 {
        journal.copy(&evict(1), 0).unwrap();
    }
    for _ in 0..10 {
        journal.append(&evict(1)).unwrap();
    }
    journal.finish_compaction().unwrap();
    let groups = (510 * 12usize).div_ceil(journal.payload_bytes_max());
    assert!(journal.active.end <= groups as u64 * 2048, "{journal:?}");
}

/// In a full store, where a snapshot is largest, copying a group's worth for each append is enough,
/// and the bytes written stay in proportion.
#[test]
fn compaction_keeps_up_with_appends_in_a_full_store() {
    for (files, words, files_an_append) in [(4_000, 2, 1), (4_000, 2, 64), (300, 200, 2)] {
        let medium = format(8 << 20, files, words);
        let mut journal = open(&medium);
        let commits = |range: Range<u32>| {
            let mut out = Vec::new();
            for file in range {
                let (file, namespace) = (FileId(file % files), NamespaceId(0));
                let checksums = vec![file.0; words as usize];
                let checksums = checksums.as_slice().into();
                Record::Commit { file, namespace, key: BlockKey([7; 32]), checksums }
                    .encode(&mut out);
                Record::Use { first: file, count: 1, how: UseKind::Known }.encode(&mut out);
            }
            out
        };
        let mut copied = 0;
        let a_piece = (journal.payload_bytes_max() / (60 + 4 * words as usize)) as u32;
        for append in 0..60_000 / files_an_append {
            let first = append * files_an_append;
            journal.append(&commits(first..first + files_an_append)).unwrap();
            if journal.wants_compaction() {
                journal.begin_compaction().unwrap();
                copied = 0;
            }
            let mut pieces = 0;
            while journal.copy_due() {
                let end = (copied + a_piece).min(files);
                journal.copy(&commits(copied..end), 0).unwrap();
                copied = end;
                pieces += 1;
                if copied == files {
                    journal.finish_compaction().unwrap();
                }
            }
            assert!(pieces <= 1, "{pieces} pieces for one append");
        }
        let counts = journal.counts();
        let padded = counts.groups * 512u64.max(counts.appended_bytes / counts.groups);
        let factor = counts.written_bytes as f64 / padded as f64;
        eprintln!("{files} files, {words} words: {counts:?}, factor {factor:.2}");
        assert!(counts.compactions > 2 && factor < 2.5, "{counts:?}, {factor}");
    }
}

#[test]
fn a_device_without_a_journal_is_named() {
    let medium = formatted();
    let mut superblock = superblock(&medium).unwrap();
    superblock.journal = None;
    let nothing = |_: Record<'_>| Ok::<_, String>(());
    let opened = Journal::open(Box::new(medium.clone()), superblock, nothing, |_, _| {});
    let error = opened.map(|_| ()).unwrap_err();
    assert_eq!(error, JournalError::None { device: medium.name().to_owned() });
}
