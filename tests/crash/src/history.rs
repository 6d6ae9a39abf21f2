//! One seed: devices, and the lives of a store on them.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result};
use kv_schedule::{Config, Curve, IoCosts, Scheduler, Setting, SlackTable};
use nvme_driver::{ControllerOptions, Nanos};
use nvme_emu::{
    EmuConfig, EmuDomain, Latency, MemoryMedia, PowerSwitch, SimClock, SimFaults, SimMedia,
    SimOptions,
};
use objstore::{
    BlockId, BlockKey, DramMode, Format, KvShape, Layer, Namespace, Overwrite, PacedStore, Store,
    StoreConfig, StoreDevice, StoreError, StoreId, StoreOptions, Writing,
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::SliceRandom as _};
use ripieno_testkit::{Drives, KvMemory, inline_executor, keys};
use serde::{Deserialize, Serialize};

use crate::model::{Model, Name, Wrong};

/// Keys of each namespace.
const KEYS: u32 = 24;
/// Blocks of the engine.
const BLOCKS: u32 = 32;
/// Blocks in host memory beside the devices, in one of so many histories.
const DRAM_BLOCKS: u64 = 10;
const DRAM_EVERY: u64 = 3;
/// And in one of so many it is written to the devices later.
const BACK_EVERY: u64 = 2;
/// And in one of so many of those it is written block by block.
const PARTS_EVERY: u64 = 2;
/// Crashes of one history.
const LIVES: u64 = 8;
/// Failures that are described.
const SHOWN_MAX: usize = 20;

/// What became of some histories.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub seeds: u64,
    pub crashes: u64,
    pub wrong_bytes: u64,
    pub lost_commits: u64,
    pub came_back: u64,
    pub did_not_open: u64,
    /// Blocks whose bytes were compared.
    pub checked: u64,
    pub failures: Vec<String>,
}

impl Outcome {
    /// Whether nothing was wrong.
    pub fn is_clean(&self) -> bool {
        self.wrong_bytes + self.lost_commits + self.came_back + self.did_not_open == 0
    }

    pub fn merge(&mut self, other: Self) {
        self.seeds += other.seeds;
        self.crashes += other.crashes;
        self.wrong_bytes += other.wrong_bytes;
        self.lost_commits += other.lost_commits;
        self.came_back += other.came_back;
        self.did_not_open += other.did_not_open;
        self.checked += other.checked;
        self.failures.extend(other.failures);
        self.failures.truncate(SHOWN_MAX);
    }

    fn fail(&mut self, seed: u64, what: String) {
        if self.failures.len() < SHOWN_MAX {
            self.failures.push(format!("seed {seed}: {what}"));
        }
    }
}

/// Devices, what should be on them, and chance.
pub struct History {
    seed: u64,
    lies: bool,
    rng: SmallRng,
    bytes: Vec<MemoryMedia>,
    lba_bytes: u32,
    format: Format,
    model: Model,
    formatted: bool,
}

/// A store from power-on until the power is cut.
struct Life {
    power: PowerSwitch,
    /// One handle for each namespace.
    stores: Vec<Store>,
    /// Goes on with what is written back, in parts of a block.
    paced: Option<PacedStore>,
    kv: KvMemory,
    /// Writings that are open, and the names and versions that each stores.
    open: Vec<(Writing, Vec<(Name, u64)>)>,
    next_block: u32,
    keys: Vec<BlockKey>,
}

impl History {
    pub fn new(seed: u64, lies: bool) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let lba_bytes = if rng.random_bool(0.5) { 512 } else { 4096 };
        let shape = KvShape {
            layers: rng.random_range(1..=8),
            segments: rng.random_range(1..=2),
            object_bytes: *[512, 1024, 4096].choose_one(&mut rng),
            block_tokens: 16,
        };
        let devices = rng.random_range(1..=2);
        let medium = || MemoryMedia::new(4 << 20).expect("address space for the media");
        let slot = u64::from(shape.object_bytes.next_multiple_of(lba_bytes));
        // Room for some of the keys, so that files are evicted and reused all the time.
        let files = rng.random_range(6..30);
        let format = Format {
            capacity_bytes: Some(files * slot * u64::from(shape.rows())),
            group: Some(devices as u32 * rng.random_range(1..=4)),
            // Without them the promise holds on devices that do not lie.
            checksums: lies || rng.random_bool(0.7),
            // A small journal, so that it is compacted.
            namespaces_max: 4,
            overwrite: Overwrite::Anything,
            ..Format::new(StoreId(rng.random()), shape)
        };
        let bytes = (0..devices).map(|_| medium()).collect();
        let model = Model::default();
        Self { seed, lies, rng, bytes, lba_bytes, format, model, formatted: false }
    }

    pub fn run(mut self, outcome: &mut Outcome) -> Result<()> {
        for life in 0..LIVES {
            let power = PowerSwitch::default();
            // Most lives end in the middle of something, some after all of it.
            power.cut_at(match self.rng.random_range(0..10) {
                0 => self.rng.random_range(0..40),
                _ => self.rng.random_range(0..900),
            });
            self.live(life, &power, outcome)?;
            outcome.crashes += 1;
        }
        // What is left is checked once more, with power.
        self.live(LIVES, &PowerSwitch::default(), outcome)
    }

    fn live(&mut self, life: u64, power: &PowerSwitch, outcome: &mut Outcome) -> Result<()> {
        let opened = self.open(life, power);
        let mut life = match opened {
            Ok(life) => life,
            Err(_) if power.is_cut() => return Ok(()),
            Err(error) => {
                if !self.lies {
                    outcome.did_not_open += 1;
                    outcome.fail(self.seed, format!("did not open: {error:#}"));
                }
                // The next life starts anew, with a store of another name.
                self.formatted = false;
                self.format.store = StoreId(self.rng.random());
                self.model = Model::default();
                return Ok(());
            }
        };
        match self.check(&mut life, outcome) {
            Ok(()) => {}
            Err(_) if power.is_cut() => return Ok(()),
            Err(error) => return Err(error),
        }
        let steps = self.rng.random_range(5..40);
        for _ in 0..steps {
            let stepped = self.step(&mut life, outcome);
            // What the store evicted meanwhile need not be there any more.
            let stores = &life.stores;
            self.model.retain(|(namespace, key)| stores[*namespace].contains(*key));
            if power.is_cut() {
                break;
            }
            if let Err(error) = stepped
                && !self.lies
            {
                return Err(error);
            }
        }
        power.cut();
        Ok(())
    }

    fn open(&mut self, life: u64, power: &PowerSwitch) -> Result<Life> {
        let seed = self.seed.wrapping_mul(LIVES + 1).wrapping_add(life);
        let clock = SimClock::new(seed);
        let lba_bytes = self.lba_bytes;
        let faults = SimFaults { tear_bytes: Some(512), ..SimFaults::default() };
        let lying = SimFaults {
            lost_write_ppm: 2_000,
            misdirected_write_ppm: 2_000,
            rot_ppm: 2_000,
            ..faults
        };
        let quick = Latency { min_ns: 1_000, mean_ns: 2_000, ..Latency::default() };
        let config = |(at, bytes): (usize, &MemoryMedia)| {
            let options = SimOptions {
                seed: seed ^ (at as u64) << 32,
                read: quick,
                write: quick,
                flush: quick,
                volatile_cache: true,
                lba_bytes,
                faults: if self.lies { lying } else { faults },
            };
            let media = SimMedia::new(bytes.clone(), options);
            let config = EmuConfig::new(format!("emu{at}")).namespace(media, lba_bytes);
            EmuConfig { power: Some(power.clone()), ..config }
        };
        let configs = self.bytes.iter().enumerate().map(config).collect();
        let drives = Drives::simulated(EmuDomain::new("crash"), configs, &clock);
        let options = ControllerOptions {
            command_timeout: Nanos::from_millis(50),
            admin_timeout: Nanos::from_millis(50),
            abort_grace: Nanos::from_millis(5),
            // Little memory: a controller that is gone keeps its own for good.
            host_depth: 4,
            bounce_bytes: 32 << 10,
            ..ControllerOptions::default()
        };
        let mut devices = Vec::new();
        for bus in drives.buses() {
            let controller =
                nvme_driver::Controller::attach(bus, drives.clock.clone(), options.clone())?;
            devices.push(StoreDevice::new(controller));
        }
        let shape = self.format.shape;
        let kv = KvMemory::new(&*drives.domain, shape, BLOCKS);
        if !self.formatted {
            Store::format(&devices, &self.format).context("formatting")?;
            self.formatted = true;
        }
        let store = Store::open(StoreConfig {
            devices,
            clock: clock.clone(),
            executor: inline_executor(clock.clone()),
            shape,
            namespace: namespace(0),
            pool: kv.pool.clone(),
            gpu: None,
            options: self.options(),
        })?;
        let other = store.within(&namespace(1))?;
        let paced = self.has_parts().then(|| PacedStore::new(store.clone(), scheduler()));
        let (power, stores) = (power.clone(), vec![store, other]);
        Ok(Life { power, stores, paced, kv, open: Vec::new(), next_block: 0, keys: keys(0..KEYS) })
    }

    fn options(&self) -> StoreOptions {
        let dram_blocks = if self.has_dram() { DRAM_BLOCKS } else { 0 };
        StoreOptions {
            queue_depth: 16,
            iocbs: 16,
            arena_bytes: 64 << 10,
            command_timeout: Nanos::from_millis(20),
            wait_timeout: Nanos::from_millis(100),
            stop_timeout: Nanos::from_millis(100),
            virtual_time: true,
            dram_bytes: dram_blocks * self.format.shape.block_bytes(),
            dram_mode: match self.writes_back() {
                true => DramMode::WriteBack,
                false => DramMode::WriteThrough,
            },
            ..StoreOptions::default()
        }
    }

    /// Compares all that is found with the model.
    fn check(&mut self, life: &mut Life, outcome: &mut Outcome) -> Result<()> {
        let mut found = BTreeMap::new();
        for namespace in 0..2 {
            for key in life.keys.clone() {
                let name = (namespace, key);
                let held = self.read(life, &name, outcome)?;
                let wrong = self.model.judge(&name, held);
                match wrong {
                    None => {}
                    Some(Wrong::Lost | Wrong::Stale) if self.lies => {}
                    Some(Wrong::Lost | Wrong::Stale) => outcome.lost_commits += 1,
                    Some(Wrong::CameBack) if self.lies => {}
                    Some(Wrong::CameBack) => outcome.came_back += 1,
                }
                if let Some(wrong) = wrong
                    && !self.lies
                {
                    outcome.fail(self.seed, format!("{namespace}/{key}: {wrong:?}, {held:?}"));
                }
                if let Some(version) = held {
                    found.insert(name, version);
                }
            }
        }
        self.model.restart(found);
        Ok(())
    }

    /// Retrieves a block: the version it holds, all of it; `None` for a miss.
    fn read(&mut self, life: &mut Life, name: &Name, outcome: &mut Outcome) -> Result<Option<u64>> {
        let store = &life.stores[name.0];
        let prefix = store.lookup(&[name.1])?;
        if prefix.is_empty() {
            return Ok(None);
        }
        // The last block is for this alone.
        let block = BlockId(BLOCKS - 1);
        life.kv.wipe(block);
        let transfer = store.retrieve(&prefix, &[block])?;
        let layers = || (0..self.format.shape.layers).map(Layer);
        for layer in layers() {
            let ticket = store.retrieve_layer(&transfer, layer)?;
            match store.wait(ticket) {
                Ok(_) => {}
                // A checksum that does not match is a miss.
                Err(StoreError::Transfer { .. }) if !life.power.is_cut() => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        outcome.checked += 1;
        let whole = |version: &&u64| {
            layers().all(|layer| life.kv.holds(block, layer, name.1, tag(name.0, **version)))
        };
        let version = self.model.versions(name).iter().find(whole).copied();
        if version.is_none() {
            outcome.wrong_bytes += 1;
            outcome.fail(self.seed, format!("{}/{}: wrong bytes", name.0, name.1));
        }
        Ok(version)
    }

    fn step(&mut self, life: &mut Life, outcome: &mut Outcome) -> Result<()> {
        let namespace = self.rng.random_range(0..2);
        let store = life.stores[namespace].clone();
        if let Some(paced) = &mut life.paced {
            // It has no layers: the time does not matter.
            paced.poll(Duration::ZERO)?;
        }
        match self.rng.random_range(0..100) {
            0..40 => self.begin(life, namespace)?,
            40..65 => self.finish(life)?,
            65..80 => {
                if self.has_dram() {
                    store
                        .prefetch(&self.some_keys(life), Nanos(self.rng.random_range(0..50_000)))?;
                }
                let name = (namespace, life.keys[self.rng.random_range(0..KEYS as usize)]);
                self.read(life, &name, outcome)?;
            }
            80..86 => {
                store.evict(self.rng.random_range(0..4))?;
            }
            86..89 => {
                store.remove(&self.some_keys(life))?;
            }
            89..92 => {
                store.pin(&self.some_keys(life))?;
            }
            92..95 => {
                store.unpin(&life.keys)?;
            }
            95..97 => {
                store.sync_journal()?;
                self.model.sync();
            }
            97..99 => {
                match self.rng.random_bool(0.5) {
                    true => store.clear()?,
                    false => drop(store.bump_epoch()?),
                }
                self.model.drop_all(namespace);
                // What is being stored for it will not be found either.
                for (_, names) in &mut life.open {
                    names.retain(|(name, _)| name.0 != namespace);
                }
            }
            _ => life.open.clear(),
        }
        Ok(())
    }

    /// What is read comes from the devices in the others, so that they are seen to be wrong.
    fn has_dram(&self) -> bool {
        self.seed.is_multiple_of(DRAM_EVERY)
    }

    /// Whether commits are permanent only with the next sync.
    fn writes_back(&self) -> bool {
        self.has_dram()
            && self.format.checksums
            && (self.seed / DRAM_EVERY).is_multiple_of(BACK_EVERY)
    }

    fn has_parts(&self) -> bool {
        self.writes_back() && (self.seed / (DRAM_EVERY * BACK_EVERY)).is_multiple_of(PARTS_EVERY)
    }

    fn some_keys(&mut self, life: &Life) -> Vec<BlockKey> {
        let first = self.rng.random_range(0..KEYS as usize);
        let len = self.rng.random_range(1..=5);
        life.keys[first..].iter().take(len).copied().collect()
    }

    /// Computes some blocks and begins to store them.
    fn begin(&mut self, life: &mut Life, namespace: usize) -> Result<()> {
        let keys = self.some_keys(life);
        if life.next_block + keys.len() as u32 >= BLOCKS {
            // The blocks of writings in progress may not change.
            life.open.clear();
            life.stores[0].drain()?;
            life.next_block = 0;
        }
        let blocks: Vec<BlockId> = (life.next_block..).take(keys.len()).map(BlockId).collect();
        life.next_block += keys.len() as u32;
        let mut names = Vec::new();
        let store = &life.stores[namespace];
        for (key, block) in keys.iter().zip(&blocks) {
            let version = self.model.new_version();
            life.kv.fill(*block, *key, tag(namespace, version));
            self.model.begin((namespace, *key), version);
            if !store.contains(*key) {
                names.push(((namespace, *key), version));
            }
        }
        let writing = store.allocate(&keys, &blocks)?;
        if writing.written() != names.len() {
            // Files are short, or another writing has some of the keys: which is not known here.
            names.clear();
        }
        let mut layers: Vec<u32> = (0..self.format.shape.layers).collect();
        layers.shuffle(&mut self.rng);
        for layer in layers {
            let mut started = store.store_layer(&writing, Layer(layer));
            if let Err(StoreError::Busy { .. }) = started {
                store.drain()?;
                started = store.store_layer(&writing, Layer(layer));
            }
            let ticket = started?;
            if self.rng.random_bool(0.5) {
                store.wait(ticket)?;
            }
        }
        life.open.push((writing, names));
        Ok(())
    }

    /// Commits a writing, or gives it up.
    fn finish(&mut self, life: &mut Life) -> Result<()> {
        if life.open.is_empty() {
            return Ok(());
        }
        let at = self.rng.random_range(0..life.open.len());
        let (writing, names) = life.open.swap_remove(at);
        if self.rng.random_bool(0.1) {
            return Ok(());
        }
        life.stores[0].commit(writing)?;
        if self.writes_back() {
            names.into_iter().for_each(|(name, version)| self.model.publish(name, version));
            return Ok(());
        }
        self.model.sync();
        for (name, version) in names {
            self.model.acknowledge(name, version);
        }
        Ok(())
    }
}

/// Equal tokens of two tenants have different contents, so that a mix-up is seen.
fn tag(namespace: usize, version: u64) -> u64 {
    version << 1 | namespace as u64
}

fn namespace(number: usize) -> Namespace {
    Namespace { tenant_salt: vec![number as u8], ..Namespace::default() }
}

/// Lets a block be written at a time.
fn scheduler() -> Scheduler {
    let curve = || Curve::line(Duration::from_micros(80), 1e9).expect("it rises");
    let [model, gpu, engine] = ["none"; 3].map(str::to_owned);
    let setting = Setting { model, gpu, engine, drives: Vec::new() };
    let costs = IoCosts { read: curve(), write: curve(), mixed: 0.4 };
    let config = Config { write_depth_bytes: 1, ..Config::default() };
    Scheduler::new(config, SlackTable::new(setting, costs))
}

/// One of a list.
trait ChooseOne<T> {
    fn choose_one(&self, rng: &mut SmallRng) -> &T;
}

impl<T, const N: usize> ChooseOne<T> for [T; N] {
    fn choose_one(&self, rng: &mut SmallRng) -> &T {
        &self[rng.random_range(0..N)]
    }
}
