//! Tests of the catalog, one property each.

mod eviction;
mod model;
mod pins;
mod recovery;

use super::*;
use crate::{namespace::Namespace, record::Records};

fn key(number: u32) -> BlockKey {
    let mut digest = [0; 32];
    digest[..4].copy_from_slice(&number.to_le_bytes());
    BlockKey(digest)
}

fn keys(numbers: std::ops::Range<u32>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

pub(super) fn config(files: u32, ranks: u32) -> CatalogConfig {
    CatalogConfig {
        files,
        file_bytes: 10,
        ranks,
        words_per_file: 2 * ranks,
        namespaces_max: 4,
        journal: true,
        files_ahead: 0,
        seed: 1,
        policy: PolicyKind::default(),
        write_budget: None,
    }
}

fn tenant(catalog: &mut Catalog, salt: &[u8]) -> NamespaceId {
    let descriptor = Namespace { tenant_salt: salt.to_vec(), ..Namespace::default() };
    catalog.namespace(&descriptor).unwrap()
}

fn store(catalog: &mut Catalog, namespace: NamespaceId, keys: &[BlockKey]) -> Write {
    let write = catalog.begin(namespace, keys).unwrap();
    let own: Vec<FileId> = write.own().collect();
    for rank in 0..catalog.config.ranks {
        let checksums: Vec<u32> = own.iter().flat_map(|file| [file.0, rank]).collect();
        catalog.written(write.id, rank, &checksums).unwrap();
    }
    catalog.commit(write.id).unwrap();
    write
}

fn flush(catalog: &mut Catalog) -> Vec<Vec<u8>> {
    let mut groups = Vec::new();
    while let Some(group) = catalog.pending(1 << 20) {
        catalog.durable(group.lsn);
        groups.push(group.records);
    }
    groups
}

#[test]
fn what_is_lost_while_it_is_written_is_not_committed() {
    let mut catalog = Catalog::new(config(16, 1));
    let a = tenant(&mut catalog, b"a");
    let write = catalog.begin(a, &keys(0..3)).unwrap();
    catalog.lost(write.positions[1].file);
    // Another request that waits for the same block.
    let other = catalog.begin(a, &keys(1..2)).unwrap();
    assert!(!other.positions[0].own);
    catalog.written(write.id, 0, &[0; 6]).unwrap();
    catalog.commit(write.id).unwrap();
    let is_stored = |catalog: &Catalog| catalog.are_stored(a, &keys(0..3)).unwrap();
    assert_eq!(is_stored(&catalog), [true, false, true]);
    catalog.written(other.id, 0, &[]).unwrap();
    catalog.commit(other.id).unwrap();
    // Not for good, neither after a write that was given up.
    let again = catalog.begin(a, &keys(1..2)).unwrap();
    catalog.lost(again.positions[0].file);
    catalog.abort(again.id).unwrap();
    store(&mut catalog, a, &keys(1..2));
    assert_eq!(is_stored(&catalog), [true; 3]);
    assert_eq!(catalog.counts().free + catalog.counts().limbo, 13);
    // A file of no catalog: a store has one for its self-test.
    catalog.lost(FileId(16));
}

#[test]
fn a_restart_finds_what_was_committed() {
    let mut catalog = Catalog::new(config(16, 2));
    let (a, b) = (tenant(&mut catalog, b"a"), tenant(&mut catalog, b"b"));
    store(&mut catalog, a, &keys(0..5));
    store(&mut catalog, b, &keys(0..3));
    catalog.remove(a, &keys(4..5)).unwrap();
    assert_eq!(catalog.lookup(a, &keys(0..5)), Ok(4));
    assert_eq!(catalog.lookup(b, &keys(0..5)), Ok(3));
    let mut again = Catalog::new(config(16, 2));
    for group in flush(&mut catalog) {
        for record in Records::new(&group) {
            again.apply(&record.unwrap()).unwrap();
        }
    }
    again.recovered();
    assert_eq!(again.lookup(a, &keys(0..5)), Ok(4));
    assert_eq!(again.lookup(b, &keys(0..5)), Ok(3));
    assert_eq!(again.counts(), catalog.counts());
    let reference = again.acquire(b, &keys(0..3)).unwrap();
    let file = reference.files[2];
    assert_eq!(again.checksums(file), [file.0, 0, file.0, 1]);
    assert_eq!(again.release(reference.id), Ok(()));
    assert!(again.release(reference.id).is_err());
}

/// Returns keys in the order in which they would be evicted.
fn eviction_order(catalog: &mut Catalog, namespace: NamespaceId, keys: &[BlockKey]) -> Vec<u32> {
    let number = |key: &BlockKey| u32::from_le_bytes(key.0[..4].try_into().unwrap());
    let is_stored =
        |catalog: &Catalog, key: &BlockKey| catalog.find(namespace, key).unwrap().is_some();
    let mut left: Vec<BlockKey> = keys.to_vec();
    left.retain(|key| is_stored(catalog, key));
    let mut order = Vec::new();
    while catalog.evict(Some(namespace), 1).unwrap() == 1 {
        let stored = |key: &BlockKey| is_stored(catalog, key);
        order.extend(left.iter().filter(|key| !stored(key)).map(number));
        left.retain(stored);
    }
    order
}

#[test]
fn a_block_goes_before_the_blocks_it_follows() {
    for policy in PolicyKind::ALL.iter().copied() {
        let mut catalog = Catalog::new(CatalogConfig { policy, ..config(8, 1) });
        let a = tenant(&mut catalog, b"a");
        store(&mut catalog, a, &keys(0..2));
        store(&mut catalog, a, &keys(0..5));
        let order = eviction_order(&mut catalog, a, &keys(0..5));
        let place = |number| order.iter().position(|other| *other == number).unwrap();
        assert!(place(1) < place(0), "{policy:?}: {order:?}");
        assert!(place(4) < place(3) && place(3) < place(2), "{policy:?}: {order:?}");
        if matches!(policy, PolicyKind::Lru | PolicyKind::ReuseRate) {
            assert_eq!(order, [4, 3, 2, 1, 0], "{policy:?}");
        }
    }
}

#[test]
fn what_is_used_is_the_last_to_go() {
    let mut catalog = Catalog::new(config(8, 1));
    let a = tenant(&mut catalog, b"a");
    store(&mut catalog, a, &keys(0..2));
    store(&mut catalog, a, &keys(10..12));
    let reference = catalog.acquire(a, &keys(0..3)).unwrap();
    assert_eq!(reference.files.len(), 2);
    catalog.release(reference.id).unwrap();
    let usage = catalog.usage(a).unwrap();
    assert_eq!((usage.recent, usage.idle, usage.hits, usage.asked), (2, 2, 2, 3));
    assert_eq!(eviction_order(&mut catalog, a, &keys(0..12)), [11, 10, 1, 0]);
}

#[test]
fn tenants_with_equal_tokens_never_share() {
    let mut catalog = Catalog::new(config(16, 1));
    let (a, b) = (tenant(&mut catalog, b"a"), tenant(&mut catalog, b"b"));
    let mine = store(&mut catalog, a, &keys(0..4));
    assert_eq!(catalog.lookup(b, &keys(0..4)), Ok(0));
    let theirs = store(&mut catalog, b, &keys(0..4));
    assert!(mine.own().all(|file| theirs.own().all(|other| other != file)));
    assert_eq!(catalog.bump_epoch(a), Ok(1));
    assert_eq!(catalog.lookup(a, &keys(0..4)), Ok(0));
    assert_eq!(catalog.lookup(b, &keys(0..4)), Ok(4));
    let c = NamespaceId(2);
    assert_eq!(catalog.lookup(c, &keys(0..4)), Err(CatalogError::Namespace { namespace: c }));
}

#[test]
fn what_is_known_of_a_key() {
    let mut catalog = Catalog::new(config(8, 1));
    let (a, b) = (tenant(&mut catalog, b"a"), tenant(&mut catalog, b"b"));
    let state = |catalog: &Catalog, number| catalog.state_of(a, &key(number)).unwrap();
    store(&mut catalog, a, &keys(0..2));
    store(&mut catalog, b, &keys(1..4));
    let write = catalog.begin(a, &keys(10..11)).unwrap();
    let states = [0, 2, 10, 20].map(|number| state(&catalog, number));
    let known = [KeyState::Stored, KeyState::Elsewhere, KeyState::Writing, KeyState::Unknown];
    assert_eq!(states, known);
    catalog.abort(write.id).unwrap();
    assert_eq!(catalog.evict(Some(a), 2), Ok(2));
    assert_eq!([0, 1, 10].map(|number| state(&catalog, number)), {
        // Its own history comes before another namespace's block.
        [KeyState::Evicted, KeyState::Evicted, KeyState::Unknown]
    });
    catalog.bump_epoch(b).unwrap();
    assert_eq!(state(&catalog, 2), KeyState::Unknown);
    let c = NamespaceId(9);
    assert_eq!(catalog.state_of(c, &key(0)), Err(CatalogError::Namespace { namespace: c }));
}

#[test]
fn a_namespace_at_its_quota_evicts_its_own_files() {
    let mut catalog = Catalog::new(config(16, 1));
    let (a, b) = (tenant(&mut catalog, b"a"), tenant(&mut catalog, b"b"));
    store(&mut catalog, b, &keys(0..8));
    catalog.set_quota(a, Some(3)).unwrap();
    store(&mut catalog, a, &keys(0..3));
    store(&mut catalog, a, &keys(10..12));
    let usage = catalog.usage(a).unwrap();
    assert_eq!((usage.stored, usage.evicted), (3, 2));
    assert_eq!(catalog.lookup(b, &keys(0..8)), Ok(8));
    // All of them are in use: no file is granted, however much is free.
    let (head, tail) = (keys(0..1), keys(10..12));
    let held = [catalog.acquire(a, &head).unwrap(), catalog.acquire(a, &tail).unwrap()];
    assert_eq!(held[0].files.len() + held[1].files.len(), 3);
    assert!(catalog.begin(a, &keys(20..22)).unwrap().positions.is_empty());
    // Dropped files in use count, too.
    catalog.clear(a).unwrap();
    assert!(catalog.begin(a, &keys(20..22)).unwrap().positions.is_empty());
    catalog.release(held[1].id).unwrap();
    assert_eq!(catalog.begin(a, &keys(20..24)).unwrap().positions.len(), 2);
}

#[test]
fn files_of_a_cleared_namespace_go_before_any_other() {
    for journal in [false, true] {
        let mut catalog = Catalog::new(CatalogConfig { journal, ..config(16, 1) });
        let (a, b) = (tenant(&mut catalog, b"a"), tenant(&mut catalog, b"b"));
        store(&mut catalog, a, &keys(0..6));
        store(&mut catalog, b, &keys(0..10));
        catalog.clear(a).unwrap();
        assert_eq!(catalog.counts().dropped, 6);
        flush(&mut catalog);
        let write = catalog.begin(b, &keys(20..26)).unwrap();
        assert_eq!(write.own().count(), 6);
        assert_eq!(catalog.lookup(b, &keys(0..10)), Ok(10));
    }
}

#[test]
fn a_write_ends_when_the_last_rank_has_reported_a_failure_or_not() {
    let mut catalog = Catalog::new(config(4, 3));
    let a = tenant(&mut catalog, b"a");
    let write = catalog.begin(a, &keys(0..4)).unwrap();
    assert_eq!(catalog.written(write.id, 0, &[0; 8]), Ok(Reported::Waiting));
    let error = catalog.written(write.id, 1, &[0; 7]);
    refused(error, "7 checksums were given for 8 objects of one rank");
    assert_eq!(catalog.failed(write.id, 1), Ok(Reported::Waiting));
    refused(catalog.failed(write.id, 3), "rank 3 reported, but the catalog has 3");
    assert_eq!(catalog.counts().free, 0, "rank 2 may still write to them");
    assert_eq!(catalog.written(write.id, 2, &[0; 8]), Ok(Reported::Failed));
    assert_eq!((catalog.counts().free, catalog.lookup(a, &keys(0..4))), (4, Ok(0)));
    assert!(catalog.pending(usize::MAX).is_some_and(|group| group.lsn == Lsn(1)));
}

#[test]
fn heavier_namespaces_keep_their_files_longer() {
    let mut catalog = Catalog::new(CatalogConfig { journal: false, ..config(400, 1) });
    let (a, b) = (tenant(&mut catalog, b"a"), tenant(&mut catalog, b"b"));
    catalog.set_weight(a, 3).unwrap();
    refused(catalog.set_weight(a, 0), "a namespace's weight is zero");
    // Both write the same amount.
    for at in 0..1000 {
        store(&mut catalog, a, &keys(at * 2..at * 2 + 2));
        store(&mut catalog, b, &keys(at * 2..at * 2 + 2));
    }
    let (a, b) = (catalog.usage(a).unwrap(), catalog.usage(b).unwrap());
    assert_eq!(a.stored + b.stored, 400);
    assert!((290..310).contains(&a.stored), "{a:?} {b:?}");
}

#[test]
fn keys_that_are_not_found_any_more_are_told_once() {
    let mut catalog = Catalog::new(config(8, 1));
    let [a, b] = [b"a", b"b"].map(|salt| tenant(&mut catalog, salt));
    store(&mut catalog, a, &keys(0..1));
    catalog.remove(a, &keys(0..1)).unwrap();
    assert_eq!(catalog.take_dropped(), [], "nobody had asked before");
    let files = store(&mut catalog, a, &keys(0..3)).own().collect::<Vec<_>>();
    store(&mut catalog, b, &keys(0..2));
    let given_up = catalog.begin(a, &keys(3..4)).unwrap();
    catalog.abort(given_up.id).unwrap();
    catalog.remove(a, &keys(1..2)).unwrap();
    catalog.lost(files[0]);
    catalog.clear(b).unwrap();
    assert_eq!(catalog.evict(None, 3), Ok(3), "two of the namespace that was cleared");
    let dropped = catalog.take_dropped();
    assert_eq!(dropped, [(a, key(1)), (a, key(0)), (a, key(2))]);
    assert_eq!(catalog.take_dropped(), []);
}

#[test]
fn the_write_budget_is_kept() {
    let day_ns = 86_400_000_000_000;
    let budget = WriteBudget { bytes_per_day: 100, burst_bytes: 30 };
    let mut catalog = Catalog::new(CatalogConfig { write_budget: Some(budget), ..config(64, 1) });
    let a = tenant(&mut catalog, b"a");
    catalog.advance(5);
    assert_eq!(store(&mut catalog, a, &keys(0..5)).positions.len(), 3);
    assert_eq!(catalog.usage(a).unwrap().refused, 2);
    // Keys that are stored cost nothing.
    assert_eq!(store(&mut catalog, a, &keys(0..3)).positions.len(), 3);
    catalog.advance(5 + day_ns / 5);
    assert_eq!(store(&mut catalog, a, &keys(0..9)).positions.len(), 5);
}

#[test]
fn a_namespace_that_is_not_used_gives_its_slot_to_a_new_one() {
    let mut catalog = Catalog::new(config(4, 1));
    let (all, limits) = (keys(0..1), PinLimits::default());
    for number in 0..4 {
        assert_eq!(tenant(&mut catalog, &[number]), NamespaceId(number.into()));
    }
    assert_eq!(tenant(&mut catalog, &[1]), NamespaceId(1), "it is known");
    // Each is used in another way.
    let [a, b, c, d] = [0, 1, 2, 3].map(NamespaceId);
    let kept = catalog.keep(a).unwrap();
    store(&mut catalog, b, &all);
    let write = catalog.begin(c, &all).unwrap();
    let namespaces = &[d];
    let ttl = std::time::Duration::from_secs(1);
    let pin = NewPin { owner: 1, namespaces, keys: &all, ttl, bytes_max: None, wait: true };
    catalog.pin_for(&pin, &limits).unwrap();
    let more = Namespace { tenant_salt: vec![9], label: "more".to_owned(), ..Namespace::default() };
    let is_full = |catalog: &mut Catalog| {
        refused(catalog.namespace(&more), "namespace \"more\" is new, and each of the 4 that the");
    };
    is_full(&mut catalog);
    // A block that is read when it is removed.
    let read = catalog.acquire(b, &all).unwrap();
    catalog.clear(b).unwrap();
    is_full(&mut catalog);
    catalog.release(read.id).unwrap();
    assert_eq!(tenant(&mut catalog, b"5"), NamespaceId(5));
    let (b, former) = (NamespaceId(5), b);
    assert_eq!(catalog.lookup(former, &all), Err(CatalogError::Namespace { namespace: former }));
    catalog.set_quota(b, Some(1)).unwrap();
    catalog.abort(write.id).unwrap();
    catalog.set_weight(c, 2).unwrap();
    is_full(&mut catalog);
    // The oldest one, of three.
    drop(kept);
    catalog.end_pins(None, None);
    catalog.set_weight(c, 1).unwrap();
    let came = [b"6", b"7", b"8"].map(|salt| tenant(&mut catalog, salt));
    assert_eq!(came, [8, 10, 11].map(NamespaceId));
    assert_eq!(tenant(&mut catalog, &[3]), NamespaceId(12), "it was replaced, and comes back");
    let ids: Vec<u32> = catalog.namespaces().map(|(id, ..)| id.0).collect();
    assert_eq!(ids, [12, 5, 10, 11]);
    let long = Namespace { label: "x".repeat(65), ..Namespace::default() };
    refused(catalog.namespace(&long), "a namespace's label has 65 bytes; give at most 64");
}

fn refused<T: std::fmt::Debug>(result: Result<T, CatalogError>, why: &str) {
    let is_it = matches!(&result, Err(CatalogError::Refused(said)) if said.starts_with(why));
    assert!(is_it, "{result:?}");
}

fn named(catalog: &mut Catalog, user: u32, salt: u8) -> Result<NamespaceId, CatalogError> {
    let descriptor = Namespace { tenant_salt: vec![salt], ..Namespace::default() };
    catalog.namespace_of(&descriptor, Some(NamespaceOwner { user, namespaces_max: 2 }))
}

/// Returns a catalog with the records of another one.
fn replayed(catalog: &mut Catalog, config: CatalogConfig) -> Catalog {
    let mut again = Catalog::new(config);
    for group in flush(catalog) {
        Records::new(&group).for_each(|record| again.apply(&record.unwrap()).unwrap());
    }
    again.recovered();
    again
}

#[test]
fn a_user_replaces_its_own_namespaces() {
    let config = config(32, 1);
    let mut catalog = Catalog::new(config.clone());
    let (a, b) = (named(&mut catalog, 1, 1).unwrap(), named(&mut catalog, 1, 2).unwrap());
    let other = named(&mut catalog, 2, 3).unwrap();
    for namespace in [a, b, other] {
        store(&mut catalog, namespace, &keys(0..2));
    }
    assert_eq!(named(&mut catalog, 2, 1), Ok(a), "it stays the first one's");
    let c = named(&mut catalog, 1, 4).unwrap();
    assert_eq!(catalog.lookup(a, &keys(0..2)), Err(CatalogError::Namespace { namespace: a }));
    assert_eq!(catalog.lookup(c, &keys(0..2)), Ok(0));
    // Not those in use, being written, or with a property.
    let kept = catalog.keep(b).unwrap();
    let write = catalog.begin(c, &keys(0..1)).unwrap();
    let label = String::new();
    let full = Err(CatalogError::OwnNamespaces { label, user: 1, max: 2 });
    assert_eq!(named(&mut catalog, 1, 5), full);
    catalog.abort(write.id).unwrap();
    drop(kept);
    catalog.set_quota(b, Some(2)).unwrap();
    let d = named(&mut catalog, 1, 5).unwrap();
    store(&mut catalog, d, &keys(0..2));
    assert_eq!(named(&mut catalog, 1, 4).map(|id| id > d), Ok(true), "it comes back, empty");
    // A restart does not make them anybody's.
    let mut again = replayed(&mut catalog, config);
    let kept = again.keep(again.namespaces().map(|(id, ..)| id).max().unwrap()).unwrap();
    assert_eq!(named(&mut again, 1, 6), full);
    drop(kept);
    for namespace in [b, other] {
        assert_eq!(again.lookup(namespace, &keys(0..2)), Ok(2));
    }
    // Where nothing is left, nothing of another user goes.
    for (user, salt) in [(2, 7), (1, 4)] {
        let id = named(&mut again, user, salt).unwrap();
        store(&mut again, id, &keys(0..1));
    }
    refused(named(&mut again, 3, 8), "namespace \"\" is new, and each of the 4 that the store");
}

#[test]
fn a_user_loses_an_empty_namespace_before_one_with_blocks() {
    let mut catalog = Catalog::new(config(32, 1));
    let (full, empty) = (named(&mut catalog, 1, 1).unwrap(), named(&mut catalog, 1, 2).unwrap());
    // It was registered first, and would go first.
    store(&mut catalog, full, &keys(0..2));
    named(&mut catalog, 1, 3).unwrap();
    assert_eq!(catalog.lookup(full, &keys(0..2)), Ok(2));
    assert_eq!(catalog.lookup(empty, &[]), Err(CatalogError::Namespace { namespace: empty }));
}

#[test]
fn a_users_limit_is_one_of_all_its_namespaces() {
    let config = CatalogConfig { policy: PolicyKind::Lru, ..config(32, 1) };
    let mut catalog = Catalog::new(config.clone());
    catalog.limit_owner(1, Some(4)).unwrap();
    let own = [1, 2].map(|salt| named(&mut catalog, 1, salt).unwrap());
    let other = named(&mut catalog, 2, 3).unwrap();
    store(&mut catalog, other, &keys(0..8));
    let held = |catalog: &Catalog| own.map(|id| catalog.usage(id).unwrap().stored);
    store(&mut catalog, own[0], &keys(0..3));
    store(&mut catalog, own[1], &keys(0..3));
    assert_eq!(held(&catalog), [1, 3], "the oldest go, of any");
    store(&mut catalog, own[1], &keys(10..20));
    assert_eq!(held(&catalog), [0, 4], "no more than that");
    // A quota of a namespace is one more limit.
    catalog.set_quota(own[0], Some(1)).unwrap();
    store(&mut catalog, own[0], &keys(0..3));
    assert_eq!(held(&catalog), [1, 3]);
    let mut again = replayed(&mut catalog, config);
    assert_eq!(held(&again), [1, 3]);
    again.limit_owner(1, Some(2)).unwrap();
    assert_eq!(held(&again).iter().sum::<u32>(), 2, "the excess goes at once");
    store(&mut again, own[1], &keys(20..24));
    assert_eq!(held(&again).iter().sum::<u32>(), 2);
    again.limit_owner(1, None).unwrap();
    store(&mut again, own[1], &keys(24..28));
    assert_eq!(held(&again).iter().sum::<u32>(), 6);
    assert_eq!(again.lookup(other, &keys(0..8)), Ok(8));
}

#[test]
fn evictions_are_counted_also_after_their_namespace() {
    let few = CatalogConfig { namespaces_max: 1, journal: false, ..config(4, 1) };
    let mut catalog = Catalog::new(few);
    for salt in 0..3 {
        let a = tenant(&mut catalog, &[salt]);
        store(&mut catalog, a, &keys(0..2));
        assert_eq!(catalog.evict(Some(a), 2), Ok(2));
    }
    assert_eq!(catalog.counts().evicted, 6);
}
