//! Processing completions.

use gio_uring::{IoStatus, Progress};
use kv_catalog::FileId;
use nvme_spec::nvm::Direction;

use super::{
    copier::differs,
    job::{Job, LayerState},
    mover::Mover,
    transport::Op,
};
use crate::{
    error::{Failure, StoreError},
    ids::{LayerDone, Move, Ticket},
};

impl Mover {
    /// Processes all operations that have completed.
    pub(crate) fn reap(&mut self) -> Result<Progress, StoreError> {
        let progress = self.transport.reap()?;
        self.complete_over();
        self.after_completions()?;
        Ok(progress)
    }

    /// Recovers if a completion requires it, then ends abandoned jobs. In this order: a file is
    /// free only when no device can write to it.
    pub(super) fn after_completions(&mut self) -> Result<(), StoreError> {
        if let Some(cause) = self.transport.fault.take() {
            self.recover(&cause)?;
        }
        self.jobs.take_abandoned().into_iter().for_each(|job| self.let_go(&job));
        Ok(())
    }

    /// Ends operations that neither the ring nor a stream works on any more.
    pub(super) fn complete_over(&mut self) {
        while let Some(op) = self.transport.take_over() {
            self.complete(&op);
        }
    }

    fn complete(&mut self, op: &Op) {
        let Ticket { job, layer } = op.ticket;
        let job = self.jobs.get_mut(job).expect("it has an operation in flight");
        job.in_flight -= 1;
        let sizes = (self.setup.shape.object_bytes, self.setup.geometry.object_bytes());
        let (mut ended, mut damaged) = (outcome(op, job, sizes), Vec::new());
        if let Some(at) = op.buffer {
            if ended.is_ok() && job.direction == Direction::Read {
                damaged = self.copier.decode(&job.copies, layer, at, &*self.clock);
                if let Some(first) = damaged.first() {
                    ended = Err(differs(first, layer, damaged.len() as u32));
                }
            }
            self.copier.end_operation(&job.copies, at);
        }
        match ended {
            Ok(done) => self.moved(op.ticket, done),
            Err(failure) => {
                let Failure { file, status, errors, .. } = failure;
                if job.is_ahead {
                    // Often a file that was rewritten meanwhile.
                    tracing::debug!(%file, %status, errors, "reading ahead failed");
                } else {
                    tracing::warn!(%file, %layer, %status, errors, "{} failed", failure.verb());
                }
                job.layer(layer).state = LayerState::Ended(Err(failure));
                job.fail(failure);
                let mut lost = lost_files(job, failure);
                lost.extend(damaged.iter().map(|entry| entry.file));
                self.jobs.lost.extend(lost);
            }
        }
    }

    /// Ends a layer that the devices have moved, with the copies behind that.
    pub(super) fn moved(&mut self, Ticket { job, layer }: Ticket, done: LayerDone) {
        let Self { jobs, copier, tally, .. } = self;
        let Ok(job) = jobs.get_mut(job) else { return };
        let ended = match job.is_ahead {
            true => Ok(done),
            false => copier.end(&job.copies, job.direction, done),
        };
        match ended {
            Ok(ended) => {
                if let Some(begun) = job.moved(layer, ended) {
                    tally.times.moved(job.direction, self.clock.now() - begun);
                }
                match job.direction {
                    Direction::Read if job.is_ahead => copier.read_ahead(done.device_bytes),
                    Direction::Read => tally.retrieved_bytes += done.device_bytes,
                    Direction::Write => tally.stored_bytes += done.device_bytes,
                }
            }
            // The devices may have the right bytes.
            Err(failure) => {
                job.layer(layer).state = LayerState::Ended(Err(failure));
                job.fail(failure);
            }
        }
    }
}

/// Returns the result of an operation that is over. `sizes`: the bytes of an object of the engine,
/// and on the devices.
fn outcome(op: &Op, job: &Job, sizes: (u32, u32)) -> Result<LayerDone, Failure> {
    let (layer, direction) = (op.ticket.layer, job.direction);
    let completion = op.completion.expect("it is over");
    let failure = |at: usize, status: IoStatus, errors: u32| {
        // For an index that no kernel should report, use the first block.
        let Move { position, file, .. } = *job.moves.get(at).unwrap_or(&job.moves[0]);
        Failure { direction, layer, position, file, status, errors }
    };
    if !completion.is_ok() {
        let (status, entry) = completion.error.unwrap_or((IoStatus::Incomplete, 0));
        return Err(failure(entry as usize, status, completion.errors));
    }
    if let (Direction::Read, Some(checksums)) = (direction, &job.checksums) {
        // If several layers are in flight, it is unknown which one differs: all of them fail.
        let differing = checksums.differing();
        if let Some(at) = differing.first() {
            return Err(failure(*at as usize, IoStatus::Checksum, differing.len() as u32));
        }
    }
    let objects = completion.objects;
    let [bytes, device_bytes] = <[u32; 2]>::from(sizes).map(|each| objects * u64::from(each));
    Ok(LayerDone { layer, objects, bytes, device_bytes })
}

/// Returns the files that a failed layer could not read.
fn lost_files(job: &Job, failure: Failure) -> Vec<FileId> {
    // Files that are read ahead may have been rewritten meanwhile. A request that needs them finds
    // out.
    if job.is_ahead || failure.direction == Direction::Write {
        return Vec::new();
    }
    let of_map = job.map.iter().flat_map(|map| map.failures());
    // Of a layer that was cancelled, a stream moves a staging buffer that no device has filled.
    let compared = job.checksums.iter().filter(|_| failure.status == IoStatus::Checksum);
    let differing = compared.flat_map(|checksums| checksums.differing());
    let failed = of_map.chain(differing.map(|at| (at, IoStatus::Checksum)));
    let failed = failed.filter_map(|(at, status)| Some((job.moves.get(at as usize)?.file, status)));
    let failed = failed.chain([(failure.file, failure.status)]);
    failed.filter(|(_, status)| is_lost(*status)).map(|(file, _)| file).collect()
}

/// Returns true if this status of a read is an error of the file, and not only of the job.
fn is_lost(status: IoStatus) -> bool {
    !matches!(status, IoStatus::Ok | IoStatus::Cancelled | IoStatus::Invalid)
}
