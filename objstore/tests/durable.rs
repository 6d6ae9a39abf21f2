//! Durability of a store: committed blocks are there after reopening, tenants stay apart, and
//! devices that are not the store's are refused by name. `cargo xtask crash` crashes at every
//! point.

use crate::stack;

use std::sync::Arc;

use nvme_driver::{Controller, ControllerOptions};
use nvme_emu::{EmuConfig, EmuDomain, FaultAction, MemoryMedia, SimClock};
use objstore::{
    BlockId, Format, KvShape, KvView, Namespace, Overwrite, Row, Store, StoreConfig, StoreDevice,
    StoreError, StoreOptions,
};
use ripieno_testkit::{Drives, KvMemory, format, inline_executor};
use stack::{Plan, Stack, WRITE, WRITE_FAULT, blocks, keys, on};

const SHAPE: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 4096, block_tokens: 16 };

/// Devices that outlive the stores on them.
struct Shelf {
    bytes: Vec<MemoryMedia>,
}

impl Shelf {
    fn new(devices: usize, bytes: u64) -> Self {
        Self { bytes: (0..devices).map(|_| MemoryMedia::new(bytes).unwrap()).collect() }
    }

    /// Powers devices up, by their numbers; `empty` stands for a new, blank one.
    fn devices(&self, order: &[usize]) -> (Vec<StoreDevice>, Arc<EmuDomain>, Arc<SimClock>) {
        let clock = SimClock::new(1);
        let config = |number: &usize| {
            let media = match self.bytes.get(*number) {
                Some(bytes) => bytes.clone(),
                None => MemoryMedia::new(64 << 20).unwrap(),
            };
            EmuConfig::new(format!("drive{number}")).namespace(media, 4096)
        };
        let configs = order.iter().map(config).collect();
        let drives = Drives::simulated(EmuDomain::new("shelf"), configs, &clock);
        let attach =
            |bus| Controller::attach(bus, clock.clone(), ControllerOptions::default()).unwrap();
        let devices = drives.buses().into_iter().map(attach).map(StoreDevice::new).collect();
        (devices, drives.domain, clock)
    }

    fn open_as(&self, order: &[usize], shape: KvShape) -> Result<Stack, StoreError> {
        let (devices, domain, clock) = self.devices(order);
        let kv = KvMemory::new(&*domain, shape, 64);
        let store = Store::open(StoreConfig {
            devices,
            clock: clock.clone(),
            executor: inline_executor(clock.clone()),
            shape,
            namespace: Namespace::default(),
            pool: kv.pool.clone(),
            gpu: None,
            options: StoreOptions { virtual_time: true, ..StoreOptions::default() },
        })?;
        Ok(Stack { store, shape, kv, domain, emus: Vec::new(), clock })
    }

    fn open(&self) -> Stack {
        let all: Vec<usize> = (0..self.bytes.len()).collect();
        self.open_as(&all, SHAPE).unwrap()
    }

    fn format(&self, format: &Format) -> Result<(), StoreError> {
        let all: Vec<usize> = (0..self.bytes.len()).collect();
        Store::format(&self.devices(&all).0, format)
    }

    fn refused(&self, order: &[usize]) -> String {
        self.open_as(order, SHAPE).err().expect("it is refused").to_string()
    }
}

#[test]
fn what_was_committed_is_there_again_however_the_store_ended() {
    let shelf = Shelf::new(2, 64 << 20);
    shelf.format(&format(SHAPE)).unwrap();
    let (a, b, c) = (keys(0..6), keys(10..13), keys(20..24));
    let mut stack = shelf.open();
    stack.put(&a, 0);
    stack.put(&c, 0);
    stack.store.remove(&c[1..]).unwrap();
    stack.store.close().unwrap();
    let mut stack = shelf.open();
    assert_eq!(stack.get(&a, 20), 6);
    assert_eq!(stack.get(&c, 20), 1, "what was removed stays removed");
    stack.put(&b, 0);
    // A process that ends without closing anything.
    drop(stack);
    let mut stack = shelf.open();
    assert_eq!((stack.get(&a, 20), stack.get(&b, 20)), (6, 3));
    assert_eq!(stack.store.evict(u32::MAX).unwrap(), 10);
}

#[test]
fn tenants_with_equal_tokens_never_share() {
    let shelf = Shelf::new(1, 64 << 20);
    shelf.format(&format(SHAPE)).unwrap();
    let mut stack = shelf.open();
    let other = Namespace { tenant_salt: b"other".to_vec(), ..Namespace::default() };
    let keys = keys(0..4);
    stack.put(&keys, 0);
    let theirs = stack.store.within(&other).unwrap();
    assert_eq!(theirs.peek(&keys), 0);
    assert!(theirs.lookup(&keys).unwrap().is_empty());
    let mine = std::mem::replace(&mut stack.store, theirs.clone());
    stack.put(&keys[..2], 0);
    assert_eq!((mine.peek(&keys), theirs.peek(&keys)), (4, 2));
    assert_eq!(mine.remove(&keys[..1]).unwrap(), 1);
    assert_eq!((mine.peek(&keys), theirs.peek(&keys)), (0, 2));
    // A new epoch of one tenant does not affect the other.
    assert_eq!(theirs.bump_epoch().unwrap(), 1);
    assert_eq!((mine.peek(&keys[1..]), theirs.peek(&keys)), (3, 0));
    mine.sync_journal().unwrap();
    drop((stack, mine, theirs));
    let stack = shelf.open();
    let theirs = stack.store.within(&other).unwrap();
    assert_eq!((stack.store.peek(&keys[1..]), theirs.peek(&keys)), (3, 0));
    assert_eq!(theirs.usage().unwrap().epoch, 1);
}

#[test]
fn a_quota_holds_to_the_file() {
    let shelf = Shelf::new(1, 64 << 20);
    shelf.format(&format(SHAPE)).unwrap();
    let mut stack = shelf.open();
    stack.put(&keys(0..10), 0);
    let limited = Namespace { adapter: "limited".to_owned(), ..Namespace::default() };
    let limited = stack.store.within(&limited).unwrap();
    limited.set_quota(Some(5)).unwrap();
    let all = std::mem::replace(&mut stack.store, limited.clone());
    for round in 0..4 {
        stack.put(&keys(round * 4..round * 4 + 4), 0);
        let usage = limited.usage().unwrap();
        assert!(usage.stored + usage.writing + usage.doomed <= 5, "{usage:?}");
    }
    assert_eq!(limited.usage().unwrap().stored, 5);
    assert_eq!(all.peek(&keys(0..10)), 10, "it took nothing from others");
    drop((stack, limited, all));
    let stack = shelf.open();
    let limited = Namespace { adapter: "limited".to_owned(), ..Namespace::default() };
    assert_eq!(stack.store.within(&limited).unwrap().usage().unwrap().quota_files, Some(5));
}

/// A store outlives any number of models, adapters and tenants.
#[test]
fn namespaces_come_and_go() {
    let shelf = Shelf::new(1, 64 << 20);
    shelf.format(&Format { namespaces_max: 3, ..format(SHAPE) }).unwrap();
    let named = |number: u32| Namespace { adapter: number.to_string(), ..Namespace::default() };
    let keys = keys(0..4);
    let mut stack = shelf.open();
    let mut own = stack.store.clone();
    // Blocks of this one stay; those of the others are removed or evicted.
    stack.store = own.within(&named(0)).unwrap();
    assert_eq!(stack.put(&keys, 0), 4);
    let id = stack.store.namespace();
    for number in 1..20 {
        stack.store = own.clone();
        stack.store = own.within(&named(number)).unwrap();
        assert_eq!((stack.store.peek(&keys), stack.store.usage().unwrap().epoch), (0, 0));
        assert_eq!(stack.put(&keys, 0), 4);
        match number % 3 {
            0 => stack.store.clear().unwrap(),
            1 => _ = stack.store.bump_epoch().unwrap(),
            _ => assert_eq!(stack.store.evict(4).unwrap(), 4),
        }
        if number % 4 == 0 {
            own.sync_journal().unwrap();
            // A process that ends without closing anything.
            drop((stack, own));
            stack = shelf.open();
            own = stack.store.clone();
            assert_eq!(own.within(&named(number)).unwrap().peek(&keys), 0);
            assert_eq!(own.within(&named(0)).unwrap().namespace(), id);
        }
    }
    let last = stack.store;
    stack.store = own.within(&named(0)).unwrap();
    let error = own.within(&named(20)).unwrap_err().to_string();
    assert!(error.contains("each of the 3 that the store was formatted for"), "{error}");
    assert_eq!(stack.get(&keys, 20), 4);
    let number = last.namespace();
    drop(last);
    assert_eq!(own.within(&named(20)).unwrap().peek(&keys), 0);
    let error = own.in_namespace(number).unwrap_err().to_string();
    assert!(error.contains("is unknown"), "{error}");
}

/// One request that fills the whole store, repeatedly: more records in a batch than the journal has
/// room for without a compaction.
#[test]
fn a_journal_takes_bursts_as_large_as_the_store() {
    let shape = KvShape { layers: 1, segments: 1, object_bytes: 512, block_tokens: 16 };
    let clock = SimClock::new(1);
    let config = EmuConfig::new("drive0").namespace(MemoryMedia::new(64 << 20).unwrap(), 512);
    let drives = Drives::simulated(EmuDomain::new("burst"), vec![config], &clock);
    let devices = drives.attach(&ControllerOptions::default());
    let kv = KvMemory::new(&*drives.domain, shape, 2000);
    let config = StoreConfig {
        devices: devices.into_iter().map(StoreDevice::new).collect(),
        clock: clock.clone(),
        executor: inline_executor(clock.clone()),
        shape,
        namespace: Namespace::default(),
        pool: kv.pool.clone(),
        gpu: None,
        options: StoreOptions { virtual_time: true, ..StoreOptions::default() },
    };
    let capacity_bytes = Some(2000 * 512);
    let format = Format { namespaces_max: 2, capacity_bytes, ..format(shape) };
    let store = Store::create(config, &format).unwrap();
    let mut stack = Stack { store, shape, kv, domain: drives.domain, emus: Vec::new(), clock };
    for round in 0..12 {
        let keys = keys(round * 2000..(round + 1) * 2000);
        assert_eq!(stack.put(&keys, 0), 2000, "round {round}");
    }
}

#[test]
fn devices_that_are_not_the_stores_are_refused_by_name() {
    let shelf = Shelf::new(3, 64 << 20);
    assert!(shelf.refused(&[0, 1, 2]).contains("drive0: there is no store on it"));
    shelf.format(&format(SHAPE)).unwrap();
    let stranger = 7;
    for (order, wanted) in [
        (&[0, 1][..], "device 2 of the 3 of rank 0 is missing"),
        (&[1, 0, 2], "the order is drive0, drive1, drive2"),
        (&[0, 1, stranger], "drive7: there is no store on it"),
        (&[0, 0, 2], "drive0"),
    ] {
        let refused = shelf.refused(order);
        assert!(refused.contains(wanted), "{order:?}: {refused}");
    }
    let shape = KvShape { layers: 3, ..SHAPE };
    let error = shelf.open_as(&[0, 1, 2], shape).err().unwrap().to_string();
    assert!(error.contains("another shape (2 layers"), "{error}");
    // One device is replaced by that of another store.
    let other = Shelf { bytes: vec![shelf.bytes[1].clone()] };
    let mut one = format(SHAPE);
    one.overwrite = Overwrite::Nothing;
    let error = other.format(&one).unwrap_err();
    assert!(
        matches!(&error, StoreError::Occupied { what, .. } if what.contains("store")),
        "{error}"
    );
    one.overwrite = Overwrite::Store;
    other.format(&one).unwrap();
    let refused = shelf.refused(&[0, 1, 2]);
    assert!(refused.contains("belongs to store"), "{refused}");
}

#[test]
fn somebody_elses_data_is_not_overwritten_unless_told() {
    let shelf = Shelf::new(1, 64 << 20);
    // An ext4 superblock's magic number.
    shelf.bytes[0].poke(1024 + 0x38, &[0x53, 0xEF]).unwrap();
    let mut format = format(SHAPE);
    for overwrite in [Overwrite::Nothing, Overwrite::Store] {
        format.overwrite = overwrite;
        let error = shelf.format(&format).unwrap_err();
        assert!(matches!(error, StoreError::Occupied { .. }), "{error}");
        assert!(error.to_string().contains("ext"), "{error}");
    }
    format.overwrite = Overwrite::Anything;
    shelf.format(&format).unwrap();
    shelf.open();
}

#[test]
fn after_a_failed_journal_write_nothing_is_stored_and_everything_is_still_found() {
    let mut stack = Stack::new(&Plan::default());
    let (a, b) = (keys(0..4), keys(10..12));
    stack.put(&a, 0);
    // Writes below the data region are the journal's.
    let mut rule = on(WRITE, WRITE_FAULT);
    rule.when.lbas = Some(nvme_emu::LbaRange { first: 0, count: stack.data_lba() });
    stack.faults(Some(rule));
    stack.store.check_writable().unwrap();
    let save = stack.begin(&b, 10);
    stack.write_all(&save).unwrap();
    let error = stack.store.commit(save).unwrap_err();
    assert!(matches!(error, StoreError::JournalFailed { .. }), "{error}");
    assert!(error.to_string().contains("Write Fault"), "{error}");
    stack.faults(None);
    let error = stack.store.allocate(&keys(20..21), &blocks(0, 1)).unwrap_err();
    assert!(matches!(error, StoreError::JournalFailed { .. }), "{error}");
    let error = stack.store.check_writable().unwrap_err();
    assert!(matches!(error, StoreError::JournalFailed { .. }), "{error}");
    assert_eq!(stack.get(&a, 20), 4);
}

/// A drive that loses its volatile cache between write and flush: none of that data is committed.
#[test]
fn what_a_drive_forgot_before_its_flush_is_not_committed() {
    let mut stack = Stack::new(&Plan { volatile_cache: true, ..Plan::default() });
    let (a, b) = (keys(0..4), keys(10..14));
    stack.put(&a, 0);
    let save = stack.begin(&b, 10);
    stack.write_all(&save).unwrap();
    stack.faults(Some(on(stack::READ, FaultAction::PowerLoss).limit(1)));
    let prefix = stack.store.lookup(&a).unwrap();
    stack.read(&prefix, 30).unwrap();
    assert!(stack.store.stats().unwrap().plane.recoveries >= 1, "the power was lost");
    stack.faults(None);
    let error = stack.store.commit(save).unwrap_err();
    assert!(matches!(error, StoreError::Forgotten), "{error}");
    assert_eq!(stack.store.peek(&b), 0);
    assert_eq!(stack.put(&b, 10), 4, "it can be stored again");
    assert_eq!(stack.get(&b, 40), 4);
}

/// An engine that reads K of its last layer at the address that it registered for V.
struct Shifted<'a>(&'a mut KvMemory);

impl KvView for Shifted<'_> {
    fn read(&mut self, block: BlockId, row: Row, into: &mut [u8]) -> Result<(), String> {
        self.0.read(block, if row.0 >= 4 { Row(row.0 ^ 1) } else { row }, into);
        Ok(())
    }

    fn write(&mut self, block: BlockId, row: Row, from: &[u8]) -> Result<(), String> {
        self.0.write(block, row, from);
        Ok(())
    }
}

#[test]
fn a_layout_that_is_not_the_engines_fails_the_self_test() {
    let mut stack = Stack::new(&Plan::default());
    let store = stack.store.clone();
    store.plane().self_test(None).unwrap();
    let error = store.plane().self_test(Some(&mut Shifted(&mut stack.kv))).unwrap_err();
    assert!(
        matches!(error, StoreError::SelfTest { layer, segment: 0, offset: 0, .. }
        if layer.0 == 2),
        "{error}"
    );
}

/// An engine whose memory can no longer be read, as on a GPU that is lost.
struct Unreadable;

impl KvView for Unreadable {
    fn read(&mut self, _: BlockId, row: Row, _: &mut [u8]) -> Result<(), String> {
        if row.0 == 5 { Err("the GPU is lost".to_owned()) } else { Ok(()) }
    }

    fn write(&mut self, _: BlockId, _: Row, _: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// It is a failure of the machine, not of the configuration.
#[test]
fn memory_that_cannot_be_read_fails_the_self_test() {
    let stack = Stack::new(&Plan::default());
    let error = stack.store.plane().self_test(Some(&mut Unreadable)).unwrap_err();
    assert!(
        matches!(&error, StoreError::SelfTest { layer, segment: 1, offset: 0, why }
        if layer.0 == 2 && why.contains("cannot be read: the GPU is lost")),
        "{error}"
    );
}
