//! Durability of blocks that a rank reports, on two devices with volatile caches, in virtual time.

use nvme_emu::{
    Emu, EmuConfig, FaultAction, FaultPlan, FaultRule, FaultWhen, MemoryMedia, SimClock, SimMedia,
    SimOptions,
};
use objstore::{BlockId, BlockKey, Format, Part, Store};
use ripieno_testkit::{KvMemory, format, inline_executor, keys};

use super::*;
use crate::{Fleet, error::ErrorKind};

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
const BLOCKS: u32 = 16;
const FLUSH: u8 = 0;
const READ: u8 = 2;

/// The state that survives power loss.
struct Shelf {
    bytes: [MemoryMedia; 2],
    format: Format,
}

/// A rank and its environment.
struct Powered {
    stack: RankStack,
    kv: KvMemory,
    emus: Vec<Arc<Emu>>,
}

impl Shelf {
    fn new() -> Self {
        let bytes = [(); 2].map(|()| MemoryMedia::new(32 << 20).unwrap());
        let format = Format { part: Part::Rank { rank: 0, ranks: 1 }, ..format(SHAPE) };
        let shelf = Self { bytes, format };
        Store::format(&shelf.fleet().0.devices, &shelf.format).unwrap();
        shelf
    }

    fn fleet(&self) -> (Fleet, Arc<SimClock>) {
        let clock = SimClock::new(1);
        let config = |(at, bytes): (usize, &MemoryMedia)| {
            let options = SimOptions { seed: 1 + at as u64, ..SimOptions::default() };
            let media = SimMedia::new(bytes.clone(), options);
            EmuConfig::new(format!("drive{at}")).namespace(media, 4096)
        };
        let configs = self.bytes.iter().enumerate().map(config);
        let fleet = Fleet::simulated(configs, &clock, &ControllerOptions::default()).unwrap();
        (fleet, clock)
    }

    fn open(&self) -> Powered {
        let (fleet, clock) = self.fleet();
        let kv = KvMemory::new(&**fleet.space(), SHAPE, BLOCKS);
        let files = Store::plan(&fleet.devices, &self.format).unwrap()[0].layout.files;
        let emus = fleet.below.emulation().unwrap().emus().to_vec();
        let (below, devices, queues) = fleet.into_parts();
        let options = StoreOptions { virtual_time: true, ..StoreOptions::default() };
        let wait_timeout = options.wait_timeout;
        let plane = Plane::open_rank(RankConfig {
            id: RankId { store: self.format.store, rank: 0, ranks: 1, files },
            devices,
            executor: inline_executor(clock.clone()),
            clock: clock.clone(),
            shape: SHAPE,
            pool: kv.pool.clone(),
            gpu: None,
            options,
        });
        let pool = String::new();
        let placement = Placement { route: Route::Host, queues, pool, not_taken: Vec::new() };
        let place = Place::drives(&[]);
        let built = Built { bounce: None, pool: kv.pool.clone(), placement, below, place };
        let stack = RankStack::over(plane.unwrap(), built, clock, wait_timeout).unwrap();
        Powered { stack, kv, emus }
    }
}

impl Powered {
    /// Starts all layers of a job between files and blocks of equal numbers, and waits for them.
    fn begin(
        &mut self,
        direction: Direction,
        keys: &[BlockKey],
        sums: &[u32],
    ) -> Result<JobId, StackError> {
        let entry = |n| Move { file: FileId(n), block: BlockId(n), position: n };
        let moves: Vec<Move> = (0..keys.len() as u32).map(entry).collect();
        for (key, Move { block, .. }) in keys.iter().zip(&moves) {
            match direction {
                Direction::Write => self.kv.fill(*block, *key, 0),
                Direction::Read => self.kv.wipe(*block),
            }
        }
        let job = self.stack.begin(direction, &moves, sums)?;
        for layer in (0..SHAPE.layers).map(Layer) {
            self.stack.start(job, layer, None)?;
            self.stack.wait(job, layer)?;
        }
        Ok(job)
    }

    fn store(&mut self, keys: &[BlockKey]) -> JobId {
        self.begin(Direction::Write, keys, &[]).unwrap()
    }

    fn end(&self, job: JobId) -> Report {
        self.stack.end(&[job]).unwrap().remove(0)
    }

    /// Returns true when the files hold these keys.
    fn holds(&mut self, keys: &[BlockKey], sums: &[u32]) -> bool {
        let read = self.begin(Direction::Read, keys, sums);
        let whole = |(key, n): (&BlockKey, u32)| {
            (0..SHAPE.layers).all(|layer| self.kv.holds(BlockId(n), Layer(layer), *key, 0))
        };
        read.is_ok_and(|job| self.end(job).failure.is_none()) && keys.iter().zip(0..).all(whole)
    }

    fn break_device(&self, device: usize, opcode: u8, then: FaultAction) {
        let when = FaultWhen { opcode: Some(opcode), admin: Some(false), ..FaultWhen::default() };
        let rules = vec![FaultRule::new(when, then).limit(1)];
        self.emus[device].set_faults(FaultPlan { rules, ..FaultPlan::default() });
    }

    fn lose_power(self) {
        self.emus.iter().for_each(|emu| emu.power_loss());
    }
}

#[test]
fn what_is_reported_is_there_after_a_loss_of_power() {
    let keys = keys(0..BLOCKS);
    let shelf = Shelf::new();
    let mut rank = shelf.open();
    let job = rank.store(&keys);
    let report = rank.end(job);
    assert!(report.failure.is_none(), "{report:?}");
    rank.lose_power();
    assert!(shelf.open().holds(&keys, &report.checksums));
    // Nothing else would make it durable.
    let shelf = Shelf::new();
    let mut rank = shelf.open();
    rank.store(&keys);
    rank.lose_power();
    assert!(!shelf.open().holds(&keys, &report.checksums));
}

#[test]
fn after_a_flush_that_failed_nothing_is_reported_as_stored() {
    let (shelf, keys) = (Shelf::new(), keys(0..BLOCKS));
    let mut rank = shelf.open();
    let [first, second] = [(); 2].map(|()| rank.store(&keys));
    // The next flush would succeed.
    rank.break_device(1, FLUSH, FaultAction::Status { code: 0x280, dnr: true });
    let before = rank.emus[1].counters().flushes;
    for job in [first, second] {
        let failure = rank.end(job).failure.expect("the flush failed");
        assert!(matches!(failure, StoreError::JournalFailed { .. }), "{failure}");
        let said = failure.to_string();
        assert!(said.contains("device 1: ") && said.contains("Write Fault"), "{said}");
    }
    assert_eq!(rank.emus[1].counters().flushes, before, "it was asked again");
    let error = rank.begin(Direction::Write, &keys, &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error}");
    assert!(rank.holds(&keys, &[]), "what is there can be loaded");
    drop(rank);
    let mut rank = shelf.open();
    let job = rank.store(&keys);
    assert!(rank.end(job).failure.is_none(), "open anew, it stores");
}

#[test]
fn what_a_drive_forgot_before_its_flush_is_not_reported_as_stored() {
    let (shelf, keys) = (Shelf::new(), keys(0..BLOCKS));
    let mut rank = shelf.open();
    let job = rank.store(&keys);
    rank.break_device(1, READ, FaultAction::PowerLoss);
    assert!(!rank.holds(&keys, &[]), "the power was lost");
    let failure = rank.end(job).failure.expect("a drive may have forgotten it");
    assert!(matches!(failure, StoreError::Forgotten), "{failure}");
    let job = rank.store(&keys);
    let report = rank.end(job);
    assert!(report.failure.is_none(), "{report:?}");
    rank.lose_power();
    assert!(shelf.open().holds(&keys, &report.checksums));
}
