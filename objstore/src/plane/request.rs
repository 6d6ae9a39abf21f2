//! Beginning and ending jobs.

use gio_uring::Affine;
use nvme_spec::nvm::Direction;

use super::{
    Plane, Target,
    checksums::JobChecksums,
    job::{Job, JobDone, JobId, Move},
};
use crate::error::StoreError;

impl Plane {
    /// Prepares to move blocks. This is the only step whose cost grows with their number. A job
    /// without moves is valid: its layers are done as soon as they are started.
    ///
    /// `expected`: for a read, the checksums from the [`JobDone`] of the write, `[block][row]`;
    /// objects that do not match fail with [`gio_uring::IoStatus::Checksum`]. Empty: nothing is
    /// compared.
    ///
    /// # Errors
    /// Returns [`StoreError::NoSuchBlock`] or [`StoreError::NoSuchFile`];
    /// [`StoreError::DuplicateBlock`] if a read names a block twice; [`StoreError::Staging`] for
    /// more blocks than fit into a staging buffer; [`StoreError::ReadOnly`] for a write, and
    /// [`StoreError::JournalFailed`] after a failed flush; [`StoreError::Ring`] if memory for the
    /// job runs out ([`crate::StoreOptions::arena_bytes`]); [`StoreError::Failed`].
    pub fn begin(
        &mut self,
        direction: Direction,
        moves: &[Move],
        expected: &[u32],
    ) -> Result<JobId, StoreError> {
        self.sync()?;
        if direction == Direction::Write {
            self.check_writable()?;
            self.check_flushed()?;
        }
        self.jobs_ever += 1;
        let id = JobId(self.jobs_ever);
        self.check_moves(id, direction, moves)?;
        self.check_room(moves.len())?;
        let mut job = Job::new(direction, self.shape.layers, moves, self.recoveries());
        let rest = self.divide(&mut job, expected);
        let uploaded = self.upload(&mut job, rest.as_deref().unwrap_or(expected));
        if let Err(error) = uploaded.and_then(|()| self.upload_copies(&mut job)) {
            self.let_go(&job);
            return Err(error);
        }
        self.jobs.insert(id, job);
        Ok(id)
    }

    /// Keeps a job's data apart from data of other classes, on devices with placement handles
    /// (Flexible Data Placement): data that expires at about the same time should have one class.
    /// Handle 0 is used by all writes without a class: the journal's. Classes share the others
    /// round-robin. Layers that were started before are not affected.
    ///
    /// # Errors
    /// Returns [`StoreError::NoSuchJob`].
    pub fn place(&mut self, id: JobId, class: u32) -> Result<(), StoreError> {
        let handles = self.placements.saturating_sub(1);
        let job = self.jobs.get_mut(&id).ok_or(StoreError::NoSuchJob { job: id })?;
        job.placement = (handles > 0).then(|| 1 + (class % handles) as u16);
        Ok(())
    }

    /// Ends a job of which nothing is in flight. Stored data may be in volatile caches: before it
    /// is committed, [`Plane::flush`] the devices and compare [`JobDone::recoveries`].
    ///
    /// # Errors
    /// Returns [`StoreError::NoSuchJob`], [`StoreError::InFlight`] or [`StoreError::Failed`].
    pub fn end(&mut self, id: JobId) -> Result<JobDone, StoreError> {
        self.check()?;
        if let Some(op) = self.ops.iter().find(|op| op.job == id) {
            return Err(StoreError::InFlight { layer: op.layer });
        }
        let job = self.jobs.remove(&id).ok_or(StoreError::NoSuchJob { job: id })?;
        let (failure, recoveries) = (job.verdict(), job.recoveries);
        let made = job.checksums.as_ref().filter(|_| job.direction == Direction::Write);
        let checksums = made.map(|made| made.values(self.shape.rows(), &job.moves));
        let checksums = checksums.unwrap_or_default();
        self.let_go(&job);
        Ok(JobDone { job: id, failure, recoveries, checksums })
    }

    /// Returns a layer of the job that is in flight, if there is one.
    pub(crate) fn in_flight(&self, id: JobId) -> Option<super::Ticket> {
        let op = self.ops.iter().find(|op| op.job == id)?;
        Some(self.ticket(op.job, op.layer, [op.end.clone(), op.moved.clone()]))
    }

    /// Abandons a job. It ends immediately, or when its last operation completes:
    /// [`Plane::take_ended`] then returns it, and no device accesses its files or blocks any more.
    pub fn abandon(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.in_flight == 0 {
            if let Some(job) = self.jobs.remove(&id) {
                self.let_go(&job);
            }
            self.ended.push(id);
        } else if !std::mem::replace(&mut job.abandoned, true) {
            self.abandoned += 1;
        }
    }

    fn check_moves(
        &mut self,
        id: JobId,
        direction: Direction,
        moves: &[Move],
    ) -> Result<(), StoreError> {
        let (blocks, files) = (self.pool.blocks(), self.files);
        for Move { file, block, .. } in moves.iter().copied() {
            if block.0 >= blocks {
                return Err(StoreError::NoSuchBlock { block, blocks });
            }
            if file.0 >= files {
                return Err(StoreError::NoSuchFile { file, files });
            }
            // Two blocks read into the same place would leave a mixture.
            let used = &mut self.scratch.used[block.0 as usize];
            let before = std::mem::replace(used, id.0);
            if direction == Direction::Read && before == id.0 {
                return Err(StoreError::DuplicateBlock { block });
            }
        }
        Ok(())
    }

    /// Refuses a job that does not fit into a staging buffer.
    fn check_room(&self, blocks: usize) -> Result<(), StoreError> {
        match &self.target {
            Target::Staged(staging) if blocks > staging.slots() as usize => {
                Err(StoreError::Staging { blocks, slots: staging.slots() })
            }
            _ => Ok(()),
        }
    }

    /// Uploads the job's map; an empty one needs none.
    pub(super) fn upload(&mut self, job: &mut Job, expected: &[u32]) -> Result<(), StoreError> {
        if job.moves.is_empty() {
            return Ok(());
        }
        let devices = self.geometry.devices();
        // Blocks that are read ahead go to the DRAM cache itself.
        let staged = matches!(self.target, Target::Staged(_)) && !job.is_ahead;
        let rows = self.shape.rows();
        let wanted = self.checksums && (job.direction == Direction::Write || !expected.is_empty());
        let mut map = std::mem::take(&mut self.scratch.map);
        map.clear();
        map.extend(job.moves.iter().map(|at| Affine { block: at.block.0, file: at.file.0 }));
        let ring = self.ring()?;
        if staged {
            // The move needs the blocks; for the devices, objects are ordered by position.
            job.blocks = Some(ring.upload(map.iter().map(|entry| entry.block))?);
            map.iter_mut().zip(0..).for_each(|(entry, position)| entry.block = position);
        }
        let uploaded = ring.upload_map(&map, devices)?;
        if wanted {
            let count = map.len();
            let made = JobChecksums::new(ring, &uploaded, rows, count, expected, staged)?;
            job.checksums = Some(made);
        }
        job.map = Some(uploaded);
        self.scratch.map = map;
        Ok(())
    }
}
