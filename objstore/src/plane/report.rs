//! Reports of a rank on jobs that have ended.

use kv_catalog::{PlantedBug, planted};
use nvme_spec::nvm::Direction;

use super::{JobDone, JobFailure, JobId, Plane};
use crate::error::StoreError;

/// Result of a job.
#[derive(Debug)]
pub struct Report {
    /// The job.
    pub job: JobId,
    /// Reason why the data is not in place, or not durable; `None` on success.
    pub failure: Option<StoreError>,
    /// CRC-32C of the stored objects, `[block][row]`, blocks in the order of the job.
    pub checksums: Vec<u32>,
}

impl Plane {
    /// Makes the data of ended jobs ([`Plane::end`]) permanent, with one flush for all. The reports
    /// are for the catalog: [`crate::DurableCatalog`].
    pub fn report(&mut self, ended: Vec<(Direction, JobDone)>) -> Vec<Report> {
        let stored = ended.iter().any(|(direction, _)| *direction == Direction::Write);
        let is_due = stored && !planted(PlantedBug::RankNeverFlushes);
        let flushed = if is_due { self.flush() } else { Ok(()) };
        let flushed = flushed.map_err(|error| match error {
            StoreError::JournalFailed { cause } => cause,
            error => error.to_string(),
        });
        let recoveries = self.recoveries();
        let is_same = |done: &JobDone| {
            done.recoveries == recoveries || planted(PlantedBug::RankIgnoresRecovery)
        };
        let report = |(direction, done): (Direction, JobDone)| {
            let failure = match (done.failure, &flushed) {
                (Some(JobFailure::Transfer(failure)), _) => Some(StoreError::Transfer { failure }),
                (Some(JobFailure::Incomplete(layer)), _) => Some(StoreError::Incomplete { layer }),
                (None, _) if direction == Direction::Read => None,
                (None, Err(cause)) => Some(StoreError::JournalFailed { cause: cause.clone() }),
                (None, Ok(())) if !is_same(&done) => Some(StoreError::Forgotten),
                (None, Ok(())) => None,
            };
            Report { job: done.job, failure, checksums: done.checksums }
        };
        ended.into_iter().map(report).collect()
    }
}
