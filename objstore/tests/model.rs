//! Random operations against a store, compared with a model: every byte that is read, and the sets
//! of found, evicted and free blocks. `RIPIENO_SOAK=100` runs 100 times as many seeds.

#![allow(clippy::print_stdout, reason = "a failing test shows its seed")]

use crate::stack;

use std::collections::BTreeSet;

use nvme_emu::{FaultAction, FaultPlan, FaultRule, FaultWhen, LbaRange};
use objstore::{
    BlockId, BlockKey, Codec, Layer, LoadRequest, Order, Prefix, StoreError, StoreRequest,
};
use rand::{Rng, SeedableRng, rngs::SmallRng, seq::SliceRandom};
use ripieno_testkit::seeds;
use stack::{Plan, READ_ERROR, Stack, WRITE_FAULT, keys};

const KEYS: usize = 40;
/// Blocks are allocated round-robin, so that no two operations in flight share one.
const BLOCKS: u32 = 256;

/// Handles that a caller holds across operations.
enum Held {
    Prefix(Vec<BlockKey>, Prefix),
    Load(Vec<(BlockKey, BlockId)>, LoadRequest),
    Store(StoreRequest),
}

struct World {
    stack: Stack,
    rng: SmallRng,
    all: Vec<BlockKey>,
    /// Committed keys that have not been seen to be evicted.
    model: BTreeSet<BlockKey>,
    held: Vec<Held>,
    /// Keys that were removed at some time, perhaps while a prefix holds them.
    removed: BTreeSet<BlockKey>,
    next_block: u32,
    /// Set if devices fail sometimes.
    faults: bool,
    failures: u32,
    checked: u32,
    read_only: bool,
}

impl World {
    fn new(seed: u64, plan: &Plan, faults: bool) -> Self {
        let plan = Plan { seed, blocks: BLOCKS, ..plan.clone() };
        Self {
            stack: Stack::new(&plan),
            rng: SmallRng::seed_from_u64(seed),
            all: keys(0..KEYS as u32),
            model: BTreeSet::new(),
            held: Vec::new(),
            removed: BTreeSet::new(),
            next_block: 0,
            faults,
            failures: 0,
            checked: 0,
            read_only: false,
        }
    }

    /// Returns a run of keys that starts at one of a few places, as requests share their heads.
    fn request(&mut self) -> Vec<BlockKey> {
        let first = self.rng.random_range(0..4) * 10;
        let len = self.rng.random_range(1..=10);
        self.all[first..first + len].to_vec()
    }

    fn blocks(&mut self, count: usize) -> Vec<BlockId> {
        if self.next_block + count as u32 > BLOCKS {
            // Held transfers would use blocks that belong to other requests from now on.
            self.held.retain(|held| matches!(held, Held::Prefix(..)));
            self.stack.store.plane().drain().unwrap();
            self.next_block = 0;
        }
        let mut blocks = stack::blocks(self.next_block, count);
        self.next_block += count as u32;
        blocks.shuffle(&mut self.rng);
        blocks
    }

    fn layers(&mut self) -> Vec<Layer> {
        let mut layers: Vec<Layer> = (0..self.stack.shape.layers).map(Layer).collect();
        layers.shuffle(&mut self.rng);
        layers
    }

    /// Accepts a failure if devices fail; and a key may be removed while a prefix holds it.
    fn note(&mut self, error: &StoreError) {
        match error {
            StoreError::Stale { .. } => {}
            StoreError::Transfer { .. }
            | StoreError::RequestFailed { .. }
            | StoreError::Forgotten
                if self.faults =>
            {
                self.failures += 1;
            }
            // A drive lost power with a flush in flight: nothing is stored until the store is
            // reopened.
            StoreError::JournalFailed { .. } if self.faults => {
                self.failures += 1;
                self.read_only = true;
            }
            other => panic!("{other}"),
        }
    }

    fn begin(&mut self) -> (Vec<BlockKey>, StoreRequest) {
        let keys = self.request();
        let blocks = self.blocks(keys.len());
        for (key, block) in keys.iter().zip(&blocks) {
            self.stack.fill(*block, *key);
        }
        let save = self.stack.store.allocate(&keys, &blocks).unwrap();
        self.forget_evicted();
        assert!(save.accepted() <= keys.len() && save.written() <= save.accepted());
        (keys, save)
    }

    /// Starts layers in random order; waits for some of them.
    fn store_layers(&mut self, save: &StoreRequest) -> Result<(), StoreError> {
        let mut tickets = Vec::new();
        for layer in self.layers() {
            tickets.push(self.stack.store.start(save, layer, Order::Unordered)?);
            if self.rng.random_bool(0.5) {
                let at = self.rng.random_range(0..tickets.len());
                self.stack.store.wait(tickets.swap_remove(at))?;
            }
        }
        Ok(())
    }

    fn put(&mut self) {
        let (keys, save) = self.begin();
        if let Err(error) = self.store_layers(&save) {
            self.note(&error);
        }
        match self.stack.store.commit(save) {
            Ok(done) => {
                for key in &keys[..done.accepted] {
                    // It may also be accepted because another request, still held, has it.
                    if self.stack.store.peek(&[*key]) == 1 {
                        self.model.insert(*key);
                    }
                }
            }
            Err(error) => self.note(&error),
        }
    }

    fn get(&mut self, keys: &[BlockKey], prefix: &Prefix) {
        if let Some((pairs, load)) = self.retrieve(keys, prefix) {
            self.load(&pairs, &load);
        }
    }

    /// Begins a transfer into wiped blocks.
    fn retrieve(
        &mut self,
        keys: &[BlockKey],
        prefix: &Prefix,
    ) -> Option<(Vec<(BlockKey, BlockId)>, LoadRequest)> {
        let blocks = self.blocks(prefix.len());
        blocks.iter().for_each(|block| self.stack.wipe(*block));
        match self.stack.store.retrieve(prefix, &blocks) {
            Ok(load) => Some((keys.iter().copied().zip(blocks).collect(), load)),
            Err(error) => {
                self.note(&error);
                None
            }
        }
    }

    /// Starts all layers in random order, waits in another one, and compares every byte.
    fn load(&mut self, pairs: &[(BlockKey, BlockId)], load: &LoadRequest) {
        let mut tickets = Vec::new();
        for layer in self.layers() {
            match self.stack.store.start(load, layer, Order::Unordered) {
                Ok(ticket) => tickets.push(ticket),
                Err(error) => self.note(&error),
            }
        }
        tickets.shuffle(&mut self.rng);
        for ticket in tickets {
            let layer = ticket.layer;
            match self.stack.store.wait(ticket) {
                Err(error) => self.note(&error),
                Ok(_) => {
                    for (key, block) in pairs {
                        let right = self.stack.kv.holds(*block, layer, *key, 0);
                        assert!(right, "{block} layer {layer}: not the bytes of {key}");
                        self.checked += 1;
                    }
                }
            }
        }
    }

    fn lookup(&mut self) -> (Vec<BlockKey>, Prefix) {
        let keys = self.request();
        let prefix = self.stack.store.lookup(&keys).unwrap();
        self.forget_evicted();
        let expected = keys.iter().take_while(|key| self.model.contains(key)).count();
        assert_eq!(prefix.len(), expected);
        (keys, prefix)
    }

    /// Removes evicted keys from the model. It does not know the order of eviction (the index's own
    /// test does), so it asks the store which keys are gone, and checks that each was evictable.
    fn forget_evicted(&mut self) {
        let store = &self.stack.store;
        let gone: Vec<BlockKey> =
            self.model.iter().filter(|key| store.peek(&[**key]) == 0).copied().collect();
        for key in gone {
            self.model.remove(&key);
            let held = self.held.iter().any(|held| match held {
                Held::Prefix(keys, prefix) => keys[..prefix.len()].contains(&key),
                Held::Load(pairs, _) => pairs.iter().any(|(held, _)| *held == key),
                Held::Store(_) => false,
            });
            let excused = self.faults || self.removed.contains(&key);
            assert!(!held || excused, "{key} was evicted under a prefix or transfer");
        }
        for key in &self.all {
            let (stored, known) = (store.peek(&[*key]) == 1, self.model.contains(key));
            assert!(!stored || known, "{key} was never committed");
        }
    }

    fn hold(&mut self) {
        let held = match self.rng.random_range(0..3) {
            0 => {
                let (keys, prefix) = self.lookup();
                Held::Prefix(keys, prefix)
            }
            1 => {
                let (keys, prefix) = self.lookup();
                match self.retrieve(&keys, &prefix) {
                    Some((pairs, load)) => Held::Load(pairs, load),
                    None => return,
                }
            }
            _ => Held::Store(self.begin().1),
        };
        self.held.push(held);
    }

    /// Uses a held handle, or drops it with an operation in flight.
    fn let_go(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.rng.random_range(0..self.held.len());
        let layer = Layer(self.rng.random_range(0..self.stack.shape.layers));
        let in_flight = self.rng.random_bool(0.3);
        let started = match self.held.swap_remove(at) {
            Held::Prefix(keys, prefix) => return self.get(&keys, &prefix),
            Held::Load(_, load) if in_flight => {
                self.stack.store.start(&load, layer, Order::Unordered)
            }
            Held::Load(pairs, load) => return self.load(&pairs, &load),
            Held::Store(save) => self.stack.store.start(&save, layer, Order::Unordered),
        };
        if let Err(error) = started {
            self.note(&error);
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..30 => self.put(),
            30..60 => {
                let (keys, prefix) = self.lookup();
                self.get(&keys, &prefix);
            }
            60..72 => self.hold(),
            72..88 => self.let_go(),
            88..96 => {
                let count = self.rng.random_range(0..4);
                self.stack.store.evict(count).unwrap();
            }
            _ => {
                let keys = self.request();
                let removed = self.stack.store.remove(&keys).unwrap();
                self.removed.extend(&keys);
                // Failed reads may have dropped some since.
                let known = keys.iter().filter(|key| self.model.remove(key)).count() as u32;
                assert!(removed == known || self.faults && removed < known);
            }
        }
        self.forget_evicted();
    }

    /// Checks that the store works once devices do: a completion that was posted twice may still be
    /// in a queue. The next operation finds it and fails, and the recovery from that cleans up.
    fn works_again(&mut self) {
        let keys = keys(900..903);
        let mut store = || {
            let save = self.stack.begin(&keys, 0);
            let written = self.stack.write_all(&save);
            written.and_then(|()| self.stack.store.commit(save)).map(drop)
        };
        let first = store();
        assert!(first.is_ok() || self.faults, "{first:?}");
        first.or_else(|_| store()).unwrap();
        assert_eq!(self.stack.store.remove(&keys).unwrap(), 3);
        self.forget_evicted();
    }

    /// Drops everything, and checks that nothing was lost.
    fn finish(mut self) -> (u32, u32) {
        self.held.clear();
        self.stack.faults(None);
        self.stack.store.plane().drain().unwrap();
        self.forget_evicted();
        self.works_again();
        let stats = self.stack.store.stats().unwrap();
        assert_eq!(stats.files.stored as usize, self.model.len());
        assert_eq!((stats.files.active, stats.files.writing), (0, 0));
        assert_eq!(stats.files_free() + stats.files.stored, stats.files.files);
        assert_eq!(self.stack.store.evict(u32::MAX).unwrap(), stats.files.stored);
        self.stack.store.sync_journal().unwrap();
        let stats = self.stack.store.stats().unwrap();
        assert_eq!((stats.files_free(), stats.files.free_runs), (stats.files.files, 1));
        assert_eq!(self.stack.refused_dma(), 0);
        (self.checked, self.failures)
    }
}

fn run(seed: u64, steps: u32, plan: &Plan, faults: Option<FaultPlan>) -> (u32, u32) {
    println!("seed {seed}");
    let mut world = World::new(seed, plan, faults.is_some());
    for step in 0..steps {
        if let Some(faults) = &faults
            && step == 5
        {
            // Faults in data only: a failed journal ends all storing.
            let mut faults = faults.clone();
            let data = LbaRange { first: world.stack.data_lba(), count: u64::MAX >> 1 };
            faults.rules.iter_mut().for_each(|rule| rule.when.lbas = Some(data));
            world.stack.emus.iter().for_each(|emu| emu.set_faults(faults.clone()));
        }
        world.step();
        if world.read_only {
            return (world.checked, world.failures);
        }
    }
    world.finish()
}

#[test]
fn a_store_is_a_map() {
    let plan = Plan::default();
    let checked: u32 = seeds(0, 4).map(|seed| run(seed, 150, &plan, None).0).sum();
    assert!(checked > 1000, "only {checked} layers of blocks were read and compared");
}

#[test]
fn a_store_that_is_too_small_is_a_map_that_forgets() {
    let mut plan = Plan::default();
    plan.format.group = Some(4);
    plan.format.capacity_bytes = Some(11 * plan.shape.block_bytes());
    let checked: u32 = seeds(10_000, 4).map(|seed| run(seed, 200, &plan, None).0).sum();
    assert!(checked > 500, "only {checked} layers of blocks were read and compared");
}

fn faulty(seed: u64, actions: &[(FaultAction, f64)]) -> FaultPlan {
    let rule = |&(action, probability): &(FaultAction, f64)| {
        let (admin, probability) = (Some(false), Some(probability));
        FaultRule::new(FaultWhen { admin, probability, ..FaultWhen::default() }, action)
    };
    FaultPlan { seed, rules: actions.iter().map(rule).collect(), ..FaultPlan::default() }
}

#[test]
fn devices_that_report_errors_cost_hits_but_never_bytes() {
    let mut failures = 0;
    for seed in seeds(20_000, 3) {
        let mut plan = Plan::default();
        if seed % 2 == 0 {
            (plan.lba_bytes, plan.format.codec) = (512, Codec::Exp3);
            plan.options.dram = 8 * plan.shape.block_bytes();
        }
        let faults = faulty(seed, &[(READ_ERROR, 0.02), (WRITE_FAULT, 0.02)]);
        failures += run(seed, 150, &plan, Some(faults)).1;
    }
    assert!(failures > 10, "only {failures} operations failed");
}

#[test]
fn devices_that_misbehave_cost_time_but_never_bytes() {
    let mut failures = 0;
    for seed in seeds(30_000, 4) {
        let mut plan = Plan::default();
        plan.format.group = Some(4);
        if seed % 2 == 0 {
            (plan.lba_bytes, plan.format.codec) = (512, Codec::Exp3);
        }
        let stored = plan.format.codec.stored(&plan.shape).unwrap();
        plan.format.capacity_bytes = Some(24 * stored.block_bytes());
        let late = FaultAction::Delay { ns: 300_000_000 };
        let rare = 0.006;
        let faults = faulty(
            seed,
            &[
                (FaultAction::Drop, rare),
                (FaultAction::WrongCid, rare),
                (FaultAction::WrongSqhd, rare),
                (FaultAction::WrongPhase, rare),
                (FaultAction::Duplicate, rare),
                (FaultAction::FatalStatus, rare),
                (FaultAction::WrongSqid, rare),
                (FaultAction::PowerLoss, rare / 4.0),
                (FaultAction::LinkLoss { ns: 200_000_000 }, rare / 4.0),
                (FaultAction::Status { code: 0x82, dnr: false }, 0.05),
                (FaultAction::Status { code: 0x21 | 1 << 11, dnr: false }, rare),
                (FaultAction::CorruptRead, rare),
                (late, rare),
                (READ_ERROR, rare),
            ],
        );
        failures += run(seed, 120, &plan, Some(faults)).1;
    }
    assert!(failures > 10, "only {failures} operations failed");
}
