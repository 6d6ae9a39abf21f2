//! A store on the named devices, filled for measurements, and the checks of what it moves.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use nvme_driver::Clock;
use objstore::{BlockId, BlockKey, Layer, Order, SharedController, Store, StoreError, Ticket};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::check::{self, Counted, Sent};
use super::report::Setting;
use crate::config::{ReplayFlags, StoreArgs};
use crate::drives;
use crate::interrupt::Interrupt;
use crate::plan::Plan;
use crate::pool::{Item, LAYERS_AHEAD, Pool};
use crate::problem::{Problem, none_of, user_error};
use crate::replay;
use crate::sizing::Sizing;
use crate::stack::{self, Opened, Sim};
use crate::timing::Medium;
use crate::trace::Request;

/// Objects whose contents are compared, at most.
const SAMPLE: u32 = 64;

/// A store in use by a measurement.
pub(super) struct Session<'a> {
    pub(super) args: &'a StoreArgs,
    pub(super) clock: &'a Arc<dyn Clock>,
    pub(super) store: Store,
    pub(super) pool: Pool,
    /// Keys that the store has room for.
    pub(super) keys: &'a [BlockKey],
    pub(super) interrupt: &'a mut Interrupt,
    /// Those with a SMART log of what is moved.
    devices: &'a [SharedController],
    /// Bytes of an object on the devices, padding included.
    slot_bytes: u64,
    sim: Option<(&'a Sim, Medium)>,
}

/// Result of a session.
pub(super) struct Done<T> {
    pub(super) value: T,
    pub(super) setting: Setting,
    /// The drives' models.
    pub(super) models: Vec<String>,
}

/// Passes over all layers of a request.
pub(super) struct Passes {
    /// Seconds of each that counts.
    pub(super) seconds: Vec<f64>,
    /// Commands and submission doorbells of each.
    pub(super) commands: f64,
    pub(super) doorbells: f64,
    pub(super) wrong: Vec<String>,
}

/// Rejects flags that apply only to requests.
pub(super) fn check(flags: &ReplayFlags, command: &str) -> Result<(), Problem> {
    let ReplayFlags { common, devices, options } = flags;
    let given = [
        ("--trace", common.trace.is_some()),
        ("--requests", common.requests.is_some()),
        ("--keep", devices.keep),
        ("--capacity", options.config.capacity.is_some()),
    ];
    let why = format!("ripieno {command} serves no requests, and keeps nothing");
    none_of(&given, &why, "leave it out")
}

/// Returns a plan with one request of `blocks` blocks, with room for them in a store: a full one
/// refuses writes, and one with little space left is full.
pub(super) fn plan(args: &StoreArgs, blocks: u64) -> Plan {
    let blocks = blocks + blocks / 32 + 1;
    let input_tokens = blocks * u64::from(args.shape.block_tokens);
    let request = Request { input_tokens, ..Request::default() };
    Plan::new(std::iter::once(request), &args.shape, None)
}

/// Builds a store with room for `blocks` blocks, has `work` use it, and closes it.
pub(super) fn with<T>(
    args: &StoreArgs,
    blocks: u64,
    medium: Option<Medium>,
    interrupt: &mut Interrupt,
    hint: &str,
    work: impl FnOnce(&mut Session<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<Done<T>> {
    let gpu = args.executor.gpu().map_err(user_error)?;
    let sim = args.is_virtual.then(|| Sim::new(args));
    interrupt.orderly();
    let found = drives::open(args, gpu.as_deref())?;
    let lba_bytes = replay::lba_bytes(args, found.as_ref());
    args.check_prp(lba_bytes)?;
    let plan = plan(args, blocks);
    let other_flags = |problem: Problem| problem.with_hint(hint);
    let sizing = Sizing::new(args, &plan, lba_bytes).map_err(other_flags)?;
    sizing.check_machine(args, false).map_err(other_flags)?;
    let (devices, how) = replay::devices(args, &sizing, found, None, sim.as_ref())?;
    let clock = devices.clock();
    let opened = stack::open(args, &sizing, (devices, how), gpu.as_ref())?;
    let Opened { pool, stack, .. } = opened;
    let store = stack.store().clone();
    let controllers = store.plane().controllers()?;
    let medium = Medium::or_scaled(medium, args.scale);
    let is_logged = check::is_logged(args.executor, args.devices.emu().is_none());
    let mut session = Session {
        args,
        clock: &clock,
        store,
        pool,
        keys: plan.keys(0),
        interrupt,
        devices: if is_logged { &controllers } else { &[] },
        slot_bytes: u64::from(args.shape.object_bytes.next_multiple_of(lba_bytes)),
        sim: sim.as_ref().map(|sim| (sim, medium)),
    };
    let value = work(&mut session);
    drop(session);
    if let Some(sim) = &sim {
        sim.dial.set(None);
    }
    let setting = Setting::of(&args.devices, args.queues(), args.executor, stack.placement());
    let model = |it: &SharedController| it.lock().info().model.clone();
    let models = controllers.iter().map(model).collect();
    drop(controllers);
    stack.close()?;
    Ok(Done { value: value?, setting, models })
}

impl Session<'_> {
    /// Gives software controllers in virtual time the speed of drives.
    pub(super) fn pace(&self) -> anyhow::Result<()> {
        let Some((sim, medium)) = &self.sim else { return Ok(()) };
        let region = self.store.superblock().data_region().context("a store has data")?;
        let from = region.first.0 << region.lba_shift;
        sim.dial.set(Some(medium.each(self.args.devices.count(), from)));
        Ok(())
    }

    /// Returns the layers of the model.
    pub(super) fn layers(&self) -> impl Iterator<Item = Layer> + use<> {
        (0..self.args.shape.layers).map(Layer)
    }

    fn item(&self, key: BlockKey, block: BlockId, row: (u32, u32)) -> Item {
        self.pool.item(block, key, row, (0, self.args.shape.object_bytes as usize))
    }

    /// Fills in the contents of the pool's `blocks` for these keys. Returns false if interrupted.
    pub(super) fn fill(&mut self, keys: &[BlockKey], blocks: &[BlockId]) -> anyhow::Result<bool> {
        for layer in 0..self.args.shape.layers {
            if self.interrupt.asked() {
                return Ok(false);
            }
            let of = |(key, block): (&BlockKey, &BlockId)| {
                let segments = 0..self.args.shape.segments;
                segments.map(|segment| self.item(*key, *block, (layer, segment))).collect()
            };
            let items: Vec<Vec<Item>> = keys.iter().zip(blocks).map(of).collect();
            self.pool.access().make(&items.concat(), &mut || {})?;
        }
        Ok(true)
    }

    /// Picks objects of these blocks, and overwrites them in the pool.
    pub(super) fn sample(
        &mut self,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> anyhow::Result<Vec<Item>> {
        let mut random = SmallRng::seed_from_u64(self.args.common.seed);
        let shape = self.args.shape;
        let items: Vec<Item> = (0..SAMPLE.min(shape.rows() * keys.len() as u32))
            .map(|_| {
                let at = random.random_range(0..keys.len());
                let layer = random.random_range(0..shape.layers);
                self.item(keys[at], blocks[at], (layer, random.random_range(0..shape.segments)))
            })
            .collect();
        self.pool.access().poison(&items, &mut || {})?;
        Ok(items)
    }

    /// Compares a sample. Returns the problem, if there is one.
    pub(super) fn compare(&mut self, sample: Vec<Item>) -> anyhow::Result<Option<String>> {
        let all = sample.len();
        let found = self.pool.access().check(sample)?(&mut || {})?.len();
        Ok((found > 0).then(|| format!("{found} of {all} objects are not what was stored")))
    }

    /// Retrieves all layers of stored blocks, and compares a sample of them. Returns the problem,
    /// if there is one.
    pub(super) fn contents(
        &mut self,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> anyhow::Result<Option<String>> {
        let sample = self.sample(keys, blocks)?;
        let order = self.order();
        let prefix = self.store.lookup(keys)?;
        ensure!(prefix.len() == keys.len(), "what was stored is not found");
        let load = self.store.retrieve(&prefix, blocks)?;
        for layer in self.layers() {
            self.store.wait(self.store.start(&load, layer, order)?)?;
        }
        self.compare(sample)
    }

    /// Returns the order of transfers after what the pool's access did so far.
    pub(super) fn order(&mut self) -> Order<'static> {
        self.pool.access().order()
    }

    /// Returns the counters of the devices, and of what was sent to them.
    pub(super) fn counted(&self) -> anyhow::Result<Counted> {
        let stats = self.store.stats()?.plane;
        let object = u64::from(self.args.shape.object_bytes);
        let padded = |bytes: u64| bytes / object * self.slot_bytes;
        let sent = Sent {
            commands: stats.ring.total.commands,
            bytes: [padded(stats.retrieved_bytes), padded(stats.stored_bytes)],
            discarded: padded(stats.retrieved_bytes) - stats.retrieved_bytes,
            errors: 0,
        };
        Ok(Counted::read(self.devices.iter(), sent)?)
    }

    /// Returns the problems in what was counted since `before`.
    pub(super) fn problems(&self, before: &Counted) -> anyhow::Result<Vec<String>> {
        before.problems(|| self.counted())
    }

    /// Stores blocks, whose contents are in the pool, one layer after the other.
    pub(super) fn save(&mut self, keys: &[BlockKey], blocks: &[BlockId]) -> anyhow::Result<()> {
        let save = self.store.allocate(keys, blocks)?;
        ensure!(save.accepted() == keys.len(), "the store has no room for {} blocks", keys.len());
        let order = self.order();
        for layer in self.layers() {
            self.store.wait(self.store.start(&save, layer, order)?)?;
        }
        self.store.commit(save)?;
        Ok(())
    }

    /// Moves all layers with `start`, some of them at a time: once without counting, then `rounds`
    /// times. Returns `None` if interrupted.
    pub(super) fn passes(
        &mut self,
        rounds: u32,
        start: impl Fn(&Store, Layer) -> Result<Ticket, StoreError>,
    ) -> anyhow::Result<Option<Passes>> {
        let (before, stats) = (self.counted()?, self.store.stats()?.plane.ring.total);
        let mut seconds = Vec::new();
        for round in 0..=rounds {
            let begin = self.clock.now();
            let mut flying = VecDeque::new();
            for layer in self.layers() {
                if self.interrupt.asked() {
                    self.store.plane().drain()?;
                    return Ok(None);
                }
                if flying.len() == LAYERS_AHEAD {
                    self.store.wait(flying.pop_front().expect("it is full"))?;
                }
                flying.push_back(start(&self.store, layer)?);
            }
            for ticket in flying {
                self.store.wait(ticket)?;
            }
            if round > 0 {
                seconds.push((self.clock.now() - begin).0 as f64 / 1e9);
            }
        }
        let now = self.store.stats()?.plane.ring.total;
        let each = |counted: u64| counted as f64 / f64::from(rounds + 1);
        let commands = each(now.commands - stats.commands);
        let doorbells = each(now.sq_doorbells - stats.sq_doorbells);
        Ok(Some(Passes { seconds, commands, doorbells, wrong: self.problems(&before)? }))
    }
}

#[cfg(test)]
mod tests;
