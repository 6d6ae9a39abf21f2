//! The admin queue: one command at a time, each with a deadline, and asynchronous events beside.

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

/// Entries of the admin queues. One blocking command, the events, and what was abandoned.
pub(crate) const ADMIN_DEPTH: u32 = 32;
/// Asynchronous event requests kept outstanding, if the controller allows as many.
const EVENT_REQUESTS: u16 = 4;
/// Bytes of the data page that admin commands share.
pub(crate) const DATA_BYTES: usize = 4096;
/// User word of asynchronous event requests; commands count up from 1.
const EVENT: u64 = 0;

/// The admin queues' memory. Allocated once, used again after each reset.
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
        let data = part(DATA_BYTES)?;
        let data = Buffer::new(data).ok_or_else(|| unreachable_by_host(bus))?;
        Ok(Self {
            sq: part(ADMIN_DEPTH as usize * 64)?,
            cq: part(ADMIN_DEPTH as usize * 16)?,
            data,
        })
    }

    pub(crate) fn zero(&mut self) {
        for slice in [&self.sq, &self.cq] {
            if let Some(mut buffer) = Buffer::new(slice.clone()) {
                buffer.zero();
            }
        }
    }
}

/// `len` zeroed bytes whose address for the controller is a multiple of `page`.
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

/// Why an admin command has no completion.
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
    next: u64,
    requests: u16,
    requests_max: u16,
    events: VecDeque<u32>,
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
            next: 1,
            requests: 0,
            requests_max: 0,
            events: VecDeque::new(),
        })
    }

    /// Sends one command and waits for its completion. After a timeout the command is abandoned;
    /// its data page may still be written until the controller is reset.
    pub(crate) fn execute(
        &mut self,
        env: Env<'_>,
        sqe: &Sqe,
        timeout: Nanos,
    ) -> Result<Completion, AdminFault> {
        let user = self.next;
        self.next += 1;
        let cid = self.pair.post(sqe, user).map_err(|_| AdminFault::Full)?;
        self.pair.update_tail();
        let deadline = env.clock.now() + timeout;
        let interrupt = self.interrupt.clone();
        let mut waiter = Watch::new(env, interrupt.as_ref());
        loop {
            if let Some(completion) = self.reap(user).map_err(AdminFault::Device)? {
                return Ok(completion);
            }
            if !waiter.wait(deadline).map_err(AdminFault::Dead)? {
                // It may have completed while the clock was looked at.
                if let Some(completion) = self.reap(user).map_err(AdminFault::Device)? {
                    return Ok(completion);
                }
                self.pair.abandon(cid);
                return Err(AdminFault::Timeout(cid));
            }
        }
    }

    /// Takes all completions; returns that of `user`.
    fn reap(&mut self, user: u64) -> Result<Option<Completion>, DeviceError> {
        let Self { pair, requests, requests_max, events, .. } = self;
        let mut found = None;
        pair.reap(ADMIN_DEPTH, |completion| {
            if completion.user == EVENT {
                *requests = requests.saturating_sub(1);
                if completion.status.is_success() {
                    events.push_back(completion.result);
                } else if completion.status.code() == Status::AER_LIMIT_EXCEEDED {
                    *requests_max = *requests;
                }
            } else if completion.user == user && !completion.late {
                found = Some(completion);
            }
        })?;
        Ok(found)
    }

    /// How many asynchronous event requests the controller allows.
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

    /// Takes what completed without waiting. Fails as [`AdminQueue::execute`] does.
    pub(crate) fn poll(&mut self) -> Result<(), DeviceError> {
        self.reap(EVENT).map(|_| ())
    }

    /// The oldest event that was not looked at yet.
    pub(crate) fn next_event(&mut self) -> Option<u32> {
        self.events.pop_front()
    }
}
