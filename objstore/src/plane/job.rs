//! Jobs: blocks to move between files and the pool, layer by layer.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    ops::Range,
    sync::Mutex,
};

use gio_uring::{BlockMap, IoStatus, Wait};
use kv_catalog::{FileId, KvShape, Layer, lock};
use kv_schedule::{Flow, OpId, StepId};
use nvme_driver::Nanos;
use nvme_spec::nvm::Direction;

use super::{checksums::JobChecksums, copier::Copies};
use crate::{
    error::{Failure, StoreError},
    ids::{JobId, LayerDone, Move, PoolId, Ticket},
};

/// Result of a job.
#[derive(Debug)]
pub struct JobDone {
    /// The job.
    pub job: JobId,
    /// Direction of the job.
    pub direction: Direction,
    /// Reason why some data was not moved, or is not durable; `None` on success.
    pub failure: Option<StoreError>,
    /// Recoveries of the controllers when the job began. If the number has grown once the devices
    /// were flushed, stored data may be lost: a drive that loses power, and is reset, loses the
    /// contents of its volatile cache.
    pub(crate) recoveries: u64,
    /// Flushes that had begun when the job ended. A later one covers what it stored.
    pub(super) flushes: u64,
    /// CRC-32C of the stored objects, `[block][row]`, blocks in the order of the job. Empty for a
    /// read, or if the plane keeps no checksums.
    pub checksums: Vec<u32>,
}

impl JobDone {
    /// Returns true if it stored all of its data.
    pub(super) fn has_stored(&self) -> bool {
        self.failure.is_none() && self.direction == Direction::Write
    }
}

/// Progress of a layer of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerState {
    /// Not started.
    Idle,
    /// In the ring, or on a stream behind it.
    InFlight,
    /// Waits for its turn.
    Waiting(OpId),
    /// Ended.
    Ended(Result<LayerDone, Failure>),
}

/// Owner and urgency of a job, from which a pacer derives the turn of its layers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Turn {
    /// Its owner, for a fair share of the devices.
    pub(super) flow: Flow,
    /// The engine's step that a read is for.
    pub(super) step: Option<StepId>,
    /// True if its layers start at once.
    pub(super) is_urgent: bool,
}

/// A layer of a job.
#[derive(Debug, Clone)]
pub(super) struct LayerEntry {
    pub(super) state: LayerState,
    /// Events for a stream that must see the layer's data; none if there was nothing to move or the
    /// plane has no streams.
    pub(super) ends: [Option<Wait>; 2],
}

/// Layers of a job that have not been moved, and when it began.
#[derive(Debug)]
struct Unmoved {
    layers: u32,
    since: Nanos,
}

/// State of a job.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) direction: Direction,
    /// Placement handle of a write.
    pub(super) placement: Option<u16>,
    pub(super) turn: Turn,
    /// The uploaded map; `None` if there is nothing to move.
    pub(super) map: Option<BlockMap>,
    pub(super) checksums: Option<JobChecksums>,
    /// Blocks that the devices move.
    pub(super) moves: Vec<Move>,
    /// Blocks that are copied between the engine's pool and other memory.
    pub(super) copies: Copies,
    /// True for reading ahead: the devices move all rows in one operation, to the cache itself.
    pub(super) is_ahead: bool,
    pub(super) layers: Vec<LayerEntry>,
    unmoved: Unmoved,
    pub(super) in_flight: u32,
    /// [`JobDone::recoveries`].
    pub(super) recoveries: u64,
    /// The first failure.
    pub(super) failure: Option<Failure>,
    /// Indices of the entries that have failed in a layer.
    pub(super) noticed: HashSet<u32>,
    /// True when the caller has abandoned it.
    pub(super) abandoned: bool,
}

impl Job {
    pub(super) fn new(
        direction: Direction,
        layers: u32,
        moves: Vec<Move>,
        recoveries: u64,
        now: Nanos,
    ) -> Self {
        let entry = LayerEntry { state: LayerState::Idle, ends: [None, None] };
        Self {
            direction,
            placement: None,
            turn: Turn::default(),
            map: None,
            checksums: None,
            moves,
            copies: Copies::default(),
            is_ahead: false,
            layers: vec![entry; layers as usize],
            unmoved: Unmoved { layers, since: now },
            in_flight: 0,
            recoveries,
            failure: None,
            noticed: HashSet::new(),
            abandoned: false,
        }
    }

    pub(super) fn layer(&mut self, layer: Layer) -> &mut LayerEntry {
        &mut self.layers[layer.0 as usize]
    }

    /// Returns the rows that the operation of a layer moves.
    pub(super) fn rows(&self, shape: &KvShape, layer: Layer) -> Range<u32> {
        if self.is_ahead { 0..shape.rows() } else { shape.layer_rows(layer) }
    }

    /// Marks a layer as moved. Returns the time when the job began if it was the last one, and the
    /// engine waits for it.
    pub(super) fn moved(&mut self, layer: Layer, done: LayerDone) -> Option<Nanos> {
        self.layer(layer).state = LayerState::Ended(Ok(done));
        let Unmoved { layers, since } = &mut self.unmoved;
        let was_last = *layers == 1;
        *layers = layers.saturating_sub(1);
        (was_last && !self.is_ahead).then_some(*since)
    }

    /// Marks a layer as in flight.
    pub(super) fn started(&mut self, layer: Layer) {
        self.layer(layer).state = LayerState::InFlight;
        self.in_flight += 1;
    }

    /// Returns true if it is moved by devices, or by streams.
    pub(super) fn has_tables(&self) -> bool {
        self.map.is_some() || self.copies.is_on_streams()
    }

    /// Fails the job because a layer was cancelled, unless it has failed before. Returns the
    /// failure; `None` for a job without blocks.
    pub(super) fn cancel(&mut self, layer: Layer) -> Option<Failure> {
        let hits = self.copies.hits().iter().map(|(entry, _)| entry);
        let Move { position, file, .. } = *self.moves.iter().chain(hits).next()?;
        let (direction, status) = (self.direction, IoStatus::Cancelled);
        self.fail(Failure { direction, layer, position, file, status, errors: 1 });
        self.failure
    }

    /// Fails the job, unless it has failed before.
    pub(super) fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    /// Returns the reason why the job is incomplete; `None` if it is done.
    pub(super) fn verdict(&self) -> Option<StoreError> {
        if let Some(failure) = self.failure {
            return Some(StoreError::Transfer { failure });
        }
        if self.map.is_none() && self.copies.hits().is_empty() {
            return None;
        }
        let done = |entry: &LayerEntry| matches!(entry.state, LayerState::Ended(Ok(_)));
        let missing = self.layers.iter().position(|entry| !done(entry))?;
        Some(StoreError::Incomplete { layer: Layer(missing as u32) })
    }
}

/// Returns an identifier that no job of this process has.
pub(super) fn next_id() -> JobId {
    static LAST: Mutex<u64> = Mutex::new(0);
    let mut last = lock(&LAST);
    *last += 1;
    JobId(*last)
}

/// The jobs of a plane.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    all: HashMap<JobId, Job>,
    /// Jobs that were abandoned and have not ended.
    abandoned: usize,
    /// Abandoned jobs that have ended, until they are taken.
    pub(super) ended: Vec<JobId>,
    /// Files whose data was lost, until they are taken.
    pub(super) lost: Vec<FileId>,
    /// Files of which an object differed from its checksum, once. The transfer may be to blame.
    suspects: HashSet<FileId>,
}

impl Jobs {
    pub(super) fn insert(&mut self, id: JobId, job: Job) {
        if job.direction == Direction::Write {
            job.moves.iter().for_each(|entry| _ = self.suspects.remove(&entry.file));
        }
        self.all.insert(id, job);
    }

    pub(super) fn get(&self, id: JobId) -> Option<&Job> {
        self.all.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: JobId) -> Result<&mut Job, StoreError> {
        self.all.get_mut(&id).ok_or_else(|| StoreError::no_such_job(id))
    }

    pub(super) fn remove(&mut self, id: JobId) -> Result<Job, StoreError> {
        self.all.remove(&id).ok_or_else(|| StoreError::no_such_job(id))
    }

    /// Suspects files that differ from their checksums. Returns those that did before.
    pub(super) fn suspect(&mut self, files: BTreeSet<FileId>) -> impl Iterator<Item = FileId> {
        files.into_iter().filter(|file| !self.suspects.insert(*file))
    }

    /// Takes suspicions back.
    pub(super) fn trust(&mut self, files: &[FileId]) {
        files.iter().for_each(|file| _ = self.suspects.remove(file));
    }

    /// Returns the jobs of a pool.
    pub(super) fn of_pool(&self, pool: PoolId) -> Vec<JobId> {
        let jobs = self.all.iter().filter(|(_, job)| job.copies.pool == pool);
        jobs.map(|(id, _)| *id).collect()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Job> {
        self.all.values_mut()
    }

    /// Returns the state of a layer; `None` if its job has ended.
    pub(super) fn state(&self, Ticket { job, layer }: Ticket) -> Option<LayerState> {
        let entry = self.all.get(&job)?.layers.get(layer.0 as usize);
        Some(entry.map_or(LayerState::Idle, |entry| entry.state))
    }

    /// Abandons a job. Returns it if nothing of it is in flight: it has ended.
    pub(super) fn abandon(&mut self, id: JobId) -> Option<Job> {
        let job = self.all.get_mut(&id)?;
        if job.in_flight == 0 {
            self.ended.push(id);
            return self.all.remove(&id);
        }
        self.abandoned += usize::from(!std::mem::replace(&mut job.abandoned, true));
        None
    }

    /// Removes abandoned jobs of which nothing is in flight any more, and returns them.
    pub(super) fn take_abandoned(&mut self) -> Vec<Job> {
        if self.abandoned == 0 {
            return Vec::new();
        }
        let over = |job: &Job| job.abandoned && job.in_flight == 0;
        let mut over: Vec<_> = self.all.extract_if(|_, job| over(job)).collect();
        over.sort_unstable_by_key(|(id, _)| *id);
        self.abandoned -= over.len();
        self.ended.extend(over.iter().map(|(id, _)| *id));
        over.into_iter().map(|(_, job)| job).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_lost_when_it_differs_a_second_time() {
        let mut jobs = Jobs::default();
        let suspect = |jobs: &mut Jobs, files: &[u32]| {
            let files = files.iter().copied().map(FileId).collect();
            jobs.suspect(files).collect::<Vec<_>>()
        };
        assert_eq!(suspect(&mut jobs, &[1, 2, 3]), []);
        assert_eq!(suspect(&mut jobs, &[2, 4]), [FileId(2)]);
        jobs.trust(&[FileId(3)]);
        let entry = Move { position: 0, file: FileId(4), block: kv_catalog::BlockId(0) };
        let written = Job::new(Direction::Write, 1, vec![entry], 0, Nanos(0));
        jobs.insert(JobId(1), written);
        assert_eq!(suspect(&mut jobs, &[1, 3, 4]), [FileId(1)], "others were read, or written");
    }
}
