//! The admin queue: one blocking command at a time, each with a deadline, plus asynchronous events.

use std::{collections::VecDeque, sync::Arc};

use nvme_spec::{
    admin::AdminOpcode,
    ids::{Cid, Nsid, QueueId},
    sqe::Sqe,
    status::Status,
};

use crate::{
    bus::{Bus, Interrupt},
    clock::Nanos,
    dma::{DmaError, DmaSlice},
    platform::buffer::Buffer,
    queue::{Completion, DeviceError, QueueError, QueuePair},
    wait::{Dead, Env, Watch},
};

/// Entries of the admin queues: one blocking command, the event requests, and abandoned commands.
pub(crate) const ADMIN_DEPTH: u32 = 32;
/// Asynchronous event requests kept outstanding, if the controller allows as many.
const EVENT_REQUESTS: u16 = 4;
/// Limit on unanswered commands below which fire-and-forget commands are sent: controllers should
/// accept at least four concurrent aborts (Base, "Abort Command Limit").
const UNANSWERED_MAX: u32 = 4;
/// Bytes of the data page that admin commands share.
pub(crate) const DATA_BYTES: usize = 4096;
/// User words that tell asynchronous event requests from commands.
const EVENT: u64 = 0;
const COMMAND: u64 = 1;

/// Memory of the admin queues. Allocated once and reused after each reset.
#[derive(Debug)]
pub(crate) struct AdminMemory {
    pub(crate) sq: DmaSlice,
    pub(crate) cq: DmaSlice,
    pub(crate) data: Buffer,
}

impl AdminMemory {
    pub(crate) fn alloc(bus: &dyn Bus, page_bytes: u32) -> Result<Self, DmaError> {
        let page = page_bytes as usize;
        let part = |len: usize| -> Result<DmaSlice, DmaError> { alloc_aligned(bus, len, page) };
        Ok(Self {
            sq: part(ADMIN_DEPTH as usize * 64)?,
            cq: part(ADMIN_DEPTH as usize * 16)?,
            data: Self::data_page(bus, page_bytes)?,
        })
    }

    /// Allocates a data page for commands.
    pub(crate) fn data_page(bus: &dyn Bus, page_bytes: u32) -> Result<Buffer, DmaError> {
        let page = alloc_aligned(bus, DATA_BYTES, page_bytes as usize)?;
        Buffer::new(page).ok_or_else(|| unreachable_by_host(bus))
    }

    pub(crate) fn zero(&mut self) {
        for slice in [&self.sq, &self.cq] {
            if let Some(mut buffer) = Buffer::new(slice.clone()) {
                buffer.zero();
            }
        }
    }
}

/// Allocates `len` zeroed bytes whose I/O virtual address is a multiple of `page`.
pub(crate) fn alloc_aligned(bus: &dyn Bus, len: usize, page: usize) -> Result<DmaSlice, DmaError> {
    // DmaSpace promises alignment to its own pages only; the controller's may be larger.
    let slack = if page > 4096 { page } else { 0 };
    let all = DmaSlice::whole(bus.dma().alloc_on(len + slack, bus.numa_node())?)?;
    let past = all.iova().0 as usize % page;
    if past == 0 { all.slice(0, len) } else { all.slice(page - past, len) }
}

pub(crate) fn unreachable_by_host(bus: &dyn Bus) -> DmaError {
    DmaError::Unsupported {
        space: bus.dma().name().to_owned(),
        what: "memory that this process cannot reach".into(),
        hint: "the driver needs it mapped in the process, to zero and read it".into(),
    }
}

/// Reasons for the lack of an admin completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdminFault {
    Timeout(Cid),
    Device(DeviceError),
    Dead(Dead),
    /// Abandoned commands fill the queue.
    Full,
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
    pub(crate) fn new(
        bus: &Arc<dyn Bus>,
        memory: &AdminMemory,
        interrupt: Option<Interrupt>,
    ) -> Result<Self, QueueError> {
        let (sq, cq) = (memory.sq.clone(), memory.cq.clone());
        Ok(Self {
            pair: QueuePair::new(bus, QueueId::ADMIN, ADMIN_DEPTH, sq, cq)?,
            interrupt,
            requests: 0,
            requests_max: 0,
            events: VecDeque::new(),
            finished: Vec::new(),
        })
    }

    /// Sends one command and waits for its completion. After a timeout the command is still
    /// outstanding: call [`AdminQueue::wait`] again or [`AdminQueue::abandon`].
    pub(crate) fn execute(
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
    pub(crate) fn wait(
        &mut self,
        env: Env<'_>,
        cid: Cid,
        timeout: Nanos,
    ) -> Result<Completion, AdminFault> {
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
    pub(crate) fn abandon(&mut self, cid: Cid) {
        self.pair.abandon(cid);
        self.finished.retain(|completion| completion.cid != cid);
    }

    /// Returns the number of abandoned commands that have not completed.
    pub(crate) fn abandoned(&self) -> u32 {
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
