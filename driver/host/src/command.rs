//! Admin commands: submission, retries, aborts on timeout, and abandonment.
//!
//! A command that times out is aborted first. If that fails, a command that changes no state is
//! abandoned: the memory it may still write is kept until the next reset, and granted queues keep
//! working. Other commands lead to a reset, except those that may run for hours.

use nvme_spec::{
    admin::{AdminOpcode, Cns, FeatureId, Identify, SetFeatures},
    ids::{Cid, Nsid, QueueId},
    sqe::Sqe,
    status::Status,
};
use zerocopy::FromBytes;

use crate::{
    admin::{ADMIN_DEPTH, AdminFault, AdminMemory, DATA_BYTES},
    clock::{Nanos, wait_until},
    controller::{Controller, State},
    error::{CommandId, Error, FailCause, TimeoutOutcome},
    health::abort_sqe,
    queue::Completion,
    wait::Env,
};

/// Number of retries of a command.
pub(crate) const RETRIES: u32 = 4;
/// Minimum delay before the first retry; doubled each time.
const RETRY_DELAY: Nanos = Nanos::from_millis(10);
/// Maximum delay, whatever the controller asks for.
const RETRY_DELAY_MAX: Nanos = Nanos::from_millis(10_000);
/// Abandoned commands allowed; one more resets the controller.
const ABANDONED_MAX: u32 = ADMIN_DEPTH / 4;

/// Returns the delay before retry number `attempt` (from 0) of a command that ended with `status`,
/// or `None` if it must not be retried. `crdt` holds the controller's retry delay times in units of
/// 100 ms, which the CRD field of the status selects (Base, "Command Retry Delay").
pub(crate) fn retry_delay(status: Status, crdt: [u16; 3], attempt: u32) -> Option<Nanos> {
    if attempt >= RETRIES || !status.may_retry() {
        return None;
    }
    let asked = match usize::from(status.crd()) {
        0 => Nanos(0),
        index => Nanos::from_millis(u64::from(crdt[index - 1]) * 100),
    };
    Some(asked.max(Nanos(RETRY_DELAY.0 << attempt)).min(RETRY_DELAY_MAX))
}

/// Reaction to the timeout of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Late {
    /// The command changes no state: abort it, else abandon it.
    AbortOrAbandon,
    /// The driver needs the outcome: abort the command, else reset the controller.
    AbortOrReset,
    /// Stopping the command halfway would do harm: let the controller finish it.
    Abandon,
}

impl Late {
    fn of(opcode: AdminOpcode) -> Self {
        match opcode {
            AdminOpcode::FORMAT_NVM | AdminOpcode::SANITIZE | AdminOpcode::FIRMWARE_COMMIT => {
                Self::Abandon
            }
            AdminOpcode::CREATE_IO_CQ
            | AdminOpcode::CREATE_IO_SQ
            | AdminOpcode::DELETE_IO_CQ
            | AdminOpcode::DELETE_IO_SQ
            | AdminOpcode::SET_FEATURES => Self::AbortOrReset,
            _ => Self::AbortOrAbandon,
        }
    }
}

impl Controller {
    /// Returns an Identify data structure in its wire format.
    ///
    /// # Errors
    /// Same as any admin command.
    pub(crate) fn identify<T: FromBytes>(&mut self, cns: Cns, nsid: Nsid) -> Result<T, Error> {
        let mut sqe = Sqe::new(AdminOpcode::IDENTIFY.0, Cid(0), nsid);
        Identify { cns, ..Default::default() }.write_to(&mut sqe);
        let mut bytes = [0u8; DATA_BYTES];
        self.admin_read_bytes("identify", sqe, &mut bytes)?;
        self.read_from("identify", &bytes)
    }

    /// Parses `bytes`, the data returned by the command `what`.
    pub(crate) fn read_from<T: FromBytes>(
        &self,
        what: &'static str,
        bytes: &[u8],
    ) -> Result<T, Error> {
        T::read_from_prefix(bytes).map(|(value, _)| value).map_err(|_| Error::Implausible {
            ctrl: self.id.clone(),
            what: format!("{what} returned {} bytes, too few", bytes.len()),
        })
    }

    /// Runs an admin command that returns at most one page of data.
    pub(crate) fn admin_read_bytes(
        &mut self,
        what: &'static str,
        sqe: Sqe,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let ctrl = self.id.clone();
        let Some(memory) = self.admin_memory.as_mut() else { return Err(Error::Closed { ctrl }) };
        memory.data.zero();
        let prp1 = memory.data.iova().0;
        self.admin_command(what, sqe.with_prps(prp1, 0), self.options.admin_timeout)?;
        let Some(memory) = self.admin_memory.as_ref() else { return Err(Error::Closed { ctrl }) };
        memory.data.read(0, into).map_err(|source| Error::Dma { ctrl, source })
    }

    /// Sets a feature and returns completion dword 0.
    ///
    /// # Errors
    /// Same as any admin command.
    pub fn set_feature(&mut self, fid: FeatureId, nsid: Nsid, value: u32) -> Result<u32, Error> {
        let mut sqe = Sqe::new(AdminOpcode::SET_FEATURES.0, Cid(0), nsid);
        SetFeatures { fid, save: false, value }.write_to(&mut sqe);
        Ok(self.admin_command("set features", sqe, self.options.admin_timeout)?.result)
    }

    /// Announces that the host honors retry delays (ACRE); a controller reports none before that
    /// (Base, "Host Behavior Support").
    pub(crate) fn enable_retry_delays(&mut self) -> Result<(), Error> {
        if self.info.crdt == [0; 3] {
            return Ok(());
        }
        let ctrl = self.id.clone();
        let Some(memory) = self.admin_memory.as_mut() else { return Err(Error::Closed { ctrl }) };
        memory.data.zero();
        memory.data.write(0, &[1]).map_err(|source| Error::Dma { ctrl, source })?;
        let mut sqe = Sqe::new(AdminOpcode::SET_FEATURES.0, Cid(0), Nsid(0));
        sqe = sqe.with_prps(memory.data.iova().0, 0);
        let fid = FeatureId::HOST_BEHAVIOR_SUPPORT;
        SetFeatures { fid, ..Default::default() }.write_to(&mut sqe);
        match self.admin_command("set features", sqe, self.options.admin_timeout) {
            // Not worth failing for: the controller then reports no delays.
            Ok(_) | Err(Error::Command { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends an admin command and waits for it. Retries it if the status allows.
    pub(crate) fn admin_command(
        &mut self,
        what: &'static str,
        sqe: Sqe,
        timeout: Nanos,
    ) -> Result<Completion, Error> {
        for attempt in 0.. {
            let error = match self.admin_once(what, &sqe, timeout) {
                Err(error @ Error::Command { .. }) => error,
                result => return result,
            };
            let status = error.status().unwrap_or_default();
            let Some(delay) = retry_delay(status, self.info.crdt, attempt) else {
                return Err(error);
            };
            tracing::debug!(ctrl = %self.id, what, %status, attempt, "sent again");
            wait_until(&*self.clock, self.clock.now() + delay, || false);
        }
        unreachable!("the number of attempts is limited")
    }

    /// Sends an admin command once. Misbehavior of the controller moves it to Failed.
    pub(crate) fn admin_once(
        &mut self,
        what: &'static str,
        sqe: &Sqe,
        timeout: Nanos,
    ) -> Result<Completion, Error> {
        self.usable()?;
        let done = match self.admin_raw(sqe, timeout) {
            Err(AdminFault::Timeout(cid)) => self.admin_late(what, sqe, timeout, cid),
            Err(fault) => Err(self.admin_fault(what, sqe, timeout, fault)),
            Ok(completion) => Ok(completion),
        };
        let completion = done?;
        if completion.status.is_success() {
            return Ok(completion);
        }
        let command = self.admin_id(what, sqe, completion.cid);
        Err(Error::Command { command, status: completion.status })
    }

    /// Same as [`Controller::admin_once`] without any recovery. After a timeout the command is
    /// still outstanding: [`Controller::admin_abandon`] or a reset must follow.
    pub(crate) fn admin_raw(
        &mut self,
        sqe: &Sqe,
        timeout: Nanos,
    ) -> Result<Completion, AdminFault> {
        let env = Env::new(&self.clock, &self.bus, self.info.pause_max);
        let Some(admin) = self.admin.as_mut() else { return Err(AdminFault::Full) };
        admin.execute(env, sqe, timeout)
    }

    /// Handles the timeout of an admin command.
    fn admin_late(
        &mut self,
        what: &'static str,
        sqe: &Sqe,
        waited: Nanos,
        cid: Cid,
    ) -> Result<Completion, Error> {
        let late = Late::of(AdminOpcode(sqe.opcode));
        tracing::warn!(ctrl = %self.id, what, cid = cid.0, ?late, "not answered in time");
        let timeout = |outcome, command| Err(Error::Timeout { command, waited, outcome });
        let command = self.admin_id(what, sqe, cid);
        // During set-up there is no recovery here: set-up itself fails.
        if self.state == State::Ready && late != Late::Abandon {
            match self.admin_abort(cid) {
                Ok(Some(done)) if done.status.code() == Status::ABORTED_BY_REQUEST => {
                    return timeout(TimeoutOutcome::Aborted, command);
                }
                Ok(Some(done)) => return Ok(done),
                Ok(None) => {}
                Err(fault) => return Err(self.admin_fault("abort", sqe, waited, fault)),
            }
        }
        let outcome = if self.state != State::Ready {
            TimeoutOutcome::ControllerFailed
        } else if late != Late::AbortOrReset && self.admin_abandon(cid) {
            TimeoutOutcome::Abandoned
        } else {
            self.reset_for(FailCause::AdminTimeout { what })
        };
        timeout(outcome, command)
    }

    /// Aborts an admin command. Returns its completion if that arrives within the grace period.
    fn admin_abort(&mut self, cid: Cid) -> Result<Option<Completion>, AdminFault> {
        match self.admin_raw(&abort_sqe(QueueId::ADMIN, cid), self.options.command_timeout) {
            // Whatever the status of the Abort, the command may be about to complete.
            Ok(_) => {}
            Err(AdminFault::Timeout(abort)) => self.admin_forget(abort),
            Err(fault) => return Err(fault),
        }
        let env = Env::new(&self.clock, &self.bus, self.info.pause_max);
        let Some(admin) = self.admin.as_mut() else { return Ok(None) };
        match admin.wait(env, cid, self.options.abort_grace) {
            Ok(completion) => Ok(Some(completion)),
            Err(AdminFault::Timeout(_)) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Abandons an admin command that has no data.
    pub(crate) fn admin_forget(&mut self, cid: Cid) {
        if let Some(admin) = self.admin.as_mut() {
            admin.abandon(cid);
        }
    }

    /// Abandons an admin command and quarantines its data page, which may still be written. Returns
    /// `false` if too many commands are abandoned or there is no memory for a new page.
    pub(crate) fn admin_abandon(&mut self, cid: Cid) -> bool {
        let (Some(admin), Some(memory)) = (self.admin.as_mut(), self.admin_memory.as_mut()) else {
            return false;
        };
        admin.abandon(cid);
        if admin.abandoned() > ABANDONED_MAX {
            return false;
        }
        match AdminMemory::data_page(&*self.bus, self.caps.page_bytes) {
            Ok(fresh) => {
                let old = std::mem::replace(&mut memory.data, fresh);
                self.abandoned.push(old.memory().clone());
                true
            }
            Err(error) => {
                tracing::warn!(ctrl = %self.id, %error, "no page instead of an abandoned one");
                false
            }
        }
    }

    fn admin_fault(
        &mut self,
        what: &'static str,
        sqe: &Sqe,
        waited: Nanos,
        fault: AdminFault,
    ) -> Error {
        let ctrl = self.id.clone();
        match fault {
            AdminFault::Dead(dead) => self.dead(dead),
            AdminFault::Device(source) => {
                self.fail(FailCause::Misbehaved(source));
                Error::Misbehaved { ctrl, source }
            }
            AdminFault::Timeout(_) | AdminFault::Full => {
                let command = self.admin_id(what, sqe, Cid(0xFFFF));
                let outcome = self.reset_for(FailCause::AdminTimeout { what });
                Error::Timeout { command, waited, outcome }
            }
        }
    }

    /// Resets a ready controller. During set-up, only reports the failure.
    fn reset_for(&mut self, cause: FailCause) -> TimeoutOutcome {
        if self.state == State::Ready {
            tracing::error!(ctrl = %self.id, %cause, "resetting the controller");
            if self.reset_controller().is_ok() {
                return TimeoutOutcome::ControllerReset;
            }
            self.fail(cause);
        }
        TimeoutOutcome::ControllerFailed
    }

    fn admin_id(&self, what: &'static str, sqe: &Sqe, cid: Cid) -> Box<CommandId> {
        let (ctrl, qid) = (self.id.clone(), QueueId::ADMIN);
        Box::new(CommandId { ctrl, what, nsid: sqe.nsid(), qid, cid, range: None })
    }
}
