//! Failed flushes and lost caches: a store acknowledges only durable data, then and later. The
//! command `cargo xtask crash` crashes at every point.

use crate::{shelf, stack};

use std::sync::Arc;

use nvme_emu::{FaultAction, LbaRange};
use objstore::{
    BlockKey, KvShape, Layer, Namespace, Reservation, Store, StoreError, StoreOptions, StoreRequest,
};
use shelf::{FLUSH, Shelf, break_device, break_flush, crash, flushes, refused};
use stack::{Stack, WRITE, WRITE_FAULT, blocks, keys, on};

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
/// Dataset Management.
const DSM: u8 = 9;

/// Makes writes of the journal fail.
fn break_journal(stack: &Stack) {
    let mut rule = on(WRITE, WRITE_FAULT);
    rule.when.lbas = Some(LbaRange { first: 0, count: stack.data_lba() });
    stack.faults(Some(rule));
}

#[test]
fn nothing_is_committed_after_a_flush_that_failed() {
    // Without "do not retry", the device might be asked again, and succeed then.
    for dnr in [true, false] {
        let (shelf, mut stack) = Shelf::made(2, SHAPE, &StoreOptions::default());
        let (old, a, b) = (keys(0..4), keys(10..14), keys(20..24));
        stack.put(&old, 0);
        let first = stack.begin(&a, 0);
        stack.write_all(&first).unwrap();
        let second = stack.begin(&b, 10);
        stack.write_all(&second).unwrap();
        let fault = FaultAction::Status { code: 0x280, dnr };
        break_device(&stack.emus[1], on(FLUSH, fault).limit(1));
        let said = refused(stack.store.commit(first));
        assert!(said.contains("drive1") && said.contains("Write Fault"), "{said}");
        let before = flushes(&stack.emus);
        refused(stack.store.commit(second));
        refused(stack.store.sync_journal());
        refused(stack.store.allocate(&a, &blocks(0, 4)));
        assert_eq!(flushes(&stack.emus), before, "a device was asked again");
        assert_eq!((stack.store.peek(&a), stack.store.peek(&b)), (0, 0));
        assert_eq!(stack.get(&old, 20), 4, "what is stored can be retrieved");
        assert_eq!(stack.store.stats().unwrap().files.writing, 0);
        refused(stack.store.clone().close().map(drop));
        crash(stack);
        let mut stack = shelf.open(&StoreOptions::default());
        assert_eq!(stack.get(&old, 20), 4);
        assert_eq!((stack.store.peek(&a), stack.store.peek(&b)), (0, 0));
        assert_eq!((stack.put(&a, 0), stack.get(&a, 30)), (4, 4), "open anew, it stores");
    }
}

/// Reserves files, and writes their blocks from `first` on.
fn fill(stack: &mut Stack, keys: &[BlockKey], first: u32) -> (Arc<Reservation>, StoreRequest) {
    let blocks = blocks(first, keys.len());
    keys.iter().zip(&blocks).for_each(|(key, block)| stack.fill(*block, *key));
    let reserved = stack.store.reserve(keys).unwrap();
    let positions: Vec<u32> = (0..keys.len() as u32).collect();
    let part = stack.store.fill(&reserved, &positions, &blocks).unwrap();
    stack.write_all(&part).unwrap();
    (reserved, part)
}

fn end(stack: &Stack, part: &StoreRequest) -> Result<(), StoreError> {
    let done = stack.store.end(&[part.ticket(Layer(0)).job]).unwrap().remove(0);
    done.failure.map_or(Ok(()), Err)
}

/// An operation that makes something permanent, and fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The flush of a commit.
    Commit,
    /// The flush at the end of requests that fill a reservation.
    End,
    /// A write of the journal.
    Journal,
}

#[test]
fn after_one_failure_no_way_to_store_is_acknowledged_and_no_device_is_asked_again() {
    for way in [Way::Commit, Way::End, Way::Journal] {
        let (shelf, mut stack) = Shelf::made(2, SHAPE, &StoreOptions::default());
        let old = keys(0..4);
        stack.put(&old, 0);
        let (filled, part) = fill(&mut stack, &keys(10..14), 10);
        end(&stack, &part).unwrap();
        let (_reserved, late) = fill(&mut stack, &keys(14..18), 14);
        let saves = [20, 24].map(|first| {
            let save = stack.begin(&keys(first..first + 4), first);
            stack.write_all(&save).unwrap();
            save
        });
        stack.store.check_writable().unwrap();
        match way {
            Way::Journal => break_journal(&stack),
            Way::Commit | Way::End => break_flush(&stack.emus[1]),
        }
        let [first, second] = saves;
        if way == Way::End {
            refused(end(&stack, &late));
        } else {
            refused(stack.store.commit(first));
        }
        stack.faults(None);
        let before = flushes(&stack.emus);
        refused(stack.store.check_writable());
        refused(stack.store.commit(second));
        if way != Way::End {
            refused(end(&stack, &late));
        }
        refused(stack.store.commit_reservation(&filled));
        refused(stack.store.sync_journal());
        refused(stack.store.reserve(&keys(30..31)).map(drop));
        assert_eq!(flushes(&stack.emus), before, "{way:?}: a device was asked again");
        let is_found =
            |stack: &Stack| (10..28).any(|key| stack.store.peek(&keys(key..key + 1)) == 1);
        assert!(!is_found(&stack), "{way:?}");
        assert_eq!(stack.get(&old, 30), 4, "{way:?}: what is stored can be retrieved");
        drop((filled, part, late));
        refused(stack.store.clone().close().map(drop));
        assert_eq!(flushes(&stack.emus), before, "{way:?}: a device was asked again");
        crash(stack);
        let mut stack = shelf.open(&StoreOptions::default());
        assert_eq!(stack.get(&old, 30), 4);
        assert!(!is_found(&stack), "{way:?}");
    }
}

#[test]
fn what_the_journal_did_not_take_is_not_found() {
    let (_shelf, mut stack) = Shelf::made(2, SHAPE, &StoreOptions::default());
    let (old, a) = (keys(0..4), keys(10..14));
    stack.put(&old, 0);
    stack.store.sync_journal().unwrap();
    let save = stack.begin(&a, 0);
    stack.write_all(&save).unwrap();
    break_journal(&stack);
    refused(stack.store.commit(save));
    stack.faults(None);
    assert_eq!(stack.store.peek(&a), 0);
    assert_eq!(stack.get(&old, 20), 4);
}

#[test]
fn a_store_that_takes_no_writes_changes_nothing() {
    let (_shelf, mut stack) = Shelf::made(1, SHAPE, &StoreOptions::default());
    let other = Namespace { adapter: "other".to_owned(), ..Namespace::default() };
    stack.store.within(&other).unwrap();
    let a = keys(0..4);
    stack.put(&a, 0);
    break_flush(&stack.emus[0]);
    let save = stack.begin(&keys(10..11), 10);
    stack.write_all(&save).unwrap();
    refused(stack.store.commit(save));
    let store = stack.store.clone();
    refused(store.remove(&a));
    refused(store.clear());
    refused(store.bump_epoch());
    refused(store.set_quota(Some(1)));
    refused(store.set_weight(2));
    refused(store.evict(1));
    let new = Namespace { adapter: "new".to_owned(), ..Namespace::default() };
    refused(store.within(&new).map(drop));
    // Stored blocks can still be used.
    let usage = store.usage().unwrap();
    assert_eq!((usage.epoch, usage.quota_files), (0, None));
    assert_eq!(store.within(&other).unwrap().peek(&a), 0);
    assert_eq!(stack.get(&a, 20), 4);
}

/// The driver resets a drive that lost its power, although nothing that the store waited for
/// failed.
#[test]
fn what_a_drive_forgot_behind_the_stores_back_is_not_committed() {
    let mut shelf = Shelf::new(2, SHAPE);
    shelf.format.group = Some(8);
    shelf.make();
    let mut stack = shelf.open(&StoreOptions::default());
    let (old, a) = (keys(0..32), keys(100..108));
    stack.put(&old, 0);
    let save = stack.begin(&a, 32);
    stack.write_all(&save).unwrap();
    break_device(&stack.emus[1], on(DSM, FaultAction::PowerLoss).limit(1));
    stack.store.remove(&old).unwrap();
    stack.store.sync_journal().unwrap();
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.deallocations_failed, stats.plane.recoveries), (1, 0), "nobody noticed");
    let error = stack.store.commit(save).unwrap_err();
    assert!(matches!(error, StoreError::Forgotten), "{error}");
    assert_eq!(stack.store.peek(&a), 0);
    // The first use of the dead queues triggers a recovery.
    let save = stack.begin(&a, 32);
    let _ = stack.write_all(&save);
    let _ = stack.store.commit(save);
    assert_eq!(stack.put(&a, 32), 8, "it can be stored again");
    crash(stack);
    let mut stack = shelf.open(&StoreOptions::default());
    assert_eq!((stack.get(&a, 0), stack.store.peek(&old)), (8, 0));
}

#[test]
fn a_medium_that_was_reset_before_its_flush_says_so() {
    let powered = Shelf::new(1, SHAPE).power_on();
    let mut medium = Store::media(&powered.devices).unwrap().remove(0).io;
    let page = [7; 4096];
    for (fua, wanted) in [(true, true), (false, false)] {
        medium.write(0, &page, fua).unwrap();
        medium.flush().unwrap();
        medium.write(4096, &page, fua).unwrap();
        powered.devices[0].controller.lock().reset().unwrap();
        medium.write(8192, &page, fua).unwrap();
        let flushed = medium.flush();
        assert_eq!(flushed.is_ok(), wanted, "{flushed:?}");
    }
}
