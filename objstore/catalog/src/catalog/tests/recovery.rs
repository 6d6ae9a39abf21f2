//! Records and their recovery.

use proptest::prelude::*;

use super::*;
use crate::record::{Record, UseKind};

fn recovered(records: &[Record<'_>]) -> Result<Catalog, CatalogError> {
    let mut catalog = Catalog::new(config(8, 1));
    for record in records {
        catalog.apply(record)?;
    }
    catalog.recovered();
    Ok(catalog)
}

fn namespace(id: u32, digest: u8) -> Record<'static> {
    let (id, digest) = (NamespaceId(id), [digest; 32]);
    Record::Namespace { id, digest, epoch: 3, quota_files: None, weight: 1, label: "", owner: None }
}

fn commit(file: u32, key_number: u32, checksums: &[u32]) -> Record<'_> {
    let (file, key, checksums) = (FileId(file), key(key_number), checksums.into());
    Record::Commit { file, namespace: NamespaceId(0), key, checksums }
}

#[test]
fn records_that_contradict_those_before_are_refused() {
    let (first, count, ns) = (FileId(7), 2, NamespaceId(0));
    let weightless = Record::Namespace {
        id: ns,
        digest: [1; 32],
        epoch: 3,
        quota_files: None,
        weight: 0,
        label: "",
        owner: None,
    };
    for (record, problem) in [
        (namespace(0, 2), "has another digest than before"),
        (namespace(1, 1), "has the digest of another namespace"),
        (namespace(2, 2), "skips a number"),
        (namespace(6, 2), "skips a number"),
        (namespace(4, 1), "has the digest of another namespace"),
        (weightless, "has a weight of zero"),
        (commit(8, 1, &[0; 2]), "names a file that the store does not have"),
        (commit(2, 1, &[0; 3]), "has another number of checksums than this store keeps"),
        (commit(0, 1, &[0; 2]), "is for a file that holds another key"),
        (commit(1, 0, &[0; 2]), "files 0 and 1 hold the same key"),
        (Record::Evict { first, count }, "names files that the store does not have"),
        (Record::Use { first, count, how: UseKind::Known }, "names files that the store"),
        (Record::Clear { namespace: NamespaceId(1) }, "is of an unknown namespace"),
        (Record::Epoch { namespace: NamespaceId(1), epoch: 4 }, "is of an unknown namespace"),
        (Record::Epoch { namespace: ns, epoch: 2 }, "goes back to an earlier epoch"),
    ] {
        let before = [namespace(0, 1), commit(0, 0, &[0; 2])];
        let error = recovered(&[before[0], before[1], record]).unwrap_err().to_string();
        assert!(error.contains(problem), "{record:?}: {error}");
    }
}

#[test]
fn a_namespace_replaces_the_one_in_its_slot() {
    let (before, now) = (NamespaceId(0), NamespaceId(4));
    let replaced = [
        namespace(0, 1),
        Record::Epoch { namespace: before, epoch: 9 },
        commit(0, 0, &[0; 2]),
        namespace(4, 2),
    ];
    let catalog = recovered(&replaced).unwrap();
    assert_eq!((catalog.counts().stored, catalog.counts().free), (0, 8));
    assert_eq!(catalog.usage(now).map(|usage| usage.epoch), Ok(3));
    assert_eq!(catalog.usage(before), Err(CatalogError::Namespace { namespace: before }));
    // It comes back with another number.
    let [first, ..] = replaced;
    assert!(recovered(&[&replaced[..], &[namespace(8, 1)]].concat()).is_ok());
    for (record, problem) in [
        (first, "has the number of an earlier one"),
        (namespace(4, 1), "has another digest than before"),
        (commit(0, 0, &[0; 2]), "is of an unknown namespace"),
        (Record::Clear { namespace: before }, "is of an unknown namespace"),
        (Record::Epoch { namespace: before, epoch: 10 }, "is of an unknown namespace"),
    ] {
        let error = recovered(&[&replaced[..], &[record]].concat()).unwrap_err().to_string();
        assert!(error.contains(problem), "{record:?}: {error}");
    }
}

/// A journal may end behind any record: a block never belongs to another namespace than its own.
#[test]
fn no_part_of_a_journal_mixes_namespaces_of_a_slot() {
    let few = CatalogConfig { namespaces_max: 1, ..config(16, 1) };
    let mut catalog = Catalog::new(few.clone());
    let salts = [1, 2, 1, 3];
    for salt in salts {
        let id = tenant(&mut catalog, &[salt]);
        let write = catalog.begin(id, &keys(0..3)).unwrap();
        catalog.written(write.id, 0, &[u32::from(salt); 6]).unwrap();
        catalog.commit(write.id).unwrap();
        match salt {
            2 => _ = catalog.remove(id, &keys(0..3)).unwrap(),
            _ => _ = catalog.bump_epoch(id).unwrap(),
        }
    }
    let groups = std::iter::from_fn(|| catalog.pending(1)).collect::<Vec<_>>();
    let mut most = 0;
    for end in 0..=groups.len() {
        let mut again = Catalog::new(few.clone());
        for group in &groups[..end] {
            for record in Records::new(&group.records) {
                again.apply(&record.unwrap()).unwrap();
            }
        }
        again.recovered();
        let Some((id, _, digest)) = again.namespaces().next() else { continue };
        let salt = salts.into_iter().find(|salt| {
            let descriptor = Namespace { tenant_salt: vec![*salt], ..Namespace::default() };
            descriptor.digest() == digest
        });
        let found = again.hold_prefix(id, &keys(0..3)).unwrap().files;
        most = most.max(found.len());
        assert!(found.iter().all(|file| again.checksums(*file) == [u32::from(salt.unwrap()); 2]));
        assert!(again.usage(id).unwrap().epoch <= u64::from(salt != Some(2)));
    }
    assert_eq!(most, 3);
}

#[test]
fn a_catalog_is_not_used_before_it_is_recovered() {
    let mut catalog = Catalog::new(config(8, 1));
    catalog.apply(&namespace(0, 1)).unwrap();
    assert_eq!(catalog.begin(NamespaceId(0), &keys(0..1)), Err(CatalogError::Recovering));
    catalog.recovered();
    assert_eq!(catalog.begin(NamespaceId(0), &keys(0..1)).unwrap().positions.len(), 1);
}

#[test]
fn a_restart_keeps_the_order_of_use() {
    let (requests, blocks) = (64, 16);
    let files = requests * (blocks + 1);
    let mut catalog = Catalog::new(config(files, 1));
    let a = tenant(&mut catalog, b"a");
    let keys_of = |request: u32| keys(request * blocks..(request + 1) * blocks);
    for request in 0..requests {
        store(&mut catalog, a, &keys_of(request));
    }
    // Used in another order than written.
    let used: Vec<u32> = (0..requests).map(|at| at * 37 % requests).collect();
    for request in &used {
        let reference = catalog.acquire(a, &keys_of(*request)).unwrap();
        catalog.release(reference.id).unwrap();
        // Writes advance the clock.
        store(&mut catalog, a, &keys(10_000 + request..10_001 + request));
    }
    while catalog.pending(usize::MAX).is_some() {}
    let (mut records, mut cursor) = (Vec::new(), SnapshotCursor::default());
    while let Some(next) = catalog.snapshot(cursor, 500, &mut records) {
        cursor = next;
    }
    let mut again = Catalog::new(config(files, 1));
    for record in Records::new(&records) {
        again.apply(&record.unwrap()).unwrap();
    }
    again.recovered();
    again.evict(Some(a), files / 2).unwrap();
    let kept = |at: &u32| again.lookup(a, &keys_of(*at)).unwrap() as u32;
    let (older, newer) = used.split_at(requests as usize / 2);
    let sum = |requests: &[u32]| requests.iter().map(kept).sum::<u32>();
    let (older, newer) = (sum(older), sum(newer));
    assert!(newer > 12 * older, "{older} of the older half are kept, {newer} of the newer");
}

/// Files inserted while a snapshot is written make all others older. None moves into a band that
/// the snapshot has already written.
#[test]
fn a_snapshot_has_all_files_whatever_comes_meanwhile() {
    let files = 4096;
    let mut catalog = Catalog::new(config(files, 1));
    let a = tenant(&mut catalog, b"a");
    store(&mut catalog, a, &keys(0..files / 2));
    flush(&mut catalog);
    let (mut records, mut cursor, mut next) = (Vec::new(), SnapshotCursor::default(), files / 2);
    while let Some(at) = catalog.snapshot(cursor, 2000, &mut records) {
        cursor = at;
        if next < files {
            store(&mut catalog, a, &keys(next..next + 16));
            next += 16;
        }
        flush(&mut catalog).into_iter().for_each(|group| records.extend(group));
    }
    assert!(next > 3 * files / 4, "{next}: too few came to make others much older");
    let mut again = Catalog::new(config(files, 1));
    for record in Records::new(&records) {
        again.apply(&record.unwrap()).unwrap();
    }
    again.recovered();
    let lost = keys(0..next).iter().filter(|key| again.lookup(a, &[**key]) == Ok(0)).count();
    assert_eq!(lost, 0);
}

fn records() -> impl Strategy<Value = Vec<(u8, u32, u32)>> {
    proptest::collection::vec((0..7u8, 0..10u32, 0..10u32), 0..60)
}

proptest! {
    /// Any sequence of records is applied or refused, and the applied ones are consistent.
    #[test]
    fn random_records_are_taken_or_refused(records in records()) {
        let mut catalog = Catalog::new(config(8, 1));
        for (kind, a, b) in records {
            let (id, words) = (NamespaceId(a % 3), [a, b]);
            let record = match kind {
                0 => namespace(a % 3, (a % 3 + u32::from(b == 9)) as u8),
                1 | 2 => Record::Commit {
                    file: FileId(a),
                    namespace: NamespaceId(b % 2),
                    key: key(b),
                    checksums: words[..].into(),
                },
                3 => Record::Evict { first: FileId(a), count: b },
                4 => Record::Clear { namespace: id },
                5 => Record::Epoch { namespace: id, epoch: u64::from(b) },
                _ => Record::Use { first: FileId(a), count: b, how: UseKind::Touched },
            };
            // Refused records change nothing relevant here.
            let _ = catalog.apply(&record);
        }
        catalog.recovered();
        let counts = catalog.counts();
        prop_assert_eq!(counts.free + counts.stored, 8);
        prop_assert_eq!(counts.dropped, 0);
        let stored = (0..2).flat_map(|ns| (0..10).map(move |number| (NamespaceId(ns), number)));
        let stored = stored.filter(|(ns, number)| {
            catalog.find(*ns, &key(*number)).is_ok_and(|found| found.is_some())
        });
        prop_assert_eq!(counts.stored as usize, stored.count());
        prop_assert_eq!(catalog.evict(None, 8), Ok(counts.stored));
    }
}
