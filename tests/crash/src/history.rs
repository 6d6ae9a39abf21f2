//! One seed: devices, and the lives of a store on them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use anyhow::{Result, anyhow};
use nvme_driver::Nanos;
use nvme_emu::SimFaults;
use objstore::{
    BlockId, Codec, Durability, Format, KvShape, Namespace, Overwrite, PolicyKind, Store,
    StoreConfig, StoreError, StoreId, StoreOptions,
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::IndexedRandom as _};
use ripieno_testkit::{KvMemory, inline_executor, keys, useful};

use crate::{
    machine::{Killed, Machine, Powered, Turns, ills},
    model::{Model, SPACES},
    offline::Offline,
    outcome::Outcome,
    session::Session,
};

/// Blocks of the engine's pool.
pub const BLOCKS: u32 = 40;
/// Size of the host memory cache in blocks; one in [`DRAM_EVERY`] histories has one.
const DRAM_BLOCKS: u64 = 10;
const DRAM_EVERY: u64 = 3;
/// One in this many histories has a few long lives: seeds with the remainder [`LONG`].
const LONG_EVERY: u64 = 50;
const LONG: u64 = 10;
/// Maximum number of consecutive processes in one life.
const PROCESSES_MAX: u32 = 4;

/// Devices, their expected contents, and randomness.
pub struct History {
    pub seed: u64,
    pub lies: bool,
    pub rng: SmallRng,
    pub machine: Machine,
    pub format: Format,
    pub model: Model,
    pub offline: Offline,
    /// True if devices may lose power in some lives while their process continues.
    pub has_blackouts: bool,
    durability: Durability,
    policy: PolicyKind,
    deallocate: bool,
    run_bytes: u32,
}

/// End of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Power cut.
    Cut,
    /// Closed the store.
    Closed,
    /// Killed while its devices kept their power.
    Killed,
    /// Failed to open or close its store because of a fault.
    Failed,
}

impl History {
    pub fn new(seed: u64, lies: bool) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let long = seed % LONG_EVERY == LONG;
        let lba_bytes = if rng.random_bool(0.5) { 512 } else { 4096 };
        let size = |rng: &mut SmallRng| *[512, 1024, 4096].choose(rng).expect("three");
        let shape = KvShape {
            layers: rng.random_range(1..=if long { 2 } else { 8 }),
            segments: rng.random_range(1..=2),
            object_bytes: if long { 512 } else { size(&mut rng) },
            block_tokens: 16,
        };
        let devices = rng.random_range(1..=2);
        let slot = u64::from(shape.object_bytes.next_multiple_of(lba_bytes));
        // Room for some of the keys, so that files are constantly evicted and reused.
        let files = if long { rng.random_range(60..140) } else { rng.random_range(6..30) };
        let codec = if rng.random_bool(0.5) { Codec::Exp3 } else { Codec::None };
        let format = Format {
            codec: useful(codec, &shape, lba_bytes),
            capacity_bytes: Some(files * slot * u64::from(shape.rows())),
            group: Some(devices as u32 * rng.random_range(1..=4)),
            // Without checksums, the guarantees hold for devices that do not lie.
            checksums: lies || rng.random_bool(0.7),
            // A small journal, so that it is compacted.
            namespaces_max: 4,
            overwrite: Overwrite::Anything,
            ..Format::new(StoreId(rng.random()), shape)
        };
        Self {
            seed,
            lies,
            machine: Machine::new(devices, lba_bytes),
            format,
            model: Model::default(),
            offline: Offline::default(),
            has_blackouts: !lies && rng.random_bool(0.3),
            durability: if rng.random_bool(0.8) { Durability::Auto } else { Durability::Fua },
            policy: *PolicyKind::ALL.choose(&mut rng).expect("there are some"),
            deallocate: rng.random_bool(0.8),
            run_bytes: *[4 << 10, 256 << 10].choose(&mut rng).expect("two"),
            rng,
        }
    }

    fn is_long(&self) -> bool {
        self.seed % LONG_EVERY == LONG
    }

    pub fn run(mut self, outcome: &mut Outcome) -> Result<()> {
        let lives = if self.is_long() { 2 } else { 8 };
        let failed = outcome.failed();
        for life in 0..lives {
            // Most lives end in the middle of an operation, some after all of them.
            let moments = match self.rng.random_range(0..10) {
                0 => self.rng.random_range(0..40),
                _ if self.is_long() => self.rng.random_range(10_000..60_000),
                _ => self.rng.random_range(0..1200),
            };
            self.live(life, Some(moments), outcome)?;
            outcome.crashes += 1;
            if outcome.failed() > failed {
                // Later failures are consequences of this one.
                return Ok(());
            }
        }
        // A last check, with power and without faults.
        self.live(lives, None, outcome)
    }

    /// Runs one life, from power-on until the power is cut.
    fn live(&mut self, life: u64, moments: Option<u64>, outcome: &mut Outcome) -> Result<()> {
        let seed = self.seed.wrapping_mul(16).wrapping_add(life);
        let clock = Turns::new(seed);
        let is_long = self.is_long();
        let faults = match moments {
            Some(_) => ills(&mut self.rng, self.lies, is_long),
            None => SimFaults::default(),
        };
        self.plan_offline(moments.is_some());
        // Formatting takes fewer than two hundred moments.
        let is_early = !self.offline.is_formatted && self.rng.random_bool(0.5);
        let moments = match is_early {
            true => moments.map(|_| self.rng.random_range(0..200)),
            false => moments,
        };
        let mut powered = self.machine.power_on("emu", seed, faults, &clock);
        if let Some(moments) = moments {
            powered.power.cut_at(moments);
        }
        for _ in 0..if is_long { 3 * PROCESSES_MAX } else { PROCESSES_MAX } {
            let ended = self.process(&mut powered, moments.is_none(), outcome);
            let ended = match ended {
                Err(_) if powered.power.is_cut() => End::Cut,
                Err(_) if self.lies || powered.faults().any() => End::Failed,
                ended => ended?,
            };
            match ended {
                End::Killed => outcome.kills += 1,
                End::Closed => outcome.closes += 1,
                End::Cut | End::Failed => {}
            }
            if ended == End::Cut || moments.is_none() {
                break;
            }
        }
        powered.cut();
        outcome.faults.merge(powered.faults());
        Ok(())
    }

    /// Runs a process that opens the store, uses it, and ends.
    fn process(&mut self, powered: &mut Powered, last: bool, outcome: &mut Outcome) -> Result<End> {
        let opened = self.open(powered, outcome);
        let mut session = match opened {
            Ok(session) => session,
            Err(_) if powered.power.is_cut() => return Ok(End::Cut),
            // Retry, or restart the machine: a device may have failed permanently.
            Err(_) if powered.faults().any() && !self.lies => {
                return Ok(*[End::Cut, End::Failed].choose(&mut self.rng).expect("two"));
            }
            Err(error) => {
                if !self.lies {
                    outcome.did_not_open += 1;
                    outcome.describe(self.seed, format!("did not open: {error:#}"));
                }
                // The next process starts over with a new store.
                self.offline = Offline::default();
                self.format.store = StoreId(self.rng.random());
                self.model = Model::default();
                return Ok(End::Failed);
            }
        };
        self.check(&mut session, powered, outcome)?;
        if last {
            return Ok(End::Cut);
        }
        let run = AssertUnwindSafe(|| self.run_process(&mut session, powered, outcome));
        let ended = catch_unwind(run);
        powered.clock.kill_in(None);
        let meanwhile = session.meanwhile.take();
        match ended {
            Ok(ended) => {
                match ended {
                    // Operations in flight are not completed in order.
                    Ok(End::Cut) => powered.cut(),
                    Ok(End::Killed) => powered.reset(),
                    _ => {}
                }
                ended
            }
            Err(panic) if panic.is::<Killed>() => {
                for done in meanwhile {
                    done.note(&mut self.model);
                }
                self.model.retain(|name| session.contains(name));
                powered.reset();
                // Leaked, because a killed process runs no destructors.
                std::mem::forget(session);
                Ok(End::Killed)
            }
            Err(panic) => resume_unwind(panic),
        }
    }

    fn run_process(
        &mut self,
        session: &mut Session,
        powered: &mut Powered,
        outcome: &mut Outcome,
    ) -> Result<End> {
        let steps = match self.is_long() {
            true => self.rng.random_range(2_000..10_000),
            false => self.rng.random_range(10..150),
        };
        let how = [End::Cut, End::Cut, End::Closed, End::Killed];
        let how = *how.choose(&mut self.rng).expect("there are some");
        let failed = outcome.failed();
        let kill_at = if how == End::Killed { self.rng.random_range(0..steps) } else { steps };
        for step in 0..steps {
            if step == kill_at {
                powered.clock.kill_in(Some(self.rng.random_range(0..150)));
            }
            let stepped = self.step(session, powered, outcome);
            let meanwhile = session.meanwhile.take();
            outcome.meanwhile += meanwhile.len() as u64;
            let noted = self.note(session, meanwhile);
            // Blocks that the store evicted meanwhile may be absent.
            self.model.retain(|name| session.contains(name));
            self.model.prune(64);
            if powered.power.is_cut() || outcome.failed() > failed {
                return Ok(End::Cut);
            }
            if session.read_only && self.rng.random_bool(0.05) {
                return self.close(session, powered);
            }
            if let Err(error) = stepped.and(noted)
                && !(self.lies || session.read_only || powered.faults().any())
            {
                outcome.note_state(self.seed, format!("no reason to fail: {error:#}"));
                return Ok(End::Cut);
            }
        }
        match how {
            End::Closed => self.close(session, powered),
            // It hangs until the power fails.
            _ => Ok(how),
        }
    }

    fn close(&mut self, session: &mut Session, powered: &mut Powered) -> Result<End> {
        session.end_all();
        let store = session.stores[0].clone();
        let drained = store.plane().drain();
        self.model.retain(|name| session.contains(name));
        let missing = self.model.missing(|name| session.contains(name));
        let closed = drained.and_then(|()| store.close());
        if powered.power.is_cut() {
            return Ok(End::Cut);
        }
        match closed {
            Ok(_) if session.read_only => {
                Err(anyhow!("a store that takes no writes said that all is permanent"))
            }
            Ok(_) => {
                // A closed store finds nothing, and its last record is final.
                self.model.sync(&missing, |name| !missing.contains(name));
                Ok(End::Closed)
            }
            Err(_) if session.read_only || powered.faults().any() => Ok(End::Failed),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the store for a process, after creating it if there is none.
    fn open(&mut self, powered: &mut Powered, outcome: &mut Outcome) -> Result<Session> {
        self.prepare(powered, outcome)?;
        let kv = KvMemory::new(&*powered.domain, self.format.shape, BLOCKS);
        let store = match self.open_store(powered, &kv) {
            Err(error) => self.repair(powered, &kv, error, outcome)?,
            Ok(store) => store,
        };
        self.opened(&store)?;
        let other = store.within(&namespace(1))?;
        Ok(Session {
            stores: vec![store, other],
            kv,
            keys: keys(0..if self.is_long() { 100 } else { 24 }),
            writers: Vec::new(),
            readers: Vec::new(),
            free: (0..BLOCKS - 1).map(BlockId).collect(),
            used: Vec::new(),
            read_only: false,
            meanwhile: Default::default(),
        })
    }

    pub fn open_store(&self, powered: &Powered, kv: &KvMemory) -> Result<Store, StoreError> {
        let clock = powered.clock.clone();
        Store::open(StoreConfig {
            devices: powered
                .attach()
                .map_err(|error| StoreError::Failed { cause: format!("{error:#}") })?,
            clock: clock.clone(),
            executor: inline_executor(clock),
            shape: self.format.shape,
            namespace: namespace(0),
            pool: kv.pool.clone(),
            gpu: None,
            options: self.options(),
        })
    }

    fn options(&self) -> StoreOptions {
        StoreOptions {
            depth: 16,
            iocbs: 16,
            arena_bytes: 64 << 10,
            run_bytes: self.run_bytes,
            command_timeout: Nanos::from_millis(20),
            wait_timeout: Nanos::from_millis(100),
            stop_timeout: Nanos::from_millis(100),
            durability: self.durability,
            policy: self.policy,
            deallocate: self.deallocate,
            virtual_time: true,
            dram: self.dram_bytes(),
            ..StoreOptions::default()
        }
    }

    pub fn dram_bytes(&self) -> u64 {
        let dram_blocks = if self.has_dram() { DRAM_BLOCKS } else { 0 };
        dram_blocks * self.format.shape.block_bytes()
    }

    /// Returns true with a host memory cache. The other histories detect corruption on the devices.
    pub fn has_dram(&self) -> bool {
        self.seed.is_multiple_of(DRAM_EVERY)
    }
}

pub fn namespace(number: usize) -> Namespace {
    assert!(number < SPACES);
    Namespace { tenant_salt: vec![number as u8], ..Namespace::default() }
}
