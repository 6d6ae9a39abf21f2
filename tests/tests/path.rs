//! The whole path on one thread and in virtual time: store, ring, I/O kernel, driver, controllers.
//! Random machines, operations and faults, compared with a map of the expected contents.
//!
//! Invariants: a layer read without an error is right in every byte; uncommitted data is never
//! stored; every call ends in bounded virtual time; and nothing panics. `RIPIENO_SEED=n` runs one
//! seed alone.

use std::{
    collections::BTreeMap,
    io::Write as _,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, mpsc},
};

use nvme_driver::{Clock, ControllerOptions, DescriptorPreference, Nanos};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, FaultAction, FaultPlan, FaultRule, FaultWhen, LbaRange, MemoryMedia,
    SglSupport, SimClock, SimMedia, SimOptions,
};
use nvme_spec::status::Status;
use objstore::{BlockId, BlockKey, Format, KvShape, Layer, Order, StoreError, StoreOptions};
use rand::{
    Rng as _, SeedableRng as _,
    rngs::SmallRng,
    seq::{IndexedRandom as _, SliceRandom as _},
};
use ripieno_testkit::{Drives, WATCHDOG, keys};
use ripieno_tests::store::{Plan, Rig};

/// Number of worlds to run, unless `RIPIENO_SEED` names one.
const WORLDS: u64 = 160;
const STEPS: u32 = 60;
const KEYS: u32 = 40;
const BLOCKS: u32 = 64;
/// Virtual time within which any call ends: the store's own deadline, and a recovery of every
/// device through all steps of the driver's escalation.
const BOUND: Nanos = Nanos::from_millis(120_000);

fn one_of<T: Copy>(rng: &mut SmallRng, choices: &[T]) -> T {
    *choices.choose(rng).expect("choices")
}

/// Totals over all worlds: a run without failures, or without successes, proves nothing.
#[derive(Debug, Default)]
struct Tally {
    layers_right: u64,
    refused: u64,
    recoveries: u64,
    ended: u64,
}

struct World {
    rng: SmallRng,
    rig: Rig,
    clock: Arc<SimClock>,
    domain: Arc<EmuDomain>,
    emus: Vec<Arc<Emu>>,
    all: Vec<BlockKey>,
    /// Key -> version of blocks that were committed and not seen to be gone.
    model: BTreeMap<BlockKey, u64>,
    versions: u64,
    /// Set if operations without handles may be in flight.
    in_flight: bool,
    /// Set if the devices may have faults, or had some.
    faulty: bool,
    /// Set after something that a store need not survive.
    mortal: bool,
    context: String,
}

/// Result of an operation; the store may have failed permanently.
type Step = Result<(), StoreError>;

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let clock = SimClock::new(rng.random());
        let (machine, plan) = machine(&mut rng);
        let mut drive = |at| {
            let lba_bytes = machine.lba_bytes;
            let media = MemoryMedia::new(4 << 20).unwrap();
            let (id, serial) = (format!("emu{at}"), format!("PATH-{at}"));
            let config = EmuConfig { id, serial, ..machine.config(&mut rng) };
            if machine.volatile {
                let options = SimOptions { seed: rng.random(), lba_bytes, ..Default::default() };
                config.namespace(SimMedia::new(media, options), lba_bytes)
            } else {
                config.namespace(media, lba_bytes)
            }
        };
        let configs = (0..machine.devices).map(&mut drive).collect();
        let drives = Drives::simulated(EmuDomain::new("path"), configs, &clock);
        let context = format!("seed {seed}, {machine:?}, {:?}", plan.shape);
        let rig = Rig::open(&drives.buses(), clock.clone(), &plan)
            .unwrap_or_else(|error| panic!("{error:#}: {context}"));
        Self {
            rng,
            rig,
            clock,
            domain: drives.domain,
            emus: drives.emus,
            all: keys(0..KEYS),
            model: BTreeMap::new(),
            versions: 0,
            in_flight: false,
            faulty: false,
            mortal: false,
            context,
        }
    }

    /// Returns a run of keys from one of a few places, as requests share their prefixes.
    fn request(&mut self) -> Vec<BlockKey> {
        let first = self.rng.random_range(0..4) as usize * 10;
        let len = 1 + self.rng.random_range(0..10) as usize;
        self.all[first..first + len].to_vec()
    }

    fn blocks(&mut self, count: usize) -> Result<Vec<BlockId>, StoreError> {
        if self.in_flight {
            // Without a handle, only a drain shows that its blocks are free again.
            self.rig.store.plane().drain()?;
            self.in_flight = false;
        }
        let mut blocks: Vec<BlockId> = (0..BLOCKS).map(BlockId).collect();
        blocks.shuffle(&mut self.rng);
        blocks.truncate(count);
        Ok(blocks)
    }

    fn layers(&mut self) -> Vec<Layer> {
        let mut layers: Vec<Layer> = (0..self.rig.kv.shape.layers).map(Layer).collect();
        layers.shuffle(&mut self.rng);
        layers
    }

    /// Stores a run of keys, or starts to.
    fn put(&mut self) -> Step {
        let keys = self.request();
        let blocks = self.blocks(keys.len())?;
        self.versions += 1;
        for (key, block) in keys.iter().zip(&blocks) {
            self.rig.kv.fill(*block, *key, self.versions);
        }
        // Stored blocks are not stored again: they keep their version.
        let old = |world: &Self, key| world.rig.store.peek(&[key]) == 1;
        let fresh: Vec<bool> = keys.iter().map(|key| !old(self, *key)).collect();
        let writing = self.rig.store.allocate(&keys, &blocks)?;
        let (mut tickets, give_up) = (Vec::new(), self.rng.random_range(0..12) == 0);
        for layer in self.layers() {
            tickets.push(self.rig.store.start(&writing, layer, Order::Unordered)?);
            if self.rng.random_range(0..2) == 0 {
                let at = self.rng.random_range(0..tickets.len() as u32) as usize;
                self.rig.store.wait(tickets.swap_remove(at))?;
            }
            if give_up {
                self.in_flight = true;
                drop(writing);
                return Ok(());
            }
        }
        let accepted = self.rig.store.commit(writing)?.accepted;
        for (key, fresh) in keys[..accepted].iter().zip(fresh) {
            if fresh {
                self.model.insert(*key, self.versions);
            }
        }
        Ok(())
    }

    /// Reads the stored prefix of a run of keys, and compares.
    fn get(&mut self, tally: &mut Tally) -> Step {
        let keys = self.request();
        let prefix = self.rig.store.lookup(&keys)?;
        let known = keys.iter().take_while(|key| self.model.contains_key(key)).count();
        assert!(prefix.len() <= known, "found what is not stored, {}", self.context);
        assert!(prefix.len() == known || self.faulty, "a miss, {}", self.context);
        let blocks = self.blocks(prefix.len())?;
        blocks.iter().for_each(|block| self.rig.kv.wipe(*block));
        let transfer = self.rig.store.retrieve(&prefix, &blocks)?;
        let mut tickets = Vec::new();
        for layer in self.layers() {
            tickets.push(self.rig.store.start(&transfer, layer, Order::Unordered)?);
        }
        tickets.shuffle(&mut self.rng);
        let mut result = Ok(());
        for ticket in tickets {
            let layer = ticket.layer;
            if let Err(error) = self.rig.store.wait(ticket) {
                result = Err(error);
                continue;
            }
            for (key, block) in keys.iter().zip(&blocks) {
                let right = self.rig.kv.holds(*block, layer, *key, self.model[key]);
                assert!(right, "wrong bytes: {key} layer {layer} in {block}, {}", self.context);
                tally.layers_right += 1;
            }
        }
        result
    }

    fn disturb(&mut self) {
        let at = self.rng.random_range(0..self.emus.len() as u32) as usize;
        self.faulty = true;
        match self.rng.random_range(0..12) {
            0 => self.emus.iter().for_each(|emu| emu.set_faults(FaultPlan::default())),
            1 => self.emus[at].power_loss(),
            2 if self.rng.random_range(0..8) == 0 => {
                self.mortal = true;
                self.emus[at].unplug();
            }
            2 => self.clock.run_for(Nanos::from_millis(2_000)),
            _ => {
                let plan = self.plan();
                self.emus[at].set_faults(plan);
            }
        }
    }

    fn plan(&mut self) -> FaultPlan {
        let status = |status: Status| FaultAction::Status { code: status.0, dnr: true };
        let actions = [
            FaultAction::Drop,
            FaultAction::Delay { ns: 1_000_000 },
            FaultAction::Delay { ns: 400_000_000 },
            FaultAction::Duplicate,
            FaultAction::WrongCid,
            FaultAction::WrongPhase,
            FaultAction::WrongSqhd,
            FaultAction::WrongSqid,
            FaultAction::FatalStatus,
            FaultAction::PowerLoss,
            status(Status::UNRECOVERED_READ_ERROR),
            status(Status::WRITE_FAULT),
            status(Status::INTERNAL_ERROR),
        ];
        // Only data commands: a failed journal write ends all storing.
        let data = self.rig.store.superblock().data_region().expect("a store with data");
        let data = LbaRange { first: data.first.0, count: u64::MAX >> 1 };
        let mut rules = Vec::new();
        for _ in 0..1 + self.rng.random_range(0..3) {
            let probability = Some(0.002 * f64::from(1 << self.rng.random_range(0..6)));
            let (admin, lbas) = (Some(false), Some(data));
            let when = FaultWhen { admin, probability, lbas, ..FaultWhen::default() };
            rules.push(FaultRule::new(when, one_of(&mut self.rng, &actions)));
        }
        if self.rng.random_range(0..6) == 0 {
            // Recovery itself fails at times; if it always fails, the store fails permanently.
            self.mortal = true;
            let probability = Some(0.02 * f64::from(1 << self.rng.random_range(0..5)));
            let when = FaultWhen { admin: Some(true), probability, ..FaultWhen::default() };
            rules.push(FaultRule::new(when, one_of(&mut self.rng, &actions)));
        }
        FaultPlan { seed: self.rng.random(), rules, ..FaultPlan::default() }
    }

    fn act(&mut self, tally: &mut Tally) -> Step {
        match self.rng.random_range(0..16) {
            0..5 => self.put(),
            5..10 => self.get(tally),
            10 => {
                let count = self.rng.random_range(0..4);
                self.rig.store.evict(count).map(drop)?;
                self.forget();
                Ok(())
            }
            11 => {
                let keys = self.request();
                self.rig.store.remove(&keys)?;
                self.model.retain(|key, _| !keys.contains(key));
                Ok(())
            }
            12 => {
                // An operation in flight whose handles are dropped.
                let keys = self.request();
                let prefix = self.rig.store.lookup(&keys)?;
                let blocks = self.blocks(prefix.len())?;
                let transfer = self.rig.store.retrieve(&prefix, &blocks)?;
                self.in_flight = true;
                self.rig.store.start(&transfer, Layer(0), Order::Unordered).map(drop)
            }
            13 => self.rig.store.plane().drain(),
            _ => {
                self.disturb();
                Ok(())
            }
        }
    }

    /// Removes evicted keys from the model, and checks that no uncommitted key is stored.
    fn forget(&mut self) {
        for key in &self.all {
            if self.rig.store.peek(&[*key]) == 0 {
                self.model.remove(key);
            } else if !self.model.contains_key(key) {
                panic!("{key} was never committed, {}", self.context);
            }
        }
    }

    /// Performs one operation. Returns false if the store has failed, as it may.
    fn step(&mut self, tally: &mut Tally) -> bool {
        let start = self.clock.now();
        let result = self.act(tally);
        let took = self.clock.now() - start;
        assert!(took < BOUND, "{} s, {}", took.0 / 1_000_000_000, self.context);
        assert_eq!(self.domain.refused(), 0, "DMA to memory not its own, {}", self.context);
        match result {
            Ok(()) => {}
            Err(StoreError::Failed { cause }) => {
                assert!(self.mortal, "failed for good: {cause}, {}", self.context);
                tally.ended += 1;
                return false;
            }
            // A drive lost power during a flush.
            Err(StoreError::JournalFailed { cause }) => {
                assert!(self.faulty, "{cause}, {}", self.context);
                tally.ended += 1;
                return false;
            }
            Err(error) => {
                self.in_flight = true;
                assert!(self.faulty, "{error}, {}", self.context);
                tally.refused += 1;
            }
        }
        self.forget();
        true
    }

    /// Checks that with working devices everything works and nothing is lost.
    fn finish(&mut self, tally: &mut Tally) {
        self.emus.iter().for_each(|emu| emu.set_faults(FaultPlan::default()));
        // Late effects of the faults show in the next one or two operations on each queue.
        for _ in 0..20 {
            for get in [false, true] {
                let result = if get { self.get(tally) } else { self.put() };
                self.in_flight = true;
                match result {
                    Err(StoreError::Failed { cause }) => {
                        assert!(self.mortal, "failed for good: {cause}, {}", self.context);
                        tally.ended += 1;
                        return;
                    }
                    Err(StoreError::JournalFailed { .. }) => {
                        tally.ended += 1;
                        return;
                    }
                    _ => {}
                }
                self.forget();
            }
        }
        self.faulty = false;
        for turn in 0..20 {
            let result = if turn % 2 == 1 { self.get(tally) } else { self.put() };
            result.unwrap_or_else(|error| panic!("{error}, {}", self.context));
            self.forget();
        }
        self.rig.store.plane().drain().unwrap();
        let stats = self.rig.store.stats().unwrap();
        assert_eq!(stats.files_free() + stats.files.stored, stats.files.files, "{}", self.context);
        tally.recoveries += stats.plane.recoveries;
    }
}

/// Properties of a world's devices.
#[derive(Debug)]
struct Machine {
    devices: u32,
    lba_bytes: u32,
    sgl: SglSupport,
    bit_bucket: bool,
    volatile: bool,
    mdts_bytes: u32,
}

impl Machine {
    fn config(&self, rng: &mut SmallRng) -> EmuConfig {
        EmuConfig {
            sgl: self.sgl,
            bit_bucket: self.bit_bucket,
            mdts_bytes: Some(self.mdts_bytes),
            vwc: self.volatile || rng.random_range(0..2) == 0,
            dstrd: rng.random_range(0..3) as u8,
            mqes: one_of(rng, &[64, 256, 1024]),
            ..EmuConfig::default()
        }
    }
}

fn machine(rng: &mut SmallRng) -> (Machine, Plan) {
    let devices = 1 + rng.random_range(0..4);
    let sgl =
        one_of(rng, &[SglSupport::Byte, SglSupport::Byte, SglSupport::Dword, SglSupport::None]);
    let machine = Machine {
        devices,
        lba_bytes: one_of(rng, &[512, 4096]),
        sgl,
        bit_bucket: rng.random_range(0..2) == 0,
        volatile: rng.random_range(0..3) == 0,
        mdts_bytes: one_of(rng, &[8 << 10, 64 << 10, 512 << 10]),
    };
    // PRPs can neither pad nor end a part within a page, except the last.
    let sizes: &[u32] =
        if sgl == SglSupport::None { &[4096, 8192] } else { &[1536, 4096, 4224, 12288] };
    let shape = KvShape {
        layers: 1 + rng.random_range(0..4),
        segments: 1 + rng.random_range(0..2),
        object_bytes: one_of(rng, sizes),
        block_tokens: 16,
    };
    // Room for some of the keys, or for all.
    let files: u64 = one_of(rng, &[12, 24, 48]);
    let padded = u64::from(shape.object_bytes.next_multiple_of(machine.lba_bytes));
    let capacity_bytes = files * padded * u64::from(shape.rows());
    let plan = Plan {
        shape,
        blocks: BLOCKS,
        format: Format {
            capacity_bytes: Some(capacity_bytes),
            group: Some(devices * (1 + rng.random_range(0..3))),
            ..ripieno_testkit::format(shape)
        },
        driver: ControllerOptions {
            descriptors: DescriptorPreference::Auto,
            command_timeout: Nanos::from_millis(200),
            admin_timeout: Nanos::from_millis(300),
            abort_grace: Nanos::from_millis(20),
            ..Default::default()
        },
        store: StoreOptions {
            queues: 1 + rng.random_range(0..3) as u16,
            depth: one_of(rng, &[4, 16, 64]),
            run_bytes: one_of(rng, &[4096, 32 << 10, 128 << 10]),
            iocbs: 16,
            command_timeout: Nanos::from_millis(100),
            wait_timeout: Nanos::from_millis(20_000),
            ..Default::default()
        },
    };
    (machine, plan)
}

fn run(seed: u64, tally: &mut Tally) {
    let mut world = World::new(seed);
    for _ in 0..STEPS {
        if !world.step(tally) {
            // All later calls fail, too.
            let one = world.all[..1].to_vec();
            let stored = world.rig.store.allocate(&one, &[BlockId(0)]);
            assert!(stored.is_err(), "{}", world.context);
            return;
        }
    }
    world.finish(tally);
}

/// Aborts the process on a hang: virtual time bounds every wait, but not a loop in which no time
/// passes.
fn watchdog() -> mpsc::Sender<u64> {
    let (sender, seeds) = mpsc::channel::<u64>();
    std::thread::spawn(move || {
        let mut last = None;
        loop {
            match seeds.recv_timeout(WATCHDOG) {
                Ok(seed) => last = Some(seed),
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let _ = writeln!(std::io::stderr(), "hangs: RIPIENO_SEED={last:?}");
                    std::process::abort();
                }
            }
        }
    });
    sender
}

#[test]
fn random_machines_under_random_faults_never_give_wrong_bytes() {
    let one = std::env::var("RIPIENO_SEED").ok().map(|seed| seed.parse().expect("a number"));
    let (watchdog, mut tally) = (watchdog(), Tally::default());
    let seeds = one.map_or(0..WORLDS, |seed: u64| seed..seed + 1);
    for seed in seeds {
        watchdog.send(seed).unwrap();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed, &mut tally))) {
            let _ = writeln!(std::io::stderr(), "repeat with RIPIENO_SEED={seed}");
            resume_unwind(panic);
        }
    }
    if one.is_none() {
        let enough = tally.layers_right > 1000 && tally.refused > 50 && tally.recoveries > 20;
        assert!(enough && tally.ended > 0, "{tally:?} proves little");
    }
}
