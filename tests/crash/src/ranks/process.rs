//! The processes of a store's catalog and ranks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, ensure};
use kv_catalog::{Namespace, NamespaceId, WriteId};
use nvme_driver::Nanos;
use nvme_emu::PowerSwitch;
use objstore::{
    BlockId, Direction, DurableCatalog, FileId, Format, JobId, Layer, Move, Order, Plane, RankId,
    StoreConfig, StoreError, StoreOptions, Ticket,
};
use ripieno_testkit::{KvMemory, inline_executor};

use crate::{
    change::{Change, Target, visitor},
    machine::{Machine, Powered},
    model::Name,
    outcome::Outcome,
};

pub const RANKS: usize = 2;
pub const BLOCKS: u32 = 24;

/// A worker's process.
pub struct Worker {
    pub plane: Plane,
    pub kv: KvMemory,
}

/// A process of a rank, and its devices.
pub struct Rank {
    pub machine: Machine,
    pub format: Format,
    pub powered: Option<Powered>,
    pub worker: Option<Arc<Mutex<Worker>>>,
}

/// The process with the catalog, and its device.
pub struct Head {
    pub machine: Machine,
    pub format: Format,
    pub powered: Option<Powered>,
    pub catalog: Option<Arc<DurableCatalog>>,
    /// True after a sync has failed permanently.
    pub read_only: bool,
}

/// Progress of a rank's part of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Idle,
    Moving(JobId),
    Reported,
}

/// Blocks that all ranks store.
pub struct OpenWrite {
    pub id: WriteId,
    /// Blocks of this write: name, version, file, and pool block.
    pub own: Vec<(Name, u64, FileId, BlockId)>,
    pub stages: [Stage; RANKS],
    /// True if all ranks have reported it: it can be committed.
    pub is_whole: bool,
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the content tag of a version, which differs by rank, too.
pub fn tag(rank: usize, space: usize, version: u64) -> u64 {
    version << 2 | (rank as u64) << 1 | space as u64
}

pub fn options() -> StoreOptions {
    StoreOptions {
        depth: 16,
        iocbs: 16,
        arena_bytes: 64 << 10,
        command_timeout: Nanos::from_millis(20),
        wait_timeout: Nanos::from_millis(100),
        stop_timeout: Nanos::from_millis(100),
        virtual_time: true,
        ..StoreOptions::default()
    }
}

impl Target for Arc<DurableCatalog> {
    fn contains(&self, name: &Name) -> bool {
        let id = NamespaceId(name.0 as u32);
        self.with(|catalog| catalog.lookup(id, &[name.1])).is_ok_and(|found| found == 1)
    }

    fn change(&self, space: usize, change: &Change) -> Result<Option<u64>> {
        let id = NamespaceId(space as u32);
        self.with(|catalog| {
            match change {
                Change::Evict(files) => drop(catalog.evict(Some(id), *files)?),
                Change::Remove(keys) => drop(catalog.remove(id, keys)?),
                Change::Clear => catalog.clear(id)?,
                Change::Epoch => return Ok(Some(catalog.bump_epoch(id)?)),
                Change::Quota(files) => catalog.set_quota(id, *files)?,
                Change::Weight(weight) => catalog.set_weight(id, *weight)?,
                Change::Visit(salt, keys) => {
                    let _kept = [0, 1].map(|space| catalog.keep(NamespaceId(space)));
                    let new = catalog.namespace(&visitor(*salt))?;
                    let found = catalog.are_stored(new, keys)?;
                    ensure!(!found.contains(&true), "a new namespace has blocks");
                }
            }
            Ok(None)
        })
    }
}

impl Worker {
    /// Starts to store its part.
    pub fn store(&mut self, rank: usize, write: &mut OpenWrite) -> Result<(), StoreError> {
        let mut moves = Vec::new();
        for ((name, version, file, block), position) in write.own.iter().zip(0..) {
            self.kv.fill(*block, name.1, tag(rank, name.0, *version));
            moves.push(Move { file: *file, block: *block, position });
        }
        let job = self.plane.begin(Direction::Write, &moves, &[])?;
        write.stages[rank] = Stage::Moving(job);
        for layer in (0..self.kv.shape.layers).map(Layer) {
            // The end of the job reports failures to start.
            let ticket = Ticket { job, layer };
            let Ok(()) = self.plane.start(ticket, Order::Unordered) else { break };
        }
        Ok(())
    }

    /// Reads a block. Returns true if all of it was read.
    pub fn read(&mut self, file: FileId, block: BlockId, sums: &[u32]) -> Result<bool, StoreError> {
        // Writes may occupy all operations.
        self.plane.drain()?;
        self.kv.wipe(block);
        let moves = [Move { file, block, position: 0 }];
        let job = self.plane.begin(Direction::Read, &moves, sums)?;
        for layer in (0..self.kv.shape.layers).map(Layer) {
            let ticket = Ticket { job, layer };
            let started = self.plane.start(ticket, Order::Unordered);
            if started.and_then(|()| self.plane.wait(ticket)).is_err() {
                break;
            }
        }
        Ok(self.plane.end(&[job])?.iter().all(|done| done.failure.is_none()))
    }

    /// Ends jobs. Returns the checksums of each durable one, or `None`.
    pub fn end(&mut self, jobs: &[JobId]) -> Result<Vec<Option<Vec<u32>>>, StoreError> {
        let done = self.plane.end(jobs)?.into_iter();
        Ok(done.map(|it| it.failure.is_none().then_some(it.checksums)).collect())
    }
}

impl Rank {
    pub fn faults(&mut self) -> bool {
        self.powered.as_mut().is_some_and(|powered| powered.faults().any())
    }

    /// Cuts its power, which also ends its process.
    pub fn crash(&mut self, outcome: &mut Outcome) {
        let Some(mut powered) = self.powered.take() else { return };
        powered.cut();
        self.worker = None;
        outcome.faults.merge(powered.faults());
        outcome.crashes += 1;
    }

    pub fn open(&mut self, powered: &Powered, id: RankId) -> Result<Worker> {
        let clock = powered.clock.clone();
        let kv = KvMemory::new(&*powered.domain, self.format.shape, BLOCKS);
        let plane = Plane::open_rank(
            id,
            StoreConfig {
                devices: powered.attach()?,
                namespace: Namespace::default(),
                clock: clock.clone(),
                executor: inline_executor(clock),
                shape: self.format.shape,
                pool: kv.pool.clone(),
                gpu: None,
                options: options(),
            },
        )?;
        Ok(Worker { plane, kv })
    }
}

/// Allocates files to blocks with these names and versions; returns `None` if there are none.
pub fn begin(
    catalog: &DurableCatalog,
    versions: &[(Name, u64)],
    free: &mut Vec<BlockId>,
) -> Option<OpenWrite> {
    let space = NamespaceId(versions[0].0.0 as u32);
    let keys: Vec<_> = versions.iter().map(|(name, _)| name.1).collect();
    let write = catalog.with(|catalog| catalog.begin(space, &keys)).ok()?;
    let mut own = Vec::new();
    for (position, (name, version)) in write.positions.iter().zip(versions) {
        if position.own {
            let block = free.pop().expect("there are more blocks than writes need");
            own.push((*name, *version, position.file, block));
        }
    }
    if own.is_empty() {
        catalog.with(|catalog| catalog.abort(write.id)).expect("it was just begun");
        return None;
    }
    Some(OpenWrite { id: write.id, own, stages: [Stage::Idle; RANKS], is_whole: false })
}

/// Actions while the catalog waits for its journal: files are allocated, and ranks write them.
pub struct Meanwhile {
    pub catalog: Arc<DurableCatalog>,
    pub workers: [Option<Arc<Mutex<Worker>>>; RANKS],
    pub powers: [Option<PowerSwitch>; RANKS],
    /// Pauses before that.
    pub pauses: u32,
    pub versions: Vec<(Name, u64)>,
    pub free: Vec<BlockId>,
    pub begun: Option<OpenWrite>,
}

impl Meanwhile {
    pub fn turn(&mut self) {
        // A process without power would wait for its devices, and so recurse into its own turn.
        let is_up = |power: &Option<PowerSwitch>| power.as_ref().is_some_and(|it| !it.is_cut());
        if !self.powers.iter().all(is_up) {
            return;
        }
        self.pauses = self.pauses.wrapping_sub(1);
        if self.pauses == 0 && self.free.len() >= self.versions.len() {
            self.begun = begin(&self.catalog, &self.versions, &mut self.free);
        }
        for (rank, worker) in self.workers.iter().enumerate() {
            let (Some(worker), Some(write)) = (worker, &mut self.begun) else { continue };
            let worker = &mut *lock(worker);
            // The end of the job reports failures.
            let _ = match write.stages[rank] {
                Stage::Idle => worker.store(rank, write),
                _ => worker.plane.sync(),
            };
        }
    }
}
