//! Pins.

use std::time::Duration;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn new<'a>(namespaces: &'a [NamespaceId], keys: &'a [BlockKey], seconds: u64) -> NewPin<'a> {
    let ttl = Duration::from_secs(seconds);
    NewPin { owner: 0, namespaces, keys, ttl, bytes_max: None, wait: false }
}

fn pin(catalog: &mut Catalog, new: &NewPin<'_>) -> PinAnswer {
    catalog.pin_for(new, &PinLimits::default()).unwrap()
}

fn list(catalog: &Catalog) -> Vec<u64> {
    catalog.pins(&PinLimits::default()).pins.iter().map(|pin| pin.pin).collect()
}

#[test]
fn a_pin_protects_until_its_end_and_hinders_nothing_after_it() {
    let mut catalog = Catalog::new(config(8, 1));
    let a = tenant(&mut catalog, b"a");
    catalog.advance(7 * SECOND);
    store(&mut catalog, a, &keys(0..8));
    let made = pin(&mut catalog, &new(&[a], &keys(0..3), 5));
    assert_eq!((made.outcome, made.reason), (Outcome::Accepted, None));
    assert_eq!(pin(&mut catalog, &new(&[a], &keys(0..1), 9)).outcome, Outcome::Accepted);
    assert_eq!(catalog.evict(None, 8), Ok(5));
    catalog.advance(12 * SECOND - 1);
    assert_eq!((catalog.evict(None, 8), list(&catalog)), (Ok(0), vec![1, 2]));
    catalog.advance(12 * SECOND);
    assert_eq!((list(&catalog), catalog.evict(None, 8)), (vec![2], Ok(2)));
    // It makes room for new blocks as well.
    flush(&mut catalog);
    assert_eq!(catalog.begin(a, &keys(20..28)).unwrap().positions.len(), 7);
    catalog.advance(16 * SECOND);
    let write = catalog.begin(a, &keys(30..31)).unwrap();
    assert!(write.is_short && catalog.counts().limbo == 1, "it was evicted");
    // Time does not go back.
    catalog.advance(0);
    assert_eq!(pin(&mut catalog, &new(&[a], &keys(0..1), 1)).outcome, Outcome::Missing);
}

#[test]
fn an_awaited_block_is_pinned_by_its_commit_in_all_namespaces() {
    let mut catalog = Catalog::new(config(16, 1));
    let both = [tenant(&mut catalog, b"a"), tenant(&mut catalog, b"b")];
    store(&mut catalog, both[0], &keys(0..3));
    store(&mut catalog, both[1], &keys(0..1));
    let (some, none) = (keys(0..3), keys(9..10));
    let waiting = NewPin { wait: true, ..new(&both, &some, 5) };
    let made = pin(&mut catalog, &waiting);
    let status = made.pin.unwrap();
    assert_eq!(made.outcome, Outcome::Deferred);
    assert_eq!((status.blocks, status.awaited_blocks, status.bytes), (1, 2, 60));
    assert_eq!(
        pin(&mut catalog, &NewPin { wait: true, ..new(&both, &none, 5) }).pin.unwrap().blocks,
        0
    );
    assert_eq!(catalog.evict(Some(both[0]), 8), Ok(2));
    store(&mut catalog, both[1], &keys(0..3));
    assert_eq!(catalog.pins(&PinLimits::default()).pins[0].blocks, 1);
    store(&mut catalog, both[0], &keys(0..2));
    assert_eq!(catalog.pins(&PinLimits::default()).pins[0].blocks, 2);
    store(&mut catalog, both[0], &keys(0..3));
    assert_eq!(catalog.pins(&PinLimits::default()).pins[0].awaited_blocks, 0);
    assert_eq!(catalog.evict(None, 16), Ok(0));
    assert_eq!(catalog.end_pins(None, None), Some(3));
    assert_eq!(catalog.evict(None, 16), Ok(6));
}

#[test]
fn pins_stay_within_their_limits() {
    let mut catalog = Catalog::new(config(16, 1));
    let a = tenant(&mut catalog, b"a");
    store(&mut catalog, a, &keys(0..12));
    let (all, few) = (keys(0..12), keys(0..2));
    let limits = PinLimits { bytes: Some(60), ttl: Duration::from_secs(9) };
    let mut pin = |new: NewPin<'_>| catalog.pin_for(&new, &limits).unwrap();
    let own = pin(NewPin { bytes_max: Some(39), ..new(&[a], &all, 10) });
    let reason = own.reason.unwrap();
    assert_eq!((own.outcome, own.pin.unwrap().blocks), (Outcome::Clipped, 3));
    assert!(reason.contains("3 of 12") && reason.contains("9 s at most"), "{reason}");
    assert_eq!(pin(new(&[a], &all, 1)).pin.unwrap().blocks, 3);
    let full = pin(new(&[a], &few, 1));
    assert_eq!((full.outcome, full.pin), (Outcome::Rejected, None));
    assert_eq!(pin(new(&[a], &[], 1)).outcome, Outcome::Missing);
    // Half of the store, by default.
    catalog.end_pins(None, None);
    let made = catalog.pin_for(&new(&[a], &all, 1), &PinLimits::default()).unwrap();
    assert_eq!(made.pin.unwrap().blocks, 8);
    // So many, however small.
    let spaces = [a];
    let one = NewPin { bytes_max: Some(10), ..new(&spaces, &all, 1) };
    let limits = PinLimits { bytes: Some(u64::MAX), ..limits };
    let mut made = 1;
    while catalog.pin_for(&one, &limits).unwrap().pin.is_some() {
        made += 1;
    }
    assert_eq!(made, 4096);
}

#[test]
fn pins_end_by_number_by_owner_and_with_their_namespace() {
    let mut catalog = Catalog::new(config(16, 1));
    let (a, b) = (tenant(&mut catalog, b"a"), tenant(&mut catalog, b"b"));
    for namespace in [a, b] {
        store(&mut catalog, namespace, &keys(0..2));
    }
    let keys = keys(0..2);
    for owner in 1..3 {
        for namespace in [a, b] {
            let made = pin(&mut catalog, &NewPin { owner, ..new(&[namespace], &keys, 5) });
            assert_eq!(made.outcome, Outcome::Accepted);
        }
    }
    assert_eq!(catalog.end_pins(Some(1), Some(2)), None, "it is another's");
    assert_eq!(catalog.end_pins(Some(1), Some(1)), Some(2));
    assert_eq!(catalog.end_pins(Some(1), None), None);
    assert_eq!((catalog.end_pins(None, Some(2)), list(&catalog)), (Some(4), vec![2]));
    assert_eq!(catalog.evict(None, 4), Ok(2));
    catalog.bump_epoch(b).unwrap();
    assert_eq!((list(&catalog), catalog.counts().active), (vec![], 0));
    store(&mut catalog, a, &keys);
    pin(&mut catalog, &new(&[a], &keys, 5));
    catalog.clear(a).unwrap();
    assert_eq!((list(&catalog), catalog.counts().active), (vec![], 0));
}
