//! An open store in a process, and the steps of its actors: writers, readers, and those that make
//! changes.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Result, bail};
use nvme_driver::Nanos;
use objstore::{
    BlockId, BlockKey, Layer, LoadRequest, Order, Reservation, Store, StoreError, StoreRequest,
    Ticket, Usage,
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::SliceRandom as _};
use ripieno_testkit::KvMemory;

use crate::{
    change::{Change, Done, Meanwhile, Target as _, some_keys},
    history::{BLOCKS, History},
    machine::Powered,
    model::{Held, Name, SPACES, Wrong},
    outcome::Outcome,
};

/// Maximum number of concurrent writers, and of readers.
const ACTORS_MAX: usize = 6;

/// An open store.
pub struct Session {
    /// One handle for each namespace.
    pub stores: Vec<Store>,
    pub kv: KvMemory,
    pub keys: Vec<BlockKey>,
    pub writers: Vec<Writer>,
    pub readers: Vec<Reader>,
    /// Unused pool blocks.
    pub free: Vec<BlockId>,
    /// Pool blocks that a device may still access.
    pub used: Vec<BlockId>,
    /// True after a commit or sync has failed permanently: nothing is stored any more.
    pub read_only: bool,
    pub meanwhile: Meanwhile,
}

/// Stores some blocks.
pub struct Writer {
    save: StoreRequest,
    /// Set if it fills a reservation, as engines of several processes do.
    reserved: Option<Arc<Reservation>>,
    space: usize,
    /// Blocks that it stores, with their versions; empty if unknown.
    names: Vec<(Name, u64)>,
    /// Blocks that it may store.
    all: Vec<(Name, u64)>,
    layers: Vec<Layer>,
    tickets: Vec<Ticket>,
    blocks: Vec<BlockId>,
}

/// Retrieves some blocks.
pub struct Reader {
    load: LoadRequest,
    /// Blocks that it reads, with the versions that could be found at its start.
    names: Vec<(Name, Vec<u64>)>,
    layers: Vec<Layer>,
    tickets: Vec<Ticket>,
    blocks: Vec<BlockId>,
    failed: bool,
}

impl Session {
    pub fn contains(&self, name: &Name) -> bool {
        self.stores.contains(name)
    }

    /// Takes unused blocks; `None` if there are too few.
    fn take_blocks(&mut self, count: usize) -> Result<Option<Vec<BlockId>>> {
        if self.free.len() < count && !self.used.is_empty() {
            self.stores[0].plane().drain()?;
            self.free.append(&mut self.used);
        }
        let left = self.free.len().checked_sub(count);
        Ok(left.map(|left| self.free.split_off(left)))
    }

    /// Abandons all operations.
    pub fn end_all(&mut self) {
        for writer in self.writers.drain(..) {
            self.used.extend(writer.blocks);
        }
        for reader in self.readers.drain(..) {
            self.used.extend(reader.blocks);
        }
    }
}

impl History {
    /// Performs one step of one actor.
    pub fn step(
        &mut self,
        session: &mut Session,
        powered: &mut Powered,
        outcome: &mut Outcome,
    ) -> Result<()> {
        outcome.steps += 1;
        let space = self.rng.random_range(0..SPACES);
        let store = session.stores[space].clone();
        match self.rng.random_range(0..100) {
            0..18 => self.begin_writing(session, space)?,
            18..58 => self.go_on_writing(session, powered, outcome)?,
            58..64 => self.begin_reading(session, space)?,
            64..76 => self.go_on_reading(session, powered, outcome)?,
            76..79 => {
                let name = (space, session.keys[self.rng.random_range(0..session.keys.len())]);
                self.read(session, powered, &name, outcome)?;
            }
            79..90 => {
                let done = Change::draw(&mut self.rng, &session.keys).make(space, &session.stores);
                if session.read_only && done.result.is_ok() {
                    outcome.false_acks += 1;
                    let what = format!("a store that takes no writes acknowledged {done:?}");
                    outcome.describe(self.seed, what);
                }
                self.note(session, vec![done])?;
            }
            90..94 => self.sync(session, powered, outcome)?,
            94 if self.has_dram() => {
                let keys = some_keys(&mut self.rng, &session.keys);
                store.prefetch(&keys, Nanos(self.rng.random_range(0..50_000)))?;
            }
            96 if !session.writers.is_empty() => {
                let at = self.rng.random_range(0..session.writers.len());
                self.give_up(session, at);
            }
            97 if !session.readers.is_empty() => {
                let at = self.rng.random_range(0..session.readers.len());
                let reader = session.readers.swap_remove(at);
                session.used.extend(reader.blocks);
            }
            95 if self.has_dram() && self.format.checksums && self.has_blackouts => {
                powered.rot_memory(self.dram_bytes(), &mut self.rng);
            }
            98 if self.has_blackouts && self.rng.random_bool(0.6) => {
                powered.blackout(self.rng.random_range(0..powered.emus.len()));
            }
            _ => store.plane().poll_events().map(|_| ())?,
        }
        Ok(())
    }

    /// Records changes in the model.
    pub fn note(&mut self, session: &mut Session, all: Vec<Done>) -> Result<()> {
        for done in all {
            if let Some(space) = done.note(&mut self.model) {
                // Blocks being stored for it will not be found either.
                for writer in session.writers.iter_mut().filter(|writer| writer.space == space) {
                    writer.names.clear();
                    self.model.give_up(&writer.all);
                }
            }
            done.result?;
        }
        Ok(())
    }

    /// Computes some blocks and starts to store them.
    fn begin_writing(&mut self, session: &mut Session, space: usize) -> Result<()> {
        if session.writers.len() >= ACTORS_MAX {
            return Ok(());
        }
        let keys = some_keys(&mut self.rng, &session.keys);
        let Some(blocks) = session.take_blocks(keys.len())? else { return Ok(()) };
        let (mut all, mut own) = (Vec::new(), Vec::new());
        for (key, block) in keys.iter().zip(&blocks) {
            let (name, version) = ((space, *key), self.model.new_version());
            session.kv.fill(*block, *key, tag(space, version));
            self.model.begin(name, version);
            all.push((name, version));
            let mut others = session.writers.iter().flat_map(|writer| &writer.names);
            own.push(!session.contains(&name) && !others.any(|(other, _)| *other == name));
        }
        let reserves = self.rng.random_bool(0.3);
        let begun = match reserves {
            true => begin_reserved(&session.stores[space], &keys, &blocks),
            false => session.stores[space].allocate(&keys, &blocks).map(|save| (save, None)),
        };
        let (save, reserved) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                session.free.extend(blocks);
                self.model.give_up(&all);
                return self.failed(session, error);
            }
        };
        if session.read_only {
            bail!("a store that takes no writes gave files");
        }
        let accepted = reserved.as_ref().map_or(save.accepted(), |reserved| reserved.accepted());
        let accepted = all.iter().zip(own).take(accepted);
        let mut names: Vec<_> = accepted.filter(|(_, own)| *own).map(|(name, _)| *name).collect();
        if save.written() != names.len() {
            // A block was evicted meanwhile, or is being stored by a writer with unknown names.
            names.clear();
        }
        let mut layers: Vec<Layer> = (0..self.format.shape.layers).map(Layer).collect();
        layers.shuffle(&mut self.rng);
        let tickets = Vec::new();
        let writer = Writer { save, reserved, space, names, all, layers, tickets, blocks };
        session.writers.push(writer);
        Ok(())
    }

    /// Makes a writer store a layer, wait, commit, or abandon its blocks.
    fn go_on_writing(
        &mut self,
        session: &mut Session,
        powered: &mut Powered,
        outcome: &mut Outcome,
    ) -> Result<()> {
        if session.writers.is_empty() {
            return Ok(());
        }
        let at = self.rng.random_range(0..session.writers.len());
        let Session { writers, stores, .. } = session;
        let (writer, store) = (&mut writers[at], &stores[0]);
        for _ in 0..self.rng.random_range(1..=4) {
            let Some(layer) = writer.layers.pop() else { break };
            match store.start(&writer.save, layer, Order::Unordered) {
                Ok(ticket) => writer.tickets.push(ticket),
                // The commit reports the reason.
                Err(StoreError::RequestFailed { .. }) => {}
                Err(error) => return self.failed(session, error),
            }
        }
        if self.rng.random_bool(0.4)
            && let Some(ticket) = writer.tickets.pop()
        {
            match store.wait(ticket) {
                Err(error @ StoreError::Transfer { .. }) if !powered.faults().any() => {
                    return Err(error.into());
                }
                // The commit reports it.
                _ => {}
            }
        }
        let is_whole = writer.layers.is_empty();
        match is_whole || self.rng.random_bool(0.02) {
            true if self.rng.random_bool(0.95) => self.commit(session, powered, at, outcome),
            true => {
                self.give_up(session, at);
                Ok(())
            }
            false => Ok(()),
        }
    }

    fn give_up(&mut self, session: &mut Session, at: usize) {
        let writer = session.writers.swap_remove(at);
        self.model.give_up(&writer.all);
        session.used.extend(writer.blocks);
    }

    fn commit(
        &mut self,
        session: &mut Session,
        powered: &mut Powered,
        at: usize,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let mut missing = self.model.missing(|name| session.contains(name));
        let writer = session.writers.swap_remove(at);
        let Writer { save, reserved, names, all, layers, blocks, .. } = writer;
        let tried = if names.is_empty() { &all } else { &names };
        // These may be stored, and dropped during the commit.
        tried.iter().for_each(|(name, _)| _ = missing.remove(name));
        if layers.is_empty() {
            self.model.try_to(tried);
        }
        let others: Vec<_> = all.iter().filter(|one| !tried.contains(one)).copied().collect();
        self.model.give_up(&others);
        session.used.extend(blocks);
        let store = session.stores[0].clone();
        let is_partial = !layers.is_empty() && save.written() > 0;
        let committed = self.meanwhile(session, powered, || commit(&store, save, reserved));
        match committed {
            Ok(()) => {
                if session.read_only {
                    outcome.false_acks += 1;
                    let what = "a commit of a store that takes no writes was acknowledged";
                    outcome.describe(self.seed, what.to_owned());
                }
                if is_partial {
                    bail!("a commit without all layers was acknowledged");
                }
                self.model.sync(&missing, |name| session.contains(name));
                let after_fault = powered.faults().any();
                for (name, version) in names {
                    self.model.publish(name, version, true, after_fault);
                }
                Ok(())
            }
            Err(error @ StoreError::JournalFailed { .. }) => self.failed(session, error),
            Err(StoreError::Incomplete { .. }) if !layers.is_empty() => Ok(()),
            Err(error) => {
                // Known not to be stored.
                self.model.give_up(&all);
                self.failed(session, error)
            }
        }
    }

    fn sync(
        &mut self,
        session: &mut Session,
        powered: &mut Powered,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let missing = self.model.missing(|name| session.contains(name));
        let store = session.stores[0].clone();
        match self.meanwhile(session, powered, || store.sync_journal()) {
            Ok(()) if session.read_only => {
                outcome.false_acks += 1;
                let what = "a sync of a store that takes no writes was acknowledged";
                outcome.describe(self.seed, what.to_owned());
                Ok(())
            }
            Ok(()) => {
                self.model.sync(&missing, |name| session.contains(name));
                Ok(())
            }
            Err(error) => self.failed(session, error),
        }
    }

    /// Runs an operation that waits for devices, while others make changes.
    fn meanwhile<T>(&mut self, session: &Session, powered: &Powered, act: impl FnOnce() -> T) -> T {
        if self.rng.random_bool(0.5) {
            return act();
        }
        let rng = SmallRng::seed_from_u64(self.rng.random());
        let (stores, keys) = (session.stores.clone(), session.keys.clone());
        let power = powered.power.clone();
        let actor = session.meanwhile.actor(rng, stores, keys, move || !power.is_cut());
        powered.clock.during(actor, act)
    }

    /// Handles a failed operation: records that the store has become read-only.
    fn failed(&mut self, session: &mut Session, error: StoreError) -> Result<()> {
        let is_for_good =
            matches!(error, StoreError::JournalFailed { .. } | StoreError::Failed { .. });
        session.read_only |= is_for_good;
        Err(error.into())
    }

    fn begin_reading(&mut self, session: &mut Session, space: usize) -> Result<()> {
        if session.readers.len() >= ACTORS_MAX {
            return Ok(());
        }
        let keys = some_keys(&mut self.rng, &session.keys);
        let prefix = session.stores[space].lookup(&keys)?;
        if prefix.is_empty() {
            return Ok(());
        }
        let Some(blocks) = session.take_blocks(prefix.len())? else { return Ok(()) };
        let names = keys.iter().take(prefix.len()).map(|key| (space, *key));
        let names = names.map(|name| (name, self.model.findable(&name))).collect();
        blocks.iter().for_each(|block| session.kv.wipe(*block));
        let load = match session.stores[space].retrieve(&prefix, &blocks) {
            Ok(load) => load,
            Err(error) => {
                session.free.extend(blocks);
                return match error {
                    // It was dropped while blocks were awaited.
                    StoreError::Stale { .. } => Ok(()),
                    error => Err(error.into()),
                };
            }
        };
        let mut layers: Vec<Layer> = (0..self.format.shape.layers).map(Layer).collect();
        layers.shuffle(&mut self.rng);
        let tickets = Vec::new();
        session.readers.push(Reader { load, names, layers, tickets, blocks, failed: false });
        Ok(())
    }

    fn go_on_reading(
        &mut self,
        session: &mut Session,
        powered: &mut Powered,
        outcome: &mut Outcome,
    ) -> Result<()> {
        if session.readers.is_empty() {
            return Ok(());
        }
        let at = self.rng.random_range(0..session.readers.len());
        let Session { readers, stores, .. } = session;
        let (reader, store) = (&mut readers[at], &stores[0]);
        for _ in 0..self.rng.random_range(1..=4) {
            let Some(layer) = reader.layers.pop() else { break };
            match store.start(&reader.load, layer, Order::Unordered) {
                Ok(ticket) => reader.tickets.push(ticket),
                Err(StoreError::RequestFailed { .. }) if powered.faults().any() || self.lies => {
                    reader.failed = true;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if !reader.layers.is_empty() {
            return Ok(());
        }
        let mut reader = session.readers.swap_remove(at);
        for ticket in reader.tickets.drain(..) {
            match session.stores[0].wait(ticket) {
                Ok(_) => {}
                Err(StoreError::Transfer { .. }) if powered.faults().any() || self.lies => {
                    reader.failed = true;
                }
                Err(error) => return Err(error.into()),
            }
        }
        for ((name, findable), block) in reader.names.iter().zip(&reader.blocks) {
            if reader.failed {
                break;
            }
            let Some(version) = self.identify(session, name, *block, outcome) else { continue };
            if !findable.contains(&version) && !self.lies {
                outcome.note(self.seed, name, Wrong::CameBack, Held::Version(version));
            }
        }
        drop(reader.load);
        session.free.extend(reader.blocks);
        Ok(())
    }

    /// Returns the version of `name` that a block holds completely.
    fn identify(
        &self,
        session: &Session,
        name: &Name,
        block: BlockId,
        outcome: &mut Outcome,
    ) -> Option<u64> {
        outcome.checked += 1;
        let layers = || (0..self.format.shape.layers).map(Layer);
        let whole = |version: &u64| {
            let tag = tag(name.0, *version);
            layers().all(|layer| session.kv.holds(block, layer, name.1, tag))
        };
        let version = self.model.versions(name).find(whole);
        if version.is_none() {
            outcome.note_bytes(self.seed, name);
        }
        version
    }

    /// Retrieves a block and waits for it.
    pub fn read(
        &mut self,
        session: &mut Session,
        powered: &mut Powered,
        name: &Name,
        outcome: &mut Outcome,
    ) -> Result<Held> {
        let store = &session.stores[name.0];
        let prefix = store.lookup(&[name.1])?;
        if prefix.is_empty() {
            return Ok(Held::Nothing);
        }
        // The last block is reserved for this purpose.
        let block = BlockId(BLOCKS - 1);
        session.kv.wipe(block);
        let load = store.retrieve(&prefix, &[block])?;
        for layer in (0..self.format.shape.layers).map(Layer) {
            let started = store.start(&load, layer, Order::Unordered);
            match started.and_then(|ticket| store.wait(ticket)) {
                Ok(_) => {}
                Err(StoreError::Transfer { .. } | StoreError::RequestFailed { .. })
                    if !powered.power.is_cut() =>
                {
                    if !powered.faults().any() && !self.lies {
                        outcome.lost_commits += 1;
                        let what = format!("{}/{}: found, and cannot be read", name.0, name.1);
                        outcome.describe(self.seed, what);
                    }
                    return Ok(Held::Unreadable);
                }
                Err(error) => return Err(error.into()),
            }
        }
        let version = self.identify(session, name, block, outcome);
        Ok(version.map_or(Held::Unreadable, Held::Version))
    }

    /// Compares everything that is found after the store was opened.
    pub fn check(
        &mut self,
        session: &mut Session,
        powered: &mut Powered,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let names = |keys: &[BlockKey]| -> Vec<Name> {
            (0..SPACES).flat_map(|space| keys.iter().map(move |key| (space, *key))).collect()
        };
        let mut found = BTreeMap::new();
        for name in names(&session.keys) {
            let held = self.read(session, powered, &name, outcome)?;
            let wrong = self.model.judge(&name, held);
            let failed_read = held == Held::Unreadable && powered.faults().any();
            if let (Some(wrong), false) = (wrong, self.lies || failed_read) {
                outcome.note(self.seed, &name, wrong, held);
            }
            found.insert(name, held);
        }
        let usage = |space: usize| session.stores[space].usage();
        let usages: [Usage; SPACES] = [usage(0)?, usage(1)?];
        for (space, usage) in usages.iter().enumerate() {
            if let (Some(wrong), false) = (self.model.judge_space(space, usage), self.lies) {
                outcome.note_state(self.seed, format!("namespace {space}: {wrong}"));
            }
        }
        self.model.restart(&found, &usages);
        Ok(())
    }
}

/// Reserves files, and prepares to write the blocks of those that are to be written.
fn begin_reserved(
    store: &Store,
    keys: &[BlockKey],
    blocks: &[BlockId],
) -> Result<(StoreRequest, Option<Arc<Reservation>>), StoreError> {
    let reserved = store.reserve(keys)?;
    let own = (0..).zip(blocks).filter(|(at, _)| reserved.has(*at as usize));
    let (positions, blocks): (Vec<u32>, Vec<BlockId>) = own.unzip();
    let save = store.fill(&reserved, &positions, &blocks)?;
    Ok((save, Some(reserved)))
}

/// Makes what a writer stored permanent.
fn commit(
    store: &Store,
    save: StoreRequest,
    reserved: Option<Arc<Reservation>>,
) -> Result<(), StoreError> {
    let Some(reserved) = reserved else { return store.commit(save).map(|_| ()) };
    let done = store.end(&[save.ticket(Layer(0)).job])?.remove(0);
    done.failure.map_or(Ok(()), Err)?;
    store.commit_reservation(&reserved)?;
    store.sync_journal()
}

/// Returns the content tag of a version, which differs by tenant to detect mix-ups of equal tokens.
pub fn tag(space: usize, version: u64) -> u64 {
    version << 1 | space as u64
}
