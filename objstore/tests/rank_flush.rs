//! Durability of a rank's plane and of the catalog beside it, and the calls that a plane refuses
//! after a failed flush.

use crate::{shelf, stack};

use std::{
    fmt,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use nvme_driver::{ControllerOptions, Nanos};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, EmuRunner, FaultAction, Media, MediaDone, MediaKind, MediaOp,
    MemoryMedia, SimClock,
};
use objstore::{
    BlockId, BlockKey, Direction, DurableCatalog, FileId, Format, JobDone, JobId, KvShape, Layer,
    Move, Namespace, Order, Part, Plane, RankId, Store, StoreConfig, StoreDevice, StoreError,
    StoreOptions, Ticket,
};
use ripieno_testkit::{Drives, KvMemory, format, host_executor, inline_executor, memory_drives};
use shelf::{FLUSH, Powered, Shelf, break_device, break_flush, flushes, refused};
use stack::{READ, keys, on};

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
const BLOCKS: u32 = 16;

/// The plane of the only rank, and an engine's memory.
struct Rank {
    plane: Plane,
    kv: KvMemory,
    emus: Vec<Arc<Emu>>,
}

fn made() -> Shelf {
    let mut shelf = Shelf::new(2, SHAPE);
    shelf.format.part = Part::Rank { rank: 0, ranks: 1 };
    shelf.make();
    shelf
}

/// Opens the rank for a catalog with `more` files than the rank has.
fn open_for(shelf: &Shelf, more: u32) -> Result<Rank, StoreError> {
    let Powered { devices, domain, emus, clock } = shelf.power_on();
    let files = Store::plan(&devices, &shelf.format)?[0].layout.files;
    let kv = KvMemory::new(&*domain, SHAPE, BLOCKS);
    let id = RankId { store: shelf.format.store, rank: 0, ranks: 1, files: files + more };
    let plane = Plane::open_rank(
        id,
        StoreConfig {
            devices,
            namespace: Namespace::default(),
            executor: inline_executor(clock.clone()),
            clock,
            shape: SHAPE,
            pool: kv.pool.clone(),
            gpu: None,
            options: StoreOptions { virtual_time: true, ..StoreOptions::default() },
        },
    )?;
    Ok(Rank { plane, kv, emus })
}

/// Opens a rank in real time, whose controllers and I/O kernel have threads. Those of controllers
/// end after it, which would wait for commands to time out.
fn open_with_threads() -> (EmuRunner, Rank) {
    let domain = EmuDomain::new("threads");
    let drives = Drives::threaded(domain.clone(), memory_drives(2, 64 << 20, 4096));
    let attached = drives.attach(&ControllerOptions::default());
    let devices: Vec<_> = attached.into_iter().map(StoreDevice::new).collect();
    let format = Format { part: Part::Rank { rank: 0, ranks: 1 }, ..format(SHAPE) };
    Store::format(&devices, &format).unwrap();
    let files = Store::plan(&devices, &format).unwrap()[0].layout.files;
    let kv = KvMemory::new(&*domain, SHAPE, BLOCKS);
    let id = RankId { store: format.store, rank: 0, ranks: 1, files };
    let plane = Plane::open_rank(
        id,
        StoreConfig {
            devices,
            namespace: Namespace::default(),
            executor: host_executor(drives.clock.clone()),
            clock: drives.clock,
            shape: SHAPE,
            pool: kv.pool.clone(),
            gpu: None,
            options: StoreOptions::default(),
        },
    );
    (drives.runner.unwrap(), Rank { plane: plane.unwrap(), kv, emus: drives.emus })
}

fn open(shelf: &Shelf) -> Rank {
    open_for(shelf, 0).unwrap()
}

impl Rank {
    /// Moves all layers between files and blocks of the same numbers.
    fn move_all(
        &self,
        direction: Direction,
        files: std::ops::Range<u32>,
        expected: &[u32],
    ) -> Result<JobId, StoreError> {
        let entry = |n| Move { file: FileId(n), block: BlockId(n), position: n };
        let moves: Vec<Move> = files.map(entry).collect();
        let job = self.plane.begin(direction, &moves, expected)?;
        self.move_layers(job)?;
        Ok(job)
    }

    fn move_layers(&self, job: JobId) -> Result<(), StoreError> {
        for layer in (0..SHAPE.layers).map(Layer) {
            self.plane.start(Ticket { job, layer }, Order::Unordered)?;
            self.plane.wait(Ticket { job, layer })?;
        }
        Ok(())
    }

    fn write(&mut self, keys: &[BlockKey]) -> JobId {
        for (key, block) in keys.iter().zip((0..).map(BlockId)) {
            self.kv.fill(block, *key, 0);
        }
        self.move_all(Direction::Write, 0..keys.len() as u32, &[]).unwrap()
    }

    fn end(&self, job: JobId) -> JobDone {
        self.plane.end(&[job]).unwrap().remove(0)
    }

    /// Returns true if the files hold these keys.
    fn holds(&mut self, keys: &[BlockKey], expected: &[u32]) -> bool {
        let files = 0..keys.len() as u32;
        files.clone().for_each(|block| self.kv.wipe(BlockId(block)));
        let read = self.move_all(Direction::Read, files.clone(), expected);
        let holds = |(key, block): (&BlockKey, u32)| {
            (0..SHAPE.layers).all(|l| self.kv.holds(BlockId(block), Layer(l), *key, 0))
        };
        read.is_ok_and(|job| self.end(job).failure.is_none()) && keys.iter().zip(files).all(holds)
    }

    fn lose_power(self) {
        self.emus.iter().for_each(|emu| emu.power_loss());
    }
}

#[test]
fn what_was_ended_is_there_after_a_loss_of_power_on_every_device() {
    let keys = keys(0..BLOCKS);
    for is_ended in [true, false] {
        let shelf = made();
        let mut rank = open(&shelf);
        let job = rank.write(&keys);
        let before = flushes(&rank.emus);
        let mut sums = Vec::new();
        if is_ended {
            let done = rank.end(job);
            assert!(done.failure.is_none(), "{done:?}");
            sums = done.checksums;
            let after = flushes(&rank.emus);
            assert!(before.iter().zip(&after).all(|(was, is)| was + 1 == *is), "{after:?}");
        }
        rank.lose_power();
        assert_eq!(open(&shelf).holds(&keys, &sums), is_ended);
    }
}

#[test]
fn a_rank_stores_nothing_after_a_flush_that_failed() {
    let shelf = made();
    let mut rank = open(&shelf);
    let old = keys(0..4);
    let first = rank.write(&old);
    let sums = rank.end(first).checksums;
    // Begun before the failed flush, and ended after it.
    let moves = [Move { file: FileId(8), block: BlockId(8), position: 0 }];
    let late = rank.plane.begin(Direction::Write, &moves, &[]).unwrap();
    let both = [(); 2].map(|()| rank.write(&old));
    break_flush(&rank.emus[1]);
    for done in rank.plane.end(&both).unwrap() {
        let said = refused(done.failure.map_or(Ok(()), Err));
        assert!(said.contains("drive1") && said.contains("Write Fault"), "{said}");
    }
    let before = flushes(&rank.emus);
    rank.move_layers(late).unwrap();
    refused(rank.end(late).failure.map_or(Ok(()), Err));
    refused(rank.plane.begin(Direction::Write, &moves, &[]));
    assert_eq!(flushes(&rank.emus), before, "a device was asked again");
    assert!(rank.holds(&old, &sums), "what is stored can be retrieved");
    rank.lose_power();
    let mut rank = open(&shelf);
    let job = rank.write(&old);
    assert!(rank.end(job).failure.is_none(), "opened again, it stores");
}

/// Ends the first of three jobs, whose flush is slow on a device, and the others meanwhile. Calls
/// `meanwhile` during that flush.
fn end_three(rank: &mut Rank, slow: usize, meanwhile: impl FnOnce(&Rank)) -> [JobDone; 3] {
    let jobs = [0..4, 4..8, 8..12].map(|files| {
        files.clone().for_each(|n| rank.kv.fill(BlockId(n), keys(n..n + 1)[0], 0));
        rank.move_all(Direction::Write, files, &[]).unwrap()
    });
    let device = rank.emus[slow].clone();
    break_device(&device, on(FLUSH, FaultAction::Delay { ns: 4_000_000_000 }).limit(1));
    let rank = &*rank;
    thread::scope(|scope| {
        let plane = &rank.plane;
        let end = |job| scope.spawn(move || plane.end(&[job]).unwrap().remove(0));
        let first = end(jobs[0]);
        while device.counters().faults == 0 {
            assert!(!first.is_finished(), "without a flush");
            thread::sleep(Duration::from_millis(1));
        }
        let others = [end(jobs[1]), end(jobs[2])];
        meanwhile(rank);
        let [second, third] = others.map(|other| (other.is_finished(), other));
        assert!(!first.is_finished(), "layers waited for the flush");
        assert!(!second.0 && !third.0, "a flush covers what was written after it had begun");
        [first, second.1, third.1].map(|thread| thread.join().unwrap())
    })
}

#[test]
fn layers_move_while_a_flush_is_slow_and_the_next_one_is_for_all_that_waited() {
    let (_runner, mut rank) = open_with_threads();
    let before = flushes(&rank.emus);
    let ended = end_three(&mut rank, 1, |rank| {
        for direction in [Direction::Read, Direction::Write] {
            let job = rank.move_all(direction, 12..16, &[]).unwrap();
            rank.plane.abandon(job);
        }
    });
    assert!(ended.iter().all(|done| done.failure.is_none()), "{ended:?}");
    let after = flushes(&rank.emus);
    assert!(before.iter().zip(&after).all(|(was, is)| was + 2 == *is), "{before:?} {after:?}");
}

#[test]
fn those_that_wait_for_a_flush_that_fails_are_refused() {
    let (_runner, mut rank) = open_with_threads();
    break_flush(&rank.emus[1]);
    let before = flushes(&rank.emus);
    for done in end_three(&mut rank, 0, |_| ()) {
        let said = refused(done.failure.map_or(Ok(()), Err));
        assert!(said.contains("emu1") && said.contains("Write Fault"), "{said}");
    }
    let after = flushes(&rank.emus);
    assert_eq!(after, [before[0] + 1, before[1]], "a device was asked again");
}

#[test]
fn a_rank_says_that_a_device_may_have_forgotten() {
    let (shelf, keys) = (made(), keys(0..4));
    let mut rank = open(&shelf);
    let job = rank.write(&keys);
    // It loses power during a read, and is recovered.
    break_device(&rank.emus[0], on(READ, FaultAction::PowerLoss).limit(1));
    assert!(!rank.holds(&keys, &[]));
    let failure = rank.end(job).failure.expect("a device may have forgotten it");
    assert!(matches!(failure, StoreError::Forgotten), "{failure}");
    let job = rank.write(&keys);
    let done = rank.end(job);
    assert!(done.failure.is_none(), "{done:?}");
    rank.lose_power();
    assert!(open(&shelf).holds(&keys, &done.checksums));
}

#[test]
fn a_rank_with_fewer_files_than_the_catalog_is_refused() {
    let shelf = made();
    open_for(&shelf, 0).unwrap();
    let error = open_for(&shelf, 1).err().expect("the catalog may name a file that is not there");
    assert!(matches!(error, StoreError::Config { field: "devices", .. }), "{error}");
    assert!(error.to_string().contains("format them together"), "{error}");
}

type Hook = Box<dyn FnMut() + Send>;

/// A medium that calls a hook on each write.
struct Watched {
    media: MemoryMedia,
    hook: Arc<Mutex<Option<Hook>>>,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watched").field(&self.media).finish()
    }
}

impl Media for Watched {
    fn capacity_bytes(&self) -> u64 {
        self.media.capacity_bytes()
    }

    fn granularity_bytes(&self) -> u32 {
        self.media.granularity_bytes()
    }

    fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone> {
        if let (MediaKind::Write { .. }, Some(hook)) = (op.kind, &mut *self.hook.lock().unwrap()) {
            hook();
        }
        self.media.submit(op, now)
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        self.media.poll(now, done);
    }

    fn next_event(&self) -> Option<Nanos> {
        self.media.next_event()
    }

    fn in_flight(&self) -> usize {
        self.media.in_flight()
    }

    fn cancel(&mut self) {
        self.media.cancel();
    }

    fn power_loss(&mut self) {
        self.media.power_loss();
    }
}

/// No other request may write to a file while the journal still records its old key.
#[test]
fn files_that_were_evicted_are_not_free_while_their_records_are_written() {
    let clock = SimClock::new(1);
    let hook = Arc::new(Mutex::new(None));
    let media = Watched { media: MemoryMedia::new(16 << 20).unwrap(), hook: hook.clone() };
    let config = EmuConfig::new("drive0").namespace(media, 4096);
    let drives = Drives::simulated(EmuDomain::new("catalog"), vec![config], &clock);
    let device = drives.attach(&ControllerOptions::default()).remove(0);
    let devices = [StoreDevice::new(device)];
    let part = Part::Catalog { ranks: 1, files: 16 };
    Store::format(&devices, &Format { part, checksums: false, ..format(SHAPE) }).unwrap();
    let catalog = objstore::open_catalog(&devices[0], &StoreOptions::default(), |_, _| {}).unwrap();
    let catalog = Arc::new(catalog);
    let keys = keys(0..4);
    let space = catalog.with(|catalog| {
        let space = catalog.namespace(&Namespace::default()).unwrap();
        let write = catalog.begin(space, &keys).unwrap().id;
        catalog.written(write, 0, &[]).unwrap();
        catalog.commit(write).unwrap();
        space
    });
    catalog.sync().unwrap();
    assert_eq!(catalog.with(|catalog| catalog.remove(space, &keys)).unwrap(), 4);
    let free = |catalog: &DurableCatalog| catalog.with(|catalog| catalog.counts().free);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let watch: Hook = {
        let (catalog, seen) = (catalog.clone(), seen.clone());
        Box::new(move || seen.lock().unwrap().push(free(&catalog)))
    };
    *hook.lock().unwrap() = Some(watch);
    catalog.sync().unwrap();
    *hook.lock().unwrap() = None;
    assert_eq!((&*seen.lock().unwrap(), free(&catalog)), (&vec![12], 16));
}
