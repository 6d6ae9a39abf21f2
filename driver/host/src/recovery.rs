//! Recovery from timeouts by escalation: Abort, delete queue, reset.
//!
//! Memory that a command may still use is quarantined until a step has ended the command. If the
//! last step fails, it is kept forever.

use nvme_spec::ids::QueueId;

use crate::{
    admin::AdminFault,
    controller::{Controller, State},
    error::{CommandId, Error, FailCause, TimeoutOutcome},
    grant::Quiesced,
    grants::{HOST_QUEUE, OnDevice},
    health::abort_sqe,
    io::{Data, Flight, IoFault, Work},
    wait::{Env, health},
};

/// The step that recovered the granted queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecoveryLevel {
    /// The queues were deleted and recreated.
    Queues,
    /// The controller was reset.
    Controller,
}

/// Result of [`Controller::recover`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovered {
    /// The step that was needed.
    pub level: RecoveryLevel,
    /// Queues that can be granted again: same identifiers, same memory, zeroed.
    pub queues: Vec<QueueId>,
}

impl Controller {
    /// Ends all outstanding commands of executors and recreates their queues in the same memory:
    /// first by deleting the queues, and if the controller fails to do so or has failed, by
    /// resetting it. All grants are void afterwards; take new ones.
    ///
    /// Outstanding commands are not aborted individually: their identifiers belong to the executor,
    /// and deleting a queue aborts all of them (Base, "Delete I/O Submission Queue").
    ///
    /// # Errors
    /// Returns [`Error::QueueState`], without any effect, if `proof` does not cover every grant of
    /// this controller. If the reset fails, returns [`Error`]: the controller stays failed, and the
    /// queues' memory is kept by this value and leaked when it is dropped. Returns
    /// [`Error::Closed`] after a shutdown.
    pub fn recover(&mut self, proof: &Quiesced) -> Result<Recovered, Error> {
        let span = tracing::info_span!("recover", ctrl = %self.id);
        let _entered = span.enter();
        if self.state == State::Shutdown {
            return Err(Error::Closed { ctrl: self.id.clone() });
        }
        for qid in self.queues.keys() {
            self.check_proof(*qid, proof)?;
        }
        let mut level = RecoveryLevel::Queues;
        if !(self.state == State::Ready && health(&*self.bus).is_ok() && self.remake_queues()) {
            level = RecoveryLevel::Controller;
            // The proof covers all grants, and the reset ends all DMA.
            for queue in self.queues.values_mut() {
                queue.granted = None;
            }
            let whole = |c: &Self| {
                let mut queues = c.queues.values();
                c.state == State::Ready && queues.all(|queue| queue.device == OnDevice::Live)
            };
            // An admin timeout on the way may have reset the controller already.
            if !(whole(self) && health(&*self.bus).is_ok()) {
                self.reset_controller()?;
            }
        }
        let queues = self.queues.keys().copied().collect();
        tracing::info!(ctrl = %self.id, ?level, ?queues, "queues recovered");
        Ok(Recovered { level, queues })
    }

    /// Recreates granted and lost queues. Returns whether all of it worked.
    fn remake_queues(&mut self) -> bool {
        let granted: Vec<QueueId> =
            self.queues.iter().filter(|(_, q)| q.granted.is_some()).map(|(qid, _)| *qid).collect();
        for qid in granted {
            let absent = |c: &Self| c.queues.get(&qid).map(|q| q.device) == Some(OnDevice::Absent);
            let deleted = absent(self) || self.delete_on_device(qid).is_ok();
            let Some(queue) = self.queues.get_mut(&qid) else { continue };
            if !deleted {
                // An admin timeout on the way resets the controller, and then the queue is absent.
                if queue.device == OnDevice::Live {
                    queue.device = OnDevice::Stuck;
                }
                return false;
            }
            queue.device = OnDevice::Absent;
            queue.granted = None;
        }
        self.recreate_idle_queues().is_ok()
    }

    /// Turns the failure of a blocking call into an error and recovers from it.
    pub(crate) fn io_failed(&mut self, work: &Work<'_>, fault: IoFault) -> Error {
        let ctrl = self.id.clone();
        if self.host.as_ref().is_some_and(|host| host.in_flight() > 0)
            && let Data::Parts(slices) = &work.data
        {
            self.quarantine.extend(slices.iter().cloned());
        }
        let error = match fault {
            IoFault::Command(flight, status) => {
                Error::Command { command: self.io_id(work, &flight), status }
            }
            IoFault::Timeout(flight) => self.io_timeout(work, &flight),
            IoFault::Device(source) => {
                self.fail(FailCause::Misbehaved(source));
                Error::Misbehaved { ctrl, source }
            }
            IoFault::Dead(dead) => self.dead(dead),
            IoFault::Descriptor(source) => Error::Descriptor { ctrl, source },
            IoFault::Dma(source) => Error::Dma { ctrl, source },
        };
        if let Some(suppressed) = self.warnings.allow(self.clock.now()) {
            tracing::warn!(ctrl = %self.id, nsid = work.nsid.0, %error, suppressed, "I/O failed");
        }
        error
    }

    fn io_id(&self, work: &Work<'_>, flight: &Flight) -> Box<CommandId> {
        Box::new(CommandId {
            ctrl: self.id.clone(),
            what: work.what,
            nsid: work.nsid,
            qid: HOST_QUEUE,
            cid: flight.cid,
            range: work.range(flight),
        })
    }

    fn io_timeout(&mut self, work: &Work<'_>, flight: &Flight) -> Error {
        let command = self.io_id(work, flight);
        tracing::warn!(ctrl = %self.id, %command, "not answered in time");
        // During set-up there is no recovery here: set-up itself fails.
        let outcome = if self.state != State::Ready {
            TimeoutOutcome::ControllerFailed
        } else if self.abort_host_command(flight) {
            TimeoutOutcome::Aborted
        } else if self.remake_host_queue() {
            TimeoutOutcome::QueueRecreated
        } else if self.reset_controller().is_ok() {
            TimeoutOutcome::ControllerReset
        } else {
            TimeoutOutcome::ControllerFailed
        };
        if outcome != TimeoutOutcome::ControllerFailed {
            // Each of these steps ends all commands of the queue.
            self.quarantine.clear();
        }
        Error::Timeout { command, waited: self.options.command_timeout, outcome }
    }

    /// First step. Returns whether nothing is in flight on the host queue any more.
    fn abort_host_command(&mut self, flight: &Flight) -> bool {
        let sqe = abort_sqe(HOST_QUEUE, flight.cid);
        match self.admin_raw(&sqe, self.options.command_timeout) {
            // Whatever the status of the Abort, the command may be about to complete.
            Ok(completion) => {
                let status = completion.status;
                tracing::debug!(ctrl = %self.id, %status, result = completion.result, "abort");
            }
            Err(fault) => {
                tracing::warn!(ctrl = %self.id, ?fault, "abort failed");
                if let AdminFault::Timeout(cid) = fault {
                    self.admin_forget(cid);
                }
                return false;
            }
        }
        let env = Env::new(&self.clock, &self.bus, self.info.pause_max);
        let deadline = self.clock.now() + self.options.abort_grace;
        self.host.as_mut().is_some_and(|host| host.drain(env, deadline).unwrap_or(false))
    }

    /// Second step: deletes the host queue, which ends its commands, and recreates it.
    fn remake_host_queue(&mut self) -> bool {
        if self.delete_on_device(HOST_QUEUE).is_err() {
            return false;
        }
        self.host = None;
        self.create_host_queue().is_ok()
    }
}
