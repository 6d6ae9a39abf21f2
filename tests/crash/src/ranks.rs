//! One seed of a store in several processes: a catalog and two ranks that crash independently.
//!
//! The catalog and each rank have their own devices, process and power. They exchange the files to
//! write and the results as an engine's connector does.

mod process;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use anyhow::{Context as _, Result, bail};
use kv_catalog::NamespaceId;
use nvme_emu::SimFaults;
use objstore::{
    BlockId, BlockKey, Codec, DurableCatalog, Format, JobId, KvShape, Layer, Overwrite, Part,
    RankId, Reported, Store, StoreError, StoreId, Usage, open_catalog,
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::IndexedRandom as _};
use ripieno_testkit::{keys, useful};

use self::process::{
    BLOCKS, Head, Meanwhile, OpenWrite, RANKS, Rank, Stage, begin, lock, options, tag,
};
use crate::{
    change::{Change, Target as _, some_keys},
    history::namespace,
    machine::{Machine, Powered, Turns, ills},
    model::{Held, Model, Name, SPACES, Wrong},
    outcome::Outcome,
};

const KEYS: u32 = 24;
const WRITES_MAX: usize = 4;
/// Steps of one history.
const STEPS: u32 = 700;

/// A catalog, two ranks, and randomness.
pub struct RankHistory {
    seed: u64,
    rng: SmallRng,
    clock: Arc<Turns>,
    head: Head,
    ranks: [Rank; RANKS],
    shape: KvShape,
    model: Model,
    keys: Vec<BlockKey>,
    writes: Vec<OpenWrite>,
    free: Vec<BlockId>,
    lives: u64,
    /// True in the last check: nothing fails any more.
    is_last: bool,
}

impl RankHistory {
    pub fn new(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let lba_bytes = if rng.random_bool(0.5) { 512 } else { 4096 };
        let shape = KvShape {
            layers: rng.random_range(1..=4),
            segments: rng.random_range(1..=2),
            object_bytes: *[512, 4096].choose(&mut rng).expect("two"),
            block_tokens: 16,
        };
        let devices = rng.random_range(1..=2);
        let slot = u64::from(shape.object_bytes.next_multiple_of(lba_bytes));
        let files = rng.random_range(6..24);
        let codec = if seed.is_multiple_of(2) { Codec::Exp3 } else { Codec::None };
        let format = |part| Format {
            part,
            codec: useful(codec, &shape, lba_bytes),
            capacity_bytes: Some(files * slot * u64::from(shape.rows())),
            group: Some(devices as u32 * 2),
            checksums: seed % 8 < 4,
            namespaces_max: 4,
            overwrite: Overwrite::Anything,
            ..Format::new(StoreId(seed.to_le_bytes().repeat(2).try_into().expect("16")), shape)
        };
        let rank = |rank: usize| Rank {
            machine: Machine::new(devices, lba_bytes),
            format: format(Part::Rank { rank: rank as u32, ranks: RANKS as u32 }),
            powered: None,
            worker: None,
        };
        // The ranks determine the number of files.
        let part = Part::Catalog { ranks: RANKS as u32, files: 0 };
        let head = Head {
            machine: Machine::new(1, lba_bytes),
            format: Format { capacity_bytes: None, ..format(part) },
            powered: None,
            catalog: None,
            read_only: false,
        };
        Self {
            seed,
            clock: Turns::new(seed),
            head,
            ranks: [rank(0), rank(1)],
            shape,
            model: Model::default(),
            keys: keys(0..KEYS),
            writes: Vec::new(),
            free: (0..BLOCKS - 1).map(BlockId).collect(),
            lives: 0,
            is_last: false,
            rng,
        }
    }

    pub fn run(mut self, outcome: &mut Outcome) -> Result<()> {
        let failed = outcome.failed();
        self.format(outcome)?;
        for _ in 0..STEPS {
            self.start(outcome)?;
            let stepped = self.step(outcome);
            self.settle(outcome, stepped)?;
            if outcome.failed() > failed {
                return Ok(());
            }
        }
        // A last check without faults.
        self.is_last = true;
        self.crash_head(outcome);
        (0..RANKS).for_each(|rank| self.crash_rank(rank, outcome));
        self.start(outcome)
    }

    /// Handles processes that have lost their power, and reports unexplained errors.
    fn settle(&mut self, outcome: &mut Outcome, stepped: Result<()>) -> Result<()> {
        if let Some(catalog) = &self.head.catalog {
            self.model.retain(|name| catalog.contains(name));
        }
        let is_cut = |powered: &Option<Powered>| {
            powered.as_ref().is_some_and(|powered| powered.power.is_cut())
        };
        let mut excused = self.head.read_only;
        excused |= self.head.powered.as_mut().is_some_and(|powered| powered.faults().any());
        for rank in 0..RANKS {
            excused |= self.ranks[rank].faults();
            if is_cut(&self.ranks[rank].powered) {
                excused = true;
                self.crash_rank(rank, outcome);
            }
        }
        if is_cut(&self.head.powered) {
            excused = true;
            self.crash_head(outcome);
        }
        if self.head.read_only && self.rng.random_bool(0.2) {
            self.crash_head(outcome);
        }
        match stepped {
            Err(error) if !excused => {
                outcome.note_state(self.seed, format!("no reason to fail: {error:#}"));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn power_on(
        machine: &Machine,
        name: &str,
        life: u64,
        rng: &mut SmallRng,
        clock: &Arc<Turns>,
        is_last: bool,
    ) -> Powered {
        let faults = if is_last { SimFaults::default() } else { ills(rng, false, false) };
        let powered = machine.power_on(name, rng.random::<u64>() ^ life, faults, clock);
        if !is_last {
            powered.power.cut_at(rng.random_range(0..400));
        }
        powered
    }

    fn format(&mut self, outcome: &mut Outcome) -> Result<()> {
        let mut files = u32::MAX;
        for (at, rank) in self.ranks.iter_mut().enumerate() {
            let powered =
                rank.machine.power_on("rank", at as u64, SimFaults::default(), &self.clock);
            let devices = powered.attach()?;
            files = files.min(Store::plan(&devices, &rank.format)?[0].layout.files);
            Store::format(&devices, &rank.format)?;
        }
        self.head.format.part = Part::Catalog { ranks: RANKS as u32, files };
        let powered = self.head.machine.power_on("head", 9, SimFaults::default(), &self.clock);
        Store::format(&powered.attach()?, &self.head.format)?;
        // A rank with fewer files must be rejected.
        let id =
            |files| RankId { store: self.head.format.store, rank: 0, ranks: RANKS as u32, files };
        let rank = &mut self.ranks[0];
        let powered = rank.machine.power_on("rank", 8, SimFaults::default(), &self.clock);
        if rank.open(&powered, id(files + 1)).is_ok() {
            outcome.note_state(self.seed, "a rank with too few files was opened".to_owned());
        }
        Ok(())
    }

    /// Starts the processes that are down.
    fn start(&mut self, outcome: &mut Outcome) -> Result<()> {
        let was_down = self.head.catalog.is_none();
        if was_down {
            self.start_head(outcome)?;
        }
        let Some(catalog) = self.head.catalog.clone() else { return Ok(()) };
        for at in 0..RANKS {
            if self.ranks[at].worker.is_some()
                || !(self.is_last || was_down) && self.rng.random_bool(0.5)
            {
                continue;
            }
            self.start_rank(at, RankId::of(catalog.superblock(), at as u32), outcome);
        }
        let is_up = self.ranks.iter().all(|rank| rank.worker.is_some());
        match was_down && is_up {
            true => self.check(&catalog, outcome),
            // Without all ranks nothing can be checked: the catalog must be started again later.
            false if was_down => {
                self.crash_head(outcome);
                Ok(())
            }
            false => Ok(()),
        }
    }

    fn start_rank(&mut self, at: usize, id: RankId, outcome: &mut Outcome) {
        self.lives += 1;
        let Self { ranks, rng, clock, lives, is_last, .. } = self;
        let rank = &mut ranks[at];
        let mut powered = Self::power_on(&rank.machine, "rank", *lives, rng, clock, *is_last);
        match rank.open(&powered, id) {
            Ok(worker) => {
                rank.powered = Some(powered);
                rank.worker = Some(Arc::new(Mutex::new(worker)));
            }
            Err(error) => {
                if !powered.power.is_cut() && !powered.faults().any() {
                    outcome.did_not_open += 1;
                    outcome.describe(self.seed, format!("rank {at} did not open: {error:#}"));
                }
                powered.cut();
                outcome.faults.merge(powered.faults());
            }
        }
    }

    fn start_head(&mut self, outcome: &mut Outcome) -> Result<()> {
        self.lives += 1;
        let Self { head, rng, clock, lives, is_last, .. } = self;
        let mut powered = Self::power_on(&head.machine, "head", *lives, rng, clock, *is_last);
        let mut devices = powered.attach()?;
        let device = devices.pop().context("it has one device")?;
        match open_catalog(&device, &options(), |_, _| {}) {
            Ok(catalog) => {
                for space in 0..SPACES {
                    catalog.with(|catalog| catalog.namespace(&namespace(space)))?;
                }
                head.read_only = false;
                head.powered = Some(powered);
                head.catalog = Some(Arc::new(catalog));
            }
            Err(error) => {
                if !powered.power.is_cut() && !powered.faults().any() {
                    outcome.did_not_open += 1;
                    let what = format!("the catalog did not open: {error:#}");
                    outcome.describe(self.seed, what);
                }
                powered.cut();
                outcome.faults.merge(powered.faults());
            }
        }
        Ok(())
    }

    fn crash_head(&mut self, outcome: &mut Outcome) {
        self.head.catalog = None;
        if let Some(mut powered) = self.head.powered.take() {
            powered.cut();
            outcome.faults.merge(powered.faults());
            outcome.crashes += 1;
        }
        // The ranks must not write to files that a new catalog allocates to other blocks.
        for write in std::mem::take(&mut self.writes) {
            self.free.extend(write.own.iter().map(|(.., block)| *block));
            for (rank, stage) in self.ranks.iter().zip(write.stages) {
                if let (Some(worker), Stage::Moving(job)) = (&rank.worker, stage) {
                    lock(worker).plane.abandon(job);
                }
            }
        }
        for rank in 0..RANKS {
            let Some(worker) = self.ranks[rank].worker.clone() else { continue };
            let drained = lock(&worker).plane.drain();
            if drained.is_err() {
                self.crash_rank(rank, outcome);
            }
        }
    }

    fn crash_rank(&mut self, rank: usize, outcome: &mut Outcome) {
        self.ranks[rank].crash(outcome);
        for at in 0..self.writes.len() {
            if self.writes[at].stages[rank] != Stage::Reported {
                self.report(at, rank, None);
            }
        }
        self.writes.retain(|write| !write.own.is_empty());
    }

    /// Reports the result of a rank's part of a write to the catalog.
    fn report(&mut self, at: usize, rank: usize, sums: Option<&[u32]>) {
        let Some(catalog) = &self.head.catalog else { return };
        let write = &mut self.writes[at];
        write.stages[rank] = Stage::Reported;
        let reported = catalog.with(|catalog| match sums {
            Some(sums) => catalog.written(write.id, rank as u32, sums),
            None => catalog.failed(write.id, rank as u32),
        });
        match reported {
            Ok(Reported::All) => write.is_whole = true,
            Ok(Reported::Failed) => {
                let names: Vec<_> = write.own.iter().map(|own| (own.0, own.1)).collect();
                self.model.give_up(&names);
                self.free.extend(write.own.drain(..).map(|(.., block)| block));
            }
            Ok(Reported::Waiting) => {}
            Err(error) => panic!("the catalog refused a report: {error}"),
        }
    }

    fn step(&mut self, outcome: &mut Outcome) -> Result<()> {
        outcome.steps += 1;
        let Some(catalog) = self.head.catalog.clone() else { return Ok(()) };
        let rank = self.rng.random_range(0..RANKS);
        match self.rng.random_range(0..100) {
            0..15 => self.begin(&catalog),
            15..35 => self.move_part(rank)?,
            35..50 => self.end_parts(rank)?,
            50..65 => self.commit(&catalog, outcome)?,
            65..78 => {
                let name = (
                    self.rng.random_range(0..SPACES),
                    *self.keys.choose(&mut self.rng).context("keys")?,
                );
                let findable = self.model.findable(&name);
                let held = self.read(&catalog, &name, outcome)?;
                if let Held::Version(version) = held
                    && !findable.contains(&version)
                {
                    outcome.note(self.seed, &name, Wrong::CameBack, held);
                }
            }
            78..90 => {
                let space = self.rng.random_range(0..SPACES);
                let done = Change::draw(&mut self.rng, &self.keys).make(space, &catalog);
                done.note(&mut self.model);
            }
            90..95 => self.sync(&catalog, outcome).map(|_| ())?,
            95 => self.crash_rank(rank, outcome),
            96 => self.crash_head(outcome),
            97 if self.seed % 16 < 8 => {
                if let Some(powered) = &mut self.ranks[rank].powered {
                    powered.blackout(self.rng.random_range(0..powered.emus.len()));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Allocates files to some blocks in the catalog.
    fn begin(&mut self, catalog: &DurableCatalog) {
        if self.writes.len() >= WRITES_MAX || self.free.len() < 5 {
            return;
        }
        let (space, keys) =
            (self.rng.random_range(0..SPACES), some_keys(&mut self.rng, &self.keys));
        let versions: Vec<_> =
            keys.iter().map(|key| ((space, *key), self.model.new_version())).collect();
        let Some(write) = begin(catalog, &versions, &mut self.free) else { return };
        write.own.iter().for_each(|own| self.model.begin(own.0, own.1));
        self.writes.push(write);
    }

    /// Starts a rank's part of a write.
    fn move_part(&mut self, rank: usize) -> Result<()> {
        let Some(worker) = self.ranks[rank].worker.clone() else { return Ok(()) };
        let idle = |write: &&mut OpenWrite| write.stages[rank] == Stage::Idle;
        let Some(write) = self.writes.iter_mut().find(idle) else { return Ok(()) };
        lock(&worker).store(rank, write)?;
        Ok(())
    }

    /// Ends some of a rank's started parts, with one flush, and reports them.
    fn end_parts(&mut self, rank: usize) -> Result<()> {
        let Some(worker) = self.ranks[rank].worker.clone() else { return Ok(()) };
        let mut parts = Vec::new();
        for (at, write) in self.writes.iter().enumerate() {
            if let Stage::Moving(job) = write.stages[rank]
                && self.rng.random_bool(0.7)
            {
                parts.push((at, job));
            }
        }
        let jobs: Vec<JobId> = parts.iter().map(|(_, job)| *job).collect();
        let ended = match jobs.is_empty() {
            true => return Ok(()),
            false => lock(&worker).end(&jobs),
        };
        let powered = self.ranks[rank].powered.as_ref();
        if powered.is_none_or(|powered| powered.power.is_cut()) {
            // There is no process left to report.
            return Ok(());
        }
        match ended {
            Ok(ended) => {
                for ((at, _), sums) in parts.into_iter().zip(ended) {
                    self.report(at, rank, sums.as_deref());
                }
            }
            Err(error) => {
                parts.into_iter().for_each(|(at, _)| self.report(at, rank, None));
                self.writes.retain(|write| !write.own.is_empty());
                return Err(error.into());
            }
        }
        self.writes.retain(|write| !write.own.is_empty());
        Ok(())
    }

    /// Commits a write that all ranks have reported.
    fn commit(&mut self, catalog: &Arc<DurableCatalog>, outcome: &mut Outcome) -> Result<()> {
        let Some(at) = self.writes.iter().position(|write| write.is_whole) else {
            // An incomplete write must be rejected.
            let Some(write) = self.writes.first() else { return Ok(()) };
            if catalog.with(|catalog| catalog.commit(write.id)).is_ok() {
                bail!("a write was committed that a rank has not reported");
            }
            return Ok(());
        };
        let write = self.writes.remove(at);
        let names: Vec<_> = write.own.iter().map(|own| (own.0, own.1)).collect();
        self.free.extend(write.own.iter().map(|(.., block)| *block));
        self.model.try_to(&names);
        catalog.with(|catalog| catalog.commit(write.id))?;
        let after_fault = self.ranks.iter_mut().any(Rank::faults);
        for (name, version) in names {
            if catalog.contains(&name) {
                self.model.publish(name, version, false, after_fault);
            }
        }
        self.sync(catalog, outcome)
    }

    /// Syncs the catalog while other blocks are allocated and stored.
    fn sync(&mut self, catalog: &Arc<DurableCatalog>, outcome: &mut Outcome) -> Result<()> {
        let missing = self.model.missing(|name| catalog.contains(name));
        let (space, keys) =
            (self.rng.random_range(0..SPACES), some_keys(&mut self.rng, &self.keys));
        let versions: Vec<_> =
            keys.iter().map(|key| ((space, *key), self.model.new_version())).collect();
        versions.iter().for_each(|(name, version)| self.model.begin(*name, *version));
        let meanwhile = Meanwhile {
            catalog: catalog.clone(),
            workers: self.ranks.each_ref().map(|rank| rank.worker.clone()),
            powers: self
                .ranks
                .each_ref()
                .map(|rank| rank.powered.as_ref().map(|powered| powered.power.clone())),
            pauses: self.rng.random_range(0..20),
            versions,
            free: std::mem::take(&mut self.free),
            begun: None,
        };
        let meanwhile = Arc::new(Mutex::new(meanwhile));
        let turn = meanwhile.clone();
        let synced = match self.rng.random_bool(0.6) {
            true => self.clock.during(move || lock(&turn).turn(), || catalog.sync()),
            false => catalog.sync(),
        };
        let mut meanwhile = lock(&meanwhile);
        self.free = std::mem::take(&mut meanwhile.free);
        match meanwhile.begun.take() {
            Some(write) => {
                outcome.meanwhile += 1;
                let is_own = |name: &&(Name, u64)| write.own.iter().any(|own| own.1 == name.1);
                let others: Vec<_> =
                    meanwhile.versions.iter().filter(|name| !is_own(name)).copied().collect();
                self.model.give_up(&others);
                self.writes.push(write);
            }
            None => self.model.give_up(&meanwhile.versions),
        }
        match synced {
            Ok(()) if self.head.read_only => {
                outcome.false_acks += 1;
                let what = "a catalog that takes no records acknowledged some";
                outcome.describe(self.seed, what.to_owned());
            }
            Ok(()) => self.model.sync(&missing, |name| catalog.contains(name)),
            Err(error) => {
                self.head.read_only = true;
                return Err(StoreError::from(error).into());
            }
        }
        Ok(())
    }

    /// Reads a block from both ranks.
    fn read(
        &mut self,
        catalog: &DurableCatalog,
        name: &Name,
        outcome: &mut Outcome,
    ) -> Result<Held> {
        let id = NamespaceId(name.0 as u32);
        let reference = catalog.with(|catalog| catalog.acquire(id, &[name.1]))?;
        let Some(file) = reference.files.first().copied() else {
            catalog.with(|catalog| catalog.release(reference.id))?;
            return Ok(Held::Nothing);
        };
        let sums = catalog.with(|catalog| catalog.checksums(file).to_vec());
        let block = BlockId(BLOCKS - 1);
        let rows = sums.len() / RANKS;
        let (mut found, mut readable) = ([None; RANKS], true);
        for (rank, found) in found.iter_mut().enumerate() {
            let Some(worker) = self.ranks[rank].worker.clone() else { continue };
            let worker = &mut *lock(&worker);
            let sums = &sums[rank * rows..][..rows];
            let read = worker.read(file, block, sums);
            if !matches!(read, Ok(true)) {
                readable = false;
                let cut = self.ranks[rank].powered.as_ref().is_none_or(|it| it.power.is_cut());
                if !cut {
                    let lost = worker.plane.take_lost().unwrap_or_default().into_iter();
                    catalog.with(|catalog| lost.for_each(|file| catalog.lost(file)));
                }
                if !cut && !self.ranks[rank].faults() {
                    outcome.lost_commits += 1;
                    let what = format!("{}/{}: rank {rank} cannot read it", name.0, name.1);
                    outcome.describe(self.seed, what);
                }
                continue;
            }
            outcome.checked += 1;
            let layers = || (0..self.shape.layers).map(Layer);
            let whole = |version: &u64| {
                let tag = tag(rank, name.0, *version);
                layers().all(|layer| worker.kv.holds(block, layer, name.1, tag))
            };
            *found = self.model.versions(name).find(whole);
            if found.is_none() {
                outcome.note_bytes(self.seed, name);
                readable = false;
            }
        }
        catalog.with(|catalog| catalog.release(reference.id))?;
        let [a, b] = found;
        if a.is_some() && b.is_some() && a != b {
            outcome.note_bytes(self.seed, name);
        }
        Ok(match a.or(b) {
            Some(version) if readable => Held::Version(version),
            _ => Held::Unreadable,
        })
    }

    /// Compares everything that the catalog finds after it was opened.
    fn check(&mut self, catalog: &Arc<DurableCatalog>, outcome: &mut Outcome) -> Result<()> {
        let mut found = BTreeMap::new();
        let is_cut = |history: &Self| {
            let powers = history.ranks.iter().map(|rank| &rank.powered);
            powers
                .chain([&history.head.powered])
                .any(|it| it.as_ref().is_none_or(|powered| powered.power.is_cut()))
        };
        for space in 0..SPACES {
            for key in self.keys.clone() {
                let name = (space, key);
                let held = self.read(catalog, &name, outcome)?;
                if is_cut(self) {
                    self.crash_head(outcome);
                    return Ok(());
                }
                let excused = held == Held::Unreadable && self.ranks.iter_mut().any(Rank::faults);
                if let (Some(wrong), false) = (self.model.judge(&name, held), excused) {
                    outcome.note(self.seed, &name, wrong, held);
                }
                found.insert(name, held);
            }
        }
        let usage = |space| catalog.with(|catalog| catalog.usage(NamespaceId(space)));
        let usages: [Usage; SPACES] = [usage(0)?, usage(1)?];
        for (space, usage) in usages.iter().enumerate() {
            if let Some(wrong) = self.model.judge_space(space, usage) {
                outcome.note_state(self.seed, format!("namespace {space}: {wrong}"));
            }
        }
        self.model.restart(&found, &usages);
        Ok(())
    }
}
