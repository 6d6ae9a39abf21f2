//! The admin queue: one blocking command at a time, each with a deadline, plus asynchronous events.
//!
//! A command that times out is aborted first. If that fails, a command that changes no state is
//! abandoned: the memory it may still write is kept until the next reset, and granted queues keep
//! working. Other commands lead to a reset, except those that may run for hours.

use std::collections::VecDeque;

use nvme_spec::{
    admin::{Abort, AdminOpcode},
    ids::{Cid, Nsid, QueueId},
    reg::{self, Aqa},
    sqe::Sqe,
    status::Status,
};

use crate::{
    bus::Interrupt,
    clock::Nanos,
    dma::{DmaError, DmaSlice},
    error::{Error, TimeoutOutcome},
    options::ControllerOptions,
    platform::buffer::Buffer,
    port::Port,
    queue::{Completion, DeviceError, QueuePair},
    wait::{Dead, Env, Watch},
};

/// Entries of the admin queues: one blocking command, the event requests, and abandoned commands.
const ADMIN_DEPTH: u32 = 32;
/// Asynchronous event requests kept outstanding, if the controller allows as many.
const EVENT_REQUESTS: u16 = 4;
/// Limit on unanswered commands below which fire-and-forget commands are sent: controllers should
/// accept at least four concurrent aborts (Base, "Abort Command Limit").
const UNANSWERED_MAX: u32 = 4;
/// Abandoned commands allowed; one more resets the controller.
const ABANDONED_MAX: u32 = ADMIN_DEPTH / 4;
/// Bytes of the data page that admin commands share.
pub(crate) const DATA_BYTES: usize = 4096;
/// User words that tell asynchronous event requests from commands.
const EVENT: u64 = 0;
const COMMAND: u64 = 1;

/// Reasons for the lack of an admin completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdminFault {
    /// The command is still outstanding.
    Timeout(Cid),
    /// It was not answered in time, and then aborted or abandoned.
    Ended(Cid, TimeoutOutcome),
    Device(DeviceError),
    Dead(Dead),
    /// Abandoned commands fill the queue.
    Full,
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

/// The admin queue, its memory, and that of commands which the controller may still execute.
#[derive(Debug)]
pub(crate) struct Admin {
    sq: DmaSlice,
    cq: DmaSlice,
    /// The data page that commands share.
    data: Buffer,
    /// Data pages of abandoned commands, kept until the next reset.
    abandoned: Vec<DmaSlice>,
    /// `None` while the controller is disabled.
    pub(crate) queue: Option<AdminQueue>,
}

impl Admin {
    /// Allocates the memory, which is used again after each reset.
    pub(crate) fn new(port: &Port) -> Result<Self, Error> {
        let sq = port.alloc(ADMIN_DEPTH as usize * 64)?;
        let cq = port.alloc(ADMIN_DEPTH as usize * 16)?;
        Ok(Self { sq, cq, data: port.buffer(DATA_BYTES)?, abandoned: Vec::new(), queue: None })
    }

    /// Zeroes the memory and tells the controller its addresses, before CC.EN is set.
    pub(crate) fn set_up(
        &mut self,
        port: &Port,
        interrupt: Option<Interrupt>,
    ) -> Result<AdminQueue, Error> {
        for slice in [&self.sq, &self.cq] {
            port.mapped(slice.clone())?.zero();
        }
        let pair = QueuePair::new(
            &port.bus,
            QueueId::ADMIN,
            ADMIN_DEPTH,
            self.sq.clone(),
            self.cq.clone(),
        );
        let pair = pair.map_err(|source| Error::Queue { ctrl: port.id.clone(), source })?;
        let size_z = (ADMIN_DEPTH - 1) as u16;
        port.write32(reg::AQA, Aqa::default().with_asqs_z(size_z).with_acqs_z(size_z).0)?;
        // 64-bit registers are written as two halves, which every controller must accept.
        for (register, slice) in [(reg::ASQ, &self.sq), (reg::ACQ, &self.cq)] {
            let iova = slice.iova().0;
            port.write32(register, iova as u32)?;
            port.write32(register + 4, (iova >> 32) as u32)?;
        }
        Ok(AdminQueue::new(pair, interrupt))
    }

    /// Frees the data of abandoned commands: a reset has ended them.
    pub(crate) fn all_ended(&mut self) {
        self.abandoned.clear();
    }

    /// Keeps the memory allocated for good.
    pub(crate) fn leak(&mut self) {
        let data = self.data.memory().clone();
        let abandoned = std::mem::take(&mut self.abandoned);
        std::mem::forget((self.sq.clone(), self.cq.clone(), data, abandoned));
    }

    /// Returns `sqe` with the data page, which begins with `bytes` and is zeroed after them.
    pub(crate) fn with_data(&mut self, sqe: Sqe, bytes: &[u8]) -> Result<Sqe, DmaError> {
        self.data.zero();
        self.data.write(0, bytes)?;
        Ok(sqe.with_prps(self.data.iova().0, 0))
    }

    /// Reads the data page.
    pub(crate) fn read_data(&self, into: &mut [u8]) -> Result<(), DmaError> {
        self.data.read(0, into)
    }

    /// Sends one command and waits for its completion. After [`AdminFault::Timeout`] the command is
    /// outstanding: [`Admin::forget`], [`Admin::end_late`] or a reset must follow.
    pub(crate) fn execute(
        &mut self,
        env: Env<'_>,
        sqe: &Sqe,
        timeout: Nanos,
    ) -> Result<Completion, AdminFault> {
        let queue = self.queue.as_mut().ok_or(AdminFault::Full)?;
        queue.execute(env, sqe, timeout)
    }

    /// Ends command `cid`, which was not answered in time: aborts it, else abandons it, as far as
    /// its kind allows. Returns its completion if that arrives after all.
    pub(crate) fn end_late(
        &mut self,
        port: &Port,
        env: Env<'_>,
        options: &ControllerOptions,
        sqe: &Sqe,
        cid: Cid,
    ) -> Result<Completion, AdminFault> {
        let late = Late::of(AdminOpcode(sqe.opcode));
        if late != Late::Abandon {
            match self.abort(env, options, cid)? {
                Some(done) if done.status.code() == Status::ABORTED_BY_REQUEST => {
                    return Err(AdminFault::Ended(cid, TimeoutOutcome::Aborted));
                }
                Some(done) => return Ok(done),
                None => {}
            }
        }
        if late != Late::AbortOrReset && self.abandon(port, cid) {
            return Err(AdminFault::Ended(cid, TimeoutOutcome::Abandoned));
        }
        Err(AdminFault::Timeout(cid))
    }

    /// Aborts a command. Returns its completion if that arrives within the grace period.
    fn abort(
        &mut self,
        env: Env<'_>,
        options: &ControllerOptions,
        cid: Cid,
    ) -> Result<Option<Completion>, AdminFault> {
        match self.execute(env, &abort_sqe(QueueId::ADMIN, cid), options.command_timeout) {
            // Whatever the status of the Abort, the command may be about to complete.
            Ok(_) => {}
            Err(AdminFault::Timeout(abort)) => self.forget(abort),
            Err(fault) => return Err(fault),
        }
        let Some(queue) = self.queue.as_mut() else { return Ok(None) };
        match queue.wait(env, cid, options.abort_grace) {
            Ok(completion) => Ok(Some(completion)),
            Err(AdminFault::Timeout(_)) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Abandons a command that has no data.
    pub(crate) fn forget(&mut self, cid: Cid) {
        if let Some(queue) = self.queue.as_mut() {
            queue.abandon(cid);
        }
    }

    /// Abandons a command and quarantines the data page, which may still be written. Returns
    /// `false` if too many commands are abandoned or there is no memory for a new page.
    fn abandon(&mut self, port: &Port, cid: Cid) -> bool {
        let Some(queue) = self.queue.as_mut() else { return false };
        queue.abandon(cid);
        if queue.abandoned() > ABANDONED_MAX {
            return false;
        }
        match port.buffer(DATA_BYTES) {
            Ok(fresh) => {
                let old = std::mem::replace(&mut self.data, fresh);
                self.abandoned.push(old.memory().clone());
                true
            }
            Err(error) => {
                tracing::warn!(ctrl = %port.id, %error, "no page instead of an abandoned one");
                false
            }
        }
    }
}

/// Returns the command that asks for an Abort of command `cid` of queue `sqid`.
pub(crate) fn abort_sqe(sqid: QueueId, cid: Cid) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::ABORT.0, Cid(0), Nsid(0));
    Abort { sqid, cid: cid.0 }.write_to(&mut sqe);
    sqe
}

#[derive(Debug)]
pub(crate) struct AdminQueue {
    pair: QueuePair,
    interrupt: Option<Interrupt>,
    requests: u16,
    requests_max: u16,
    events: VecDeque<u32>,
    /// Completions that were reaped but not taken yet.
    finished: Vec<Completion>,
}

impl AdminQueue {
    fn new(pair: QueuePair, interrupt: Option<Interrupt>) -> Self {
        Self {
            pair,
            interrupt,
            requests: 0,
            requests_max: 0,
            events: VecDeque::new(),
            finished: Vec::new(),
        }
    }

    /// Sends one command and waits for its completion. After a timeout the command is still
    /// outstanding: call [`AdminQueue::wait`] again or [`AdminQueue::abandon`].
    fn execute(
        &mut self,
        env: Env<'_>,
        sqe: &Sqe,
        timeout: Nanos,
    ) -> Result<Completion, AdminFault> {
        let cid = self.pair.post(sqe, COMMAND).map_err(|_| AdminFault::Full)?;
        self.pair.update_tail();
        self.wait(env, cid, timeout)
    }

    /// Sends a command without waiting for its completion. Returns `false`, and sends nothing,
    /// while too many are unanswered.
    pub(crate) fn send(&mut self, sqe: &Sqe) -> bool {
        if self.abandoned() >= UNANSWERED_MAX {
            return false;
        }
        let Ok(cid) = self.pair.post(sqe, COMMAND) else { return false };
        self.pair.update_tail();
        self.abandon(cid);
        true
    }

    /// Waits for the completion of an outstanding command.
    fn wait(&mut self, env: Env<'_>, cid: Cid, timeout: Nanos) -> Result<Completion, AdminFault> {
        let deadline = env.clock.now() + timeout;
        let interrupt = self.interrupt.clone();
        let mut watch = Watch::new(env, interrupt.as_ref());
        loop {
            if let Some(completion) = self.take(cid)? {
                return Ok(completion);
            }
            if !watch.wait(deadline).map_err(AdminFault::Dead)? {
                // It may have completed while the clock was read.
                return self.take(cid)?.ok_or(AdminFault::Timeout(cid));
            }
        }
    }

    /// Takes the completion of `cid`, if there is one.
    fn take(&mut self, cid: Cid) -> Result<Option<Completion>, AdminFault> {
        self.poll().map_err(AdminFault::Device)?;
        let at = self.finished.iter().position(|completion| completion.cid == cid);
        Ok(at.map(|at| self.finished.swap_remove(at)))
    }

    /// Gives up waiting for `cid`; its completion may still come.
    fn abandon(&mut self, cid: Cid) {
        self.pair.abandon(cid);
        self.finished.retain(|completion| completion.cid != cid);
    }

    /// Returns the number of abandoned commands that have not completed.
    fn abandoned(&self) -> u32 {
        self.pair.outstanding() - u32::from(self.requests)
    }

    /// Reaps completions without waiting.
    pub(crate) fn poll(&mut self) -> Result<(), DeviceError> {
        let Self { pair, requests, requests_max, events, finished, .. } = self;
        pair.reap(ADMIN_DEPTH, |completion| {
            if completion.user != EVENT {
                finished.extend((!completion.late).then_some(completion));
                return;
            }
            *requests = requests.saturating_sub(1);
            if completion.status.is_success() {
                events.push_back(completion.result);
            } else if completion.status.code() == Status::AER_LIMIT_EXCEEDED {
                *requests_max = *requests;
            }
        })?;
        Ok(())
    }

    /// Sets the number of asynchronous event requests that the controller allows.
    pub(crate) fn set_event_limit(&mut self, limit: u16) {
        self.requests_max = limit.min(EVENT_REQUESTS);
    }

    /// Keeps asynchronous event requests outstanding.
    pub(crate) fn request_events(&mut self) {
        while self.requests < self.requests_max {
            let sqe = Sqe::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, Cid(0), Nsid(0));
            if self.pair.post(&sqe, EVENT).is_err() {
                break;
            }
            self.requests += 1;
        }
        self.pair.update_tail();
    }

    /// Takes the oldest unread event.
    pub(crate) fn next_event(&mut self) -> Option<u32> {
        self.events.pop_front()
    }
}
