//! Tests of what the policies keep.

use super::*;

/// Returns the percentage of a working set that is hit while blocks used once pass by.
fn working_set_beside_scans(policy: PolicyKind) -> u32 {
    let (files, requests, blocks, rounds) = (1000, 50, 12, 30);
    let mut catalog = Catalog::new(CatalogConfig { journal: false, policy, ..config(files, 1) });
    let a = tenant(&mut catalog, b"a");
    let (mut hits, mut once) = (0, 1_000_000);
    for round in 0..rounds {
        for request in 0..requests {
            let own = keys(request * blocks..(request + 1) * blocks);
            let reference = catalog.acquire(a, &own).unwrap();
            hits += if round == 0 { 0 } else { reference.files.len() as u32 };
            store(&mut catalog, a, &own);
            catalog.release(reference.id).unwrap();
            // As many as in the working set.
            store(&mut catalog, a, &keys(once..once + blocks));
            once += blocks;
        }
    }
    100 * hits / ((rounds - 1) * requests * blocks)
}

#[test]
fn scans_flush_an_lru_cache_and_not_the_default() {
    assert_eq!(working_set_beside_scans(PolicyKind::Lru), 0);
    let kept = working_set_beside_scans(PolicyKind::default());
    assert!(kept > 90, "{kept} %");
}

/// Returns the hits of requests among those for documents of which a store has room for a third,
/// each followed by a block that is never used again, and the files written; before and after all
/// documents are replaced by others.
fn hits_and_writes(policy: PolicyKind) -> [(u32, usize); 2] {
    let mut catalog = Catalog::new(CatalogConfig { journal: false, policy, ..config(400, 1) });
    let a = tenant(&mut catalog, b"a");
    let mut state = 1u32;
    let phase = |first: u32| {
        let (mut hits, mut written) = (0, 0);
        for request in 0..6_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // The square makes some of them popular.
            let document = first + ((state >> 16) % 400).pow(2) / 400 % 150;
            let once = 1_000_000 + (first + request) * 4;
            let own = [keys(document * 8..document * 8 + 8), keys(once..once + 4)].concat();
            let reference = catalog.acquire(a, &own).unwrap();
            hits += reference.files.len() as u32;
            let write = catalog.begin(a, &own).unwrap();
            written += write.own().count();
            catalog.written(write.id, 0, &[0; 24][..2 * write.own().count()]).unwrap();
            catalog.commit(write.id).unwrap();
            catalog.release(reference.id).unwrap();
        }
        (hits, written)
    };
    [0, 10_000].map(phase)
}

#[test]
fn blocks_worth_less_than_those_stored_are_not_written() {
    let lru = hits_and_writes(PolicyKind::Lru);
    let ours = hits_and_writes(PolicyKind::default());
    for ((hits, written), (hits_of_lru, written_by_lru)) in ours.into_iter().zip(lru) {
        assert!(hits > hits_of_lru, "{hits} of {hits_of_lru}");
        assert!(2 * written < written_by_lru, "{written} of {written_by_lru}");
    }
}

/// An engine may store a request in parts, with the whole prefix each time.
#[test]
fn a_request_that_is_stored_in_parts_is_refused_each_time() {
    let mut catalog = Catalog::new(CatalogConfig { journal: false, ..config(64, 1) });
    let a = tenant(&mut catalog, b"a");
    for round in 0..60 {
        for request in 0..8 {
            let reference = catalog.acquire(a, &keys(request * 8..request * 8 + 8)).unwrap();
            store(&mut catalog, a, &keys(request * 8..request * 8 + 8));
            catalog.release(reference.id).unwrap();
        }
        // Various numbers of others, so that uses follow after various times.
        let others = 1_000 + round * 32;
        store(&mut catalog, a, &keys(others..others + (60 - round) % 32));
    }
    for part in 1..=8 {
        let write = catalog.begin(a, &keys(500_000..500_000 + part)).unwrap();
        assert!(write.positions.is_empty() && !write.is_short, "{part}");
        catalog.abort(write.id).unwrap();
    }
}

/// Without any reuse, all policies must go roughly by age.
#[test]
fn without_any_use_the_oldest_go() {
    for policy in PolicyKind::ALL.iter().copied() {
        let mut catalog = Catalog::new(CatalogConfig { journal: false, policy, ..config(100, 1) });
        let a = tenant(&mut catalog, b"a");
        for request in 0..100 {
            store(&mut catalog, a, &keys(request * 10..(request + 1) * 10));
        }
        for request in 91..100 {
            let own = keys(request * 10..(request + 1) * 10);
            assert_eq!(catalog.lookup(a, &own), Ok(10), "{policy:?} {request}");
        }
    }
}

/// The kind of restart in the middle of [`hits`].
#[derive(Debug, Clone, Copy, PartialEq)]
enum Restart {
    No,
    /// From all records.
    Journal,
    /// From a snapshot.
    Snapshot,
}

/// Returns the hits in the second half of requests of which many recur, some soon and some late,
/// between others that never do; and the catalog at the end.
fn hits(policy: PolicyKind, restart: Restart) -> (u32, Catalog) {
    let files = 600;
    let new = || Catalog::new(CatalogConfig { policy, ..config(files, 1) });
    let (mut catalog, mut records) = (new(), Vec::new());
    let a = tenant(&mut catalog, b"a");
    let (mut state, mut found) = (1u32, 0);
    for request in 0..4_000 {
        if request == 2_000 && restart != Restart::No {
            if restart == Restart::Snapshot {
                flush(&mut catalog);
                records.clear();
                let mut cursor = Some(SnapshotCursor::default());
                while let Some(from) = cursor {
                    cursor = catalog.snapshot(from, 1 << 20, &mut records);
                }
            }
            catalog = new();
            for record in Records::new(&records) {
                catalog.apply(&record.unwrap()).unwrap();
            }
            catalog.recovered();
        }
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let conversation = match state >> 29 {
            0..3 => 10_000 + request,
            3..6 => (state >> 16) % 40,
            _ => 100 + (state >> 16) % 150,
        };
        let own = keys(conversation * 8..(conversation + 1) * 8);
        let reference = catalog.acquire(a, &own).unwrap();
        found += if request < 2_000 { 0 } else { reference.files.len() as u32 };
        store(&mut catalog, a, &own);
        catalog.release(reference.id).unwrap();
        flush(&mut catalog).iter().for_each(|group| records.extend_from_slice(group));
    }
    (found, catalog)
}

/// The journal records uses: eviction is the same after a restart.
#[test]
fn a_restart_keeps_what_is_worth_keeping() {
    for policy in PolicyKind::ALL.iter().copied() {
        let (uninterrupted, mut catalog) = hits(policy, Restart::No);
        let (journal, mut again) = hits(policy, Restart::Journal);
        let (snapshot, _) = hits(policy, Restart::Snapshot);
        assert!(uninterrupted > 4_000, "{policy:?}: {uninterrupted}");
        // A snapshot records which files were reused, and roughly when, but not the learned rates.
        for (restarted, percent) in [(journal, 98), (snapshot, 90)] {
            assert!(100 * restarted >= percent * uninterrupted, "{policy:?}: {restarted}");
        }
        // The journal does not record refused blocks, from which the other policy learns.
        if policy == PolicyKind::Lru {
            // Recovery repeats all operations, in the same order.
            assert_eq!(journal, uninterrupted, "{policy:?}");
            let (a, all) = (NamespaceId(0), keys(0..8 * 16_000));
            let order = eviction_order(&mut catalog, a, &all);
            assert_eq!(eviction_order(&mut again, a, &all), order, "{policy:?}");
        }
    }
}

/// Files that a tool reads to check them do not count as used.
#[test]
fn holding_files_is_no_use_of_them() {
    for policy in PolicyKind::ALL.iter().copied() {
        let made = || {
            let mut catalog = Catalog::new(CatalogConfig { policy, ..config(64, 1) });
            let a = tenant(&mut catalog, b"a");
            (0..8).for_each(|part| drop(store(&mut catalog, a, &keys(part * 8..part * 8 + 8))));
            let reference = catalog.acquire(a, &keys(16..24)).unwrap();
            catalog.release(reference.id).unwrap();
            flush(&mut catalog);
            (catalog, a)
        };
        let ((mut one, a), (mut other, b)) = (made(), made());
        let last: Vec<FileId> = one.stored_from(FileId(40)).map(|stored| stored.file).collect();
        assert_eq!((last.len(), one.stored_from(FileId(0)).count()), (24, 64));
        let nowhere = [FileId(64), FileId(u32::MAX)];
        let reference = one.hold(&[&last[..], &nowhere].concat());
        assert_eq!(reference.files, last);
        one.lost(last[3]);
        assert_eq!(one.hold(&last[3..5]).files, last[4..5], "what is lost is not found");
        assert_eq!(one.evict(None, 64).unwrap(), 40, "what is held stays");
        let (mut one, _) = made();
        let reference = one.hold(&last);
        one.release(reference.id).unwrap();
        assert_eq!(one.log.is_empty(), other.log.is_empty(), "nor do restarts hear of it");
        let all = keys(0..64);
        let order = eviction_order(&mut one, a, &all);
        assert_eq!(order, eviction_order(&mut other, b, &all), "{policy:?}");
    }
}
