//! One namespace behind two controllers: one process at a time has the store on it.

use crate::stack;

use std::sync::{Arc, Mutex};

use kv_catalog::Sighting;
use nvme_driver::{Clock, ControllerOptions, Nanos};
use nvme_emu::{
    EmuConfig, EmuDomain, FaultPlan, IdentifyOverrides, IdentifyPatch, MemoryMedia, SimClock,
};
use objstore::{
    Format, KvShape, Layer, Medium, Namespace, Overwrite, Owner, Part, Store, StoreConfig,
    StoreDevice, StoreError, StoreOptions, open_catalog,
};
use ripieno_testkit::{Drives, KvMemory, format, inline_executor};
use stack::{Stack, keys};

const SHAPE: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 4096, block_tokens: 16 };
const TIMEOUT: Nanos = Nanos::from_millis(3_000);

/// Configures a controller of a subsystem that has more of them (CMIC, NMIC).
fn shared(id: &str, media: &MemoryMedia) -> EmuConfig {
    let patch = |cns, offset, byte| IdentifyPatch { cns, offset, bytes: vec![byte] };
    let patches = vec![patch(1, 76, 2), patch(0, 30, 1)];
    let identify = IdentifyOverrides { patches, ..Default::default() };
    let config = EmuConfig { serial: "SUB".into(), ..EmuConfig::new(id) };
    config.namespace(media.clone(), 4096).faults(FaultPlan { identify, ..FaultPlan::default() })
}

fn owner(number: u8) -> Owner {
    Owner { id: [number; 16], host: "here".into(), pid: number.into(), since: 0 }
}

/// Opens the store through a controller of its own, in virtual time: nothing shows that the process
/// is alive while it does nothing, as if it were stopped.
fn open(media: &MemoryMedia, number: u8) -> Result<Stack, StoreError> {
    open_with(media, options(number), |clock| clock)
}

fn options(number: u8) -> StoreOptions {
    StoreOptions {
        virtual_time: true,
        owner: owner(number),
        owner_timeout: TIMEOUT,
        ..StoreOptions::default()
    }
}

/// Same, with these options, and a clock over the one of the controllers.
fn open_with<C: Clock + 'static>(
    media: &MemoryMedia,
    options: StoreOptions,
    over: impl FnOnce(Arc<SimClock>) -> Arc<C>,
) -> Result<Stack, StoreError> {
    let number = options.owner.id[0];
    let clock = SimClock::new(number.into());
    let configs = vec![shared(&format!("path{number}"), media)];
    let drives = Drives::simulated(EmuDomain::new("twin"), configs, &clock);
    let (mut config, kv) = config(&drives, inline_executor(clock.clone()), options);
    config.clock = over(clock.clone());
    let store = Store::open(config)?;
    Ok(Stack { store, shape: SHAPE, kv, domain: drives.domain, emus: drives.emus, clock })
}

/// A clock that has another process claim the device as soon as this one has.
#[derive(Debug)]
struct Rival {
    clock: Arc<SimClock>,
    device: Mutex<Medium>,
}

impl Clock for Rival {
    fn now(&self) -> Nanos {
        self.clock.now()
    }

    fn pause(&self, idle: u32, until: Nanos) {
        let io = &mut *self.device.lock().unwrap().io;
        if Sighting::take(io).unwrap().owner == Some(owner(1)) {
            owner(2).claim(io).unwrap();
        }
        self.clock.pause(idle, until);
    }
}

fn config(
    drives: &Drives,
    executor: objstore::ExecutorFactory,
    options: StoreOptions,
) -> (StoreConfig, KvMemory) {
    let kv = KvMemory::new(&*drives.domain, SHAPE, 64);
    let controllers = drives.attach(&ControllerOptions::default());
    let config = StoreConfig {
        devices: controllers.into_iter().map(StoreDevice::new).collect(),
        clock: drives.clock.clone(),
        executor,
        shape: SHAPE,
        namespace: Namespace::default(),
        pool: kv.pool.clone(),
        gpu: None,
        options,
    };
    (config, kv)
}

fn devices(configs: Vec<EmuConfig>) -> (Vec<StoreDevice>, Arc<SimClock>) {
    let clock = SimClock::new(9);
    let drives = Drives::simulated(EmuDomain::new("tools"), configs, &clock);
    let controllers = drives.attach(&ControllerOptions::default());
    (controllers.into_iter().map(StoreDevice::new).collect(), clock)
}

fn formatted() -> MemoryMedia {
    let media = MemoryMedia::new(64 << 20).unwrap();
    Store::format(&devices(vec![shared("path0", &media)]).0, &format(SHAPE)).unwrap();
    media
}

/// Blocks that the older one was told to be stored are found. When it comes back it moves nothing,
/// stores nothing, and says who has the store.
#[test]
fn an_owner_that_was_stopped_finds_another_one_in_its_place() {
    let media = formatted();
    let mut older = open(&media, 1).unwrap();
    older.put(&keys(0..10), 0);
    let begun = older.begin(&keys(10..15), 20);
    // Stored, but not committed.
    older.write_all(&begun).unwrap();
    let mut newer = open(&media, 2).unwrap();
    assert_eq!(newer.get(&keys(0..10), 0), 10);
    assert_eq!(newer.put(&keys(15..20), 0), 5);
    let told = |error: StoreError| {
        let error = error.to_string();
        assert!(error.contains("process 2 on here, since 1970-01-01"), "{error}");
    };
    told(older.store.commit(begun).unwrap_err());
    let prefix = older.store.lookup(&keys(0..10)).unwrap();
    // It was stopped for longer than anybody waits.
    nvme_driver::wait_until(&*older.clock, older.clock.now() + TIMEOUT, || false);
    told(older.read(&prefix, 0).unwrap_err());
    drop(prefix);
    assert!(older.store.close().is_err());
    assert_eq!(newer.put(&keys(20..25), 0), 5);
    newer.store.close().unwrap();
    let mut again = open(&media, 3).unwrap();
    for (range, count) in [(0..10, 10), (10..15, 0), (15..20, 5), (20..25, 5)] {
        assert_eq!(again.get(&keys(range.clone()), 0), count, "keys {range:?}");
    }
}

/// The files that it writes to may be another one's by then.
#[test]
fn what_an_owner_wrote_that_was_stopped_is_not_stored() {
    let media = formatted();
    let mut older = open(&media, 1).unwrap();
    let reservation = older.store.reserve(&keys(0..5)).unwrap();
    let blocks = stack::blocks(0, 5);
    let save = older.store.fill(&reservation, &[0, 1, 2, 3, 4], &blocks).unwrap();
    older.write_all(&save).unwrap();
    let newer = open(&media, 2).unwrap();
    // No layer is started, and the journal is not written, after this.
    nvme_driver::wait_until(&*older.clock, older.clock.now() + TIMEOUT, || false);
    let done = older.store.end(&[save.ticket(Layer(0)).job]).unwrap();
    let failure = done[0].failure.as_ref().unwrap().to_string();
    assert!(failure.contains("process 2 on here"), "{failure}");
    newer.store.close().unwrap();
}

/// A dead owner keeps nobody out for longer than the timeout, and one that closed its store, or
/// whose opening failed, not even as long.
#[test]
fn who_comes_next_waits_only_for_the_dead() {
    let media = formatted();
    let waited = |stack: &Stack| stack.clock.now();
    let first = open(&media, 1).unwrap();
    assert!(waited(&first) < TIMEOUT);
    // As if its process were killed.
    std::mem::forget(first);
    let second = open(&media, 2).unwrap();
    assert!(waited(&second) > TIMEOUT && waited(&second) < TIMEOUT + TIMEOUT);
    second.store.close().unwrap();
    let third = open(&media, 3).unwrap();
    assert!(waited(&third) < TIMEOUT);
    drop(third);
    let no_queues = StoreOptions { queues: 0, ..options(4) };
    open_with(&media, no_queues, |clock| clock).map(|_| ()).unwrap_err();
    assert!(waited(&open(&media, 5).unwrap()) < TIMEOUT);
}

/// The other one claims the device while this one waits to see that.
#[test]
fn two_that_open_a_store_at_once_learn_who_has_it() {
    let media = formatted();
    let (other, _) = devices(vec![shared("path2", &media)]);
    let device = Mutex::new(Store::media(&other).unwrap().remove(0));
    let opened = open_with(&media, options(1), |clock| Arc::new(Rival { clock, device }));
    let error = opened.map(|_| ()).unwrap_err();
    let by = |found: &Owner| *found == owner(2);
    assert!(matches!(&error, StoreError::Owned { owner, .. } if by(owner)), "{error}");
}

#[test]
fn a_catalog_needs_a_device_by_itself() {
    let media = MemoryMedia::new(64 << 20).unwrap();
    let format = Format { part: Part::Catalog { ranks: 1, files: 64 }, ..format(SHAPE) };
    let alone = EmuConfig { serial: "SUB".into(), ..EmuConfig::new("alone") };
    let (alone, _) = devices(vec![alone.namespace(media.clone(), 4096)]);
    Store::format(&alone, &format).unwrap();
    open_catalog(&alone[0], &StoreOptions::default(), |_, _| {}).unwrap();
    let (twin, _) = devices(vec![shared("path0", &media)]);
    let opened = open_catalog(&twin[0], &options(1), |_, _| {});
    let error = opened.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("other controllers reach path0"), "{error}");
}

/// The other one shows that it is alive by a thread, so this is in real time; the timeout is far
/// longer than the test.
#[test]
fn a_living_owner_keeps_everybody_out() {
    let media = formatted();
    let start = |number: u8, owner_timeout| {
        let configs = vec![shared(&format!("path{number}"), &media)];
        let drives = Drives::threaded(EmuDomain::new("twin"), configs);
        let executor = inline_executor(drives.clock.clone());
        let options =
            StoreOptions { owner: owner(number), owner_timeout, ..StoreOptions::default() };
        let (config, kv) = config(&drives, executor, options);
        (Store::open(config), drives, kv)
    };
    let (store, _drives, _kv) = start(1, Nanos::from_millis(1_000));
    let store = store.unwrap();
    let (refused, ..) = start(2, Nanos::from_millis(600_000));
    let error = refused.unwrap_err();
    assert!(matches!(error, StoreError::Owned { .. }), "{error}");
    assert!(error.to_string().contains("path2") && error.to_string().contains("process 1 on here"));
    store.close().unwrap();
    start(2, Nanos::from_millis(1_000)).0.unwrap().close().unwrap();
}

#[test]
fn a_shared_device_needs_an_owner_and_others_have_none() {
    let media = formatted();
    let error = open(&media, 0).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("owner"), "{error}");
    // It shows that it is alive every 500 ms.
    let short = StoreOptions { owner_timeout: Nanos::from_millis(400), ..options(1) };
    let error = open_with(&media, short, |clock| clock).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("owner_timeout: 400ms is too short"), "{error}");
    // An ordinary drive: as all other tests have it.
    let config = EmuConfig { serial: "SUB".into(), ..EmuConfig::new("alone") };
    let (devices, clock) = devices(vec![config.namespace(media, 4096)]);
    let before = clock.now();
    assert_eq!(Store::living_owner(&devices).unwrap(), None);
    assert_eq!(clock.now(), before);
}

#[test]
fn one_namespace_is_not_formatted_as_two_devices() {
    let media = MemoryMedia::new(64 << 20).unwrap();
    let format = Format { overwrite: Overwrite::Anything, ..format(SHAPE) };
    let (twice, _) = devices(vec![shared("path0", &media), shared("path1", &media)]);
    let error = Store::format(&twice, &format).unwrap_err().to_string();
    assert!(error.contains("path0 and path1 are the same namespace"), "{error}");
    let mut head = vec![1; 2 << 20];
    media.peek(0, &mut head).unwrap();
    assert!(head.iter().all(|byte| *byte == 0), "it was written to");
    // Controllers that do not say so.
    let config = |id: &str| EmuConfig::new(id).namespace(media.clone(), 4096);
    let (twice, _) = devices(vec![config("path0"), config("path1")]);
    let error = Store::format(&twice, &format).unwrap_err().to_string();
    assert!(error.contains("path0: another superblock is on it"), "{error}");
}
