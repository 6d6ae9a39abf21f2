//! A store in a directory with failures below it: no wrong data is served, the message explains the
//! failure, and the next opening finds all committed blocks. Failures visible from outside of a
//! process, such as a full disk: tools/tests/failures.rs. All others: objstore/tests/faults.rs.

#[path = "../../tests/stack/mod.rs"]
mod stack;

use std::path::Path;

use nvme_driver::{ControllerOptions, Nanos};
use nvme_emu::{EmuDomain, FaultPlan, FaultRule, LbaRange, SimClock};
use objstore::{
    Format, KvShape, Namespace, PolicyKind, Store, StoreConfig, StoreDevice, StoreError, StoreId,
    StoreOptions,
};
use rand::{TryRngCore as _, rngs::OsRng};
use ripieno_stack::{Executor, StoreDir, StoreDirMedia, StoreDirOptions};
use ripieno_testkit::{Drives, KvMemory};
use stack::{READ, READ_ERROR, Stack, WRITE, WRITE_FAULT, blocks, keys, on};

const SHAPE: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 4096, block_tokens: 16 };
const MIB: u64 = 1 << 20;
/// Time after which a command hangs, on any machine: beside four busy loops a write took 5 s.
const WATCHDOG: Nanos = Nanos::from_millis(600_000);

/// A store in a directory, and the controllers for fault injection. Dropped in this order.
struct Open {
    stack: Stack,
    _drives: Drives,
    _store_dir: StoreDir,
}

impl Open {
    /// Opens the store; formats the store directory's devices first if `format` is given.
    fn new(
        mut store_dir: StoreDir,
        format: Option<&Format>,
        command_timeout: Nanos,
    ) -> Result<Self, StoreError> {
        let domain = EmuDomain::new("store");
        let drives = Drives::threaded(domain.clone(), store_dir.controllers().unwrap().0);
        let (clock, controllers) =
            (drives.clock.clone(), drives.attach(&ControllerOptions::default()));
        let devices: Vec<StoreDevice> = controllers.into_iter().map(StoreDevice::new).collect();
        if let Some(format) = format {
            Store::format(&devices, format)?;
            store_dir.set_ready().unwrap();
        }
        let kv = KvMemory::new(&*domain, SHAPE, 64);
        let store = Store::open(StoreConfig {
            devices,
            executor: Executor::Host.factory(&clock, None),
            clock,
            shape: SHAPE,
            namespace: Namespace::default(),
            pool: kv.pool.clone(),
            gpu: None,
            options: StoreOptions {
                policy: PolicyKind::Lru,
                command_timeout,
                ..StoreOptions::default()
            },
        })?;
        let emus = drives.emus.clone();
        // The store has a real clock: this one is unused.
        let stack = Stack { store, shape: SHAPE, kv, domain, emus, clock: SimClock::new(1) };
        Ok(Self { stack, _drives: drives, _store_dir: store_dir })
    }

    fn made(dir: &Path, files: Option<u64>) -> Self {
        Self::made_with(dir, files, WATCHDOG)
    }

    fn made_with(dir: &Path, files: Option<u64>, command_timeout: Nanos) -> Self {
        let media = StoreDirMedia::Files { count: 2, bytes: 32 * MIB };
        let id = OsRng.try_next_u64().unwrap();
        let store_dir =
            StoreDir::create(dir, &StoreDirOptions { id, media, lba_bytes: 4096 }).unwrap();
        let mut store = [0; 16];
        OsRng.try_fill_bytes(&mut store).unwrap();
        let capacity_bytes = files.map(|files| files * SHAPE.block_bytes());
        let format = Format { capacity_bytes, ..Format::new(StoreId(store), SHAPE) };
        Self::new(store_dir, Some(&format), command_timeout).unwrap()
    }

    fn again(dir: &Path) -> Self {
        Self::new(StoreDir::open(dir).unwrap(), None, WATCHDOG).unwrap()
    }

    /// Makes the second device fail like this, in the data area.
    fn fail(&self, opcode: u8, then: nvme_emu::FaultAction) {
        let mut rule: FaultRule = on(opcode, then);
        rule.when.lbas = Some(LbaRange { first: self.stack.data_lba(), count: u64::MAX >> 1 });
        self.stack.emus[1].set_faults(FaultPlan { rules: vec![rule], ..FaultPlan::default() });
    }

    fn heal(&self) {
        self.stack.faults(None);
    }
}

#[test]
fn a_device_that_fails_in_the_middle_gives_misses_and_says_so() {
    let place = tempfile::tempdir().unwrap();
    let mut open = Open::made(place.path(), None);
    let (a, b) = (keys(0..10), keys(20..24));
    assert_eq!(open.stack.put(&a, 0), 10);
    open.fail(READ, READ_ERROR);
    let mut errors = 0;
    while open.stack.store.peek(&a) > 0 {
        let prefix = open.stack.store.lookup(&a).unwrap();
        let error = open.stack.read(&prefix, 20).unwrap_err();
        assert!(matches!(error, StoreError::Transfer { .. }), "{error}");
        assert!(error.to_string().contains("Unrecovered Read Error"), "{error}");
        errors += 1;
        assert!(errors <= 10, "what cannot be read is found again and again");
    }
    open.fail(WRITE, WRITE_FAULT);
    let save = open.stack.begin(&b, 0);
    assert!(open.stack.write_all(&save).is_err());
    let error = open.stack.store.commit(save).unwrap_err();
    assert!(error.to_string().contains("Write Fault"), "{error}");
    assert_eq!(open.stack.store.peek(&b), 0, "nothing half-written is visible");
    open.heal();
    assert_eq!(open.stack.put(&a[1..6], 0), 5);
    assert_eq!(open.stack.get(&a[1..], 20), 5);
    open.stack.store.clone().close().unwrap();
    drop(open);
    let mut again = Open::again(place.path());
    assert_eq!(again.stack.get(&a[1..], 20), 5);
    let misses = keys(0..1).into_iter().chain(keys(6..10)).chain(b);
    assert!(
        misses.into_iter().all(|key| again.stack.store.peek(&[key]) == 0),
        "what was lost stays so"
    );
}

#[test]
fn a_device_that_disappears_ends_the_store_and_takes_nothing_with_it() {
    let place = tempfile::tempdir().unwrap();
    // As long as a device that has disappeared is waited for.
    let mut open = Open::made_with(place.path(), None, Nanos::from_millis(20_000));
    let (a, b) = (keys(0..10), keys(20..24));
    assert_eq!(open.stack.put(&a, 0), 10);
    let save = open.stack.begin(&b, 20);
    open.stack.emus[1].unplug();
    open.stack.write_all(&save).unwrap_err();
    let error = open.stack.store.lookup(&a).unwrap_err().to_string();
    assert!(error.contains("device-1.img") && error.contains("has to be opened anew"), "{error}");
    assert!(open.stack.store.commit(save).is_err());
    assert!(open.stack.store.clone().close().is_err());
    drop(open);
    let mut again = Open::again(place.path());
    assert_eq!((again.stack.get(&a, 20), again.stack.get(&b, 40)), (10, 0));
    assert_eq!(again.stack.put(&b, 0), 4);
}

#[test]
fn a_full_store_evicts_what_it_may_and_keeps_what_is_used() {
    let place = tempfile::tempdir().unwrap();
    let mut open = Open::made(place.path(), Some(16));
    let files = open.stack.store.stats().unwrap().files.files;
    let all = keys(0..files);
    for part in all.chunks(16) {
        assert_eq!(open.stack.put(part, 0), part.len());
    }
    let fresh = keys(1000..1004);
    assert_eq!(open.stack.put(&fresh, 0), 4, "the oldest go");
    assert_eq!(open.stack.store.stats().unwrap().files.stored, files);
    let kept: Vec<_> =
        all.iter().copied().filter(|key| open.stack.store.peek(&[*key]) == 1).collect();
    let used = kept.iter().chain(&fresh).map(|key| open.stack.store.lookup(&[*key]).unwrap());
    let used: Vec<_> = used.collect();
    let save = open.stack.store.allocate(&keys(2000..2004), &blocks(0, 4)).unwrap();
    assert_eq!((save.accepted(), save.written()), (0, 0), "there is no room, and it says so");
    drop((save, used));
    open.stack.store.sync_journal().unwrap();
    drop(open);
    let mut again = Open::again(place.path());
    for key in kept.iter().chain(&fresh) {
        assert_eq!(again.stack.get(&[*key], 20), 1);
    }
    assert_eq!(again.stack.store.stats().unwrap().files.stored, files);
    assert_eq!(again.stack.put(&keys(2000..2004), 0), 4);
}

#[test]
fn a_full_journal_is_written_anew_and_loses_nothing() {
    let place = tempfile::tempdir().unwrap();
    let mut open = Open::made(place.path(), Some(16));
    let half = open.stack.store.superblock().journal.unwrap().half_bytes;
    let (a, b) = (keys(0..4), keys(10..14));
    assert_eq!((open.stack.put(&a, 0), open.stack.put(&b, 0)), (4, 4));
    let mut rounds = 0;
    while open.stack.store.stats().unwrap().journal_bytes < 6 * half {
        rounds += 1;
        open.stack.store.set_weight(rounds).unwrap();
        open.stack.store.sync_journal().unwrap();
        assert!(rounds < 20_000, "the journal is not written");
    }
    // Without closing it.
    drop(open);
    let mut again = Open::again(place.path());
    assert_eq!((again.stack.get(&a, 20), again.stack.get(&b, 20)), (4, 4));
    assert_eq!(again.stack.store.usage().unwrap().weight, rounds);
}
