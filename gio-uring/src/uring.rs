//! The engine: IOCBs out, completions in.

use std::{ops::Range, sync::Arc};

use nvme_driver::{Clock, Nanos, QueueGrant, Quiesced};

use crate::{
    abi::{self, Affine, Args, IoCtx, Iocb},
    arena::Arena,
    completion::Completion,
    counters::{Counters, FaultInfo, UringCounters},
    error::Error,
    event::{Event, Signal, Wait},
    executor::{IoExecutor, Progress},
    explicit,
    iocb::{Content, IocbId, Iocbs, Phase, Table},
    layout::Layout,
    map::{self, BlockMap},
    options::UringOptions,
    pool::{PoolDesc, PoolHandle},
    queues::Queues,
    ring::{CompleteConsumer, SharedWords, SubmitProducer},
    shared::Region,
    status::IoStatus,
    sync::Ordering,
};

/// Direction of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the devices into memory.
    Read,
    /// From memory to the devices.
    Write,
}

/// How an operation is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Flags {
    /// Force Unit Access: writes reach non-volatile media before they complete.
    pub fua: bool,
}

impl Flags {
    /// Nothing special.
    pub const NONE: Self = Self { fua: false };
    /// Force Unit Access.
    pub const FUA: Self = Self { fua: true };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Stopped,
    /// The executor did not end its kernel: whatever it may reach is leaked.
    Stuck,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Stuck => "stuck (its kernel did not end)",
        }
    }
}

/// A pair of rings, the IOCBs in them, and the executor that runs the I/O kernel on the other side.
#[derive(Debug)]
pub struct Uring {
    executor: Box<dyn IoExecutor>,
    clock: Arc<dyn Clock>,
    options: UringOptions,
    layout: Layout,
    region: Region,
    queues: Queues,
    submit: SubmitProducer<SharedWords>,
    complete: CompleteConsumer<SharedWords>,
    table: Table,
    arena: Arc<Arena>,
    state: State,
    /// Counts of the queues before the last restart.
    before: Counters,
    issued: u64,
    completed: u64,
}

impl Uring {
    /// Lays out rings of `depth` IOCBs (a power of two) and a warp per granted queue, and starts the
    /// kernel. `queues` pairs each grant with the index of its device; devices are 0 .. N, all there.
    ///
    /// # Errors
    /// [`Error::Depth`], [`Error::Option`], [`Error::Grant`], [`Error::Grants`], or
    /// [`Error::Executor`]: no memory, a grant out of reach, or no kernel.
    pub fn init_queue(
        depth: u32,
        executor: Box<dyn IoExecutor>,
        clock: Arc<dyn Clock>,
        queues: &[(u32, QueueGrant)],
        options: UringOptions,
    ) -> Result<Self, Error> {
        options.validate()?;
        let queues = Queues::lay_out(queues, executor.as_ref())?;
        let layout = Layout::new(depth, options.explicit_max, queues.devices.len() as u32)?;
        let region = Region::whole(executor.alloc(layout.bytes())?);
        let arena = Arena::new(options.arena_bytes, executor.as_ref())?;
        let (submit, complete) = layout.rings(&region);
        let table = Table::new(depth);
        let mut uring = Self {
            executor,
            clock,
            options,
            layout,
            region,
            queues,
            submit,
            complete,
            table,
            arena,
            state: State::Stopped,
            before: Counters::default(),
            issued: 0,
            completed: 0,
        };
        uring.start()?;
        Ok(uring)
    }

    fn start(&mut self) -> Result<(), Error> {
        let (layout, options) = (self.layout, &self.options);
        let at = |offset| self.region.address(offset);
        let args = Args {
            warps: self.queues.address(),
            iocbs: at(layout.iocb(0)),
            sq_ring: at(layout.sq_ring()),
            cq_ring: at(layout.cq_ring()),
            cq_tail: at(Layout::CQ_TAIL),
            stop: at(Layout::STOP),
            clock: if options.virtual_time { at(Layout::CLOCK) } else { 0 },
            timeout_ns: options.command_timeout.0,
            warp_count: self.queues.len(),
            ring_mask: layout.depth() - 1,
            until: 0,
            resident: 1,
            rounds: options.rounds,
            reserved: 0,
        };
        self.tell_time();
        self.executor.start(args)?;
        self.state = State::Running;
        tracing::debug!(
            executor = self.executor.name(),
            warps = args.warp_count,
            devices = self.devices(),
            depth = layout.depth(),
            "I/O kernel started"
        );
        Ok(())
    }

    /// Number of IOCBs.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.table.len()
    }

    /// Number of IOCBs that nobody holds.
    #[must_use]
    pub fn free_iocbs(&self) -> u32 {
        self.table.free()
    }

    /// Number of devices.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.queues.devices.len() as u32
    }

    /// Whether operations can be issued.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.state == State::Running
    }

    /// What time it is for the deadlines of this ring.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// What a report calls the executor.
    #[must_use]
    pub fn executor_name(&self) -> &'static str {
        self.executor.name()
    }

    fn expect(&self, state: State) -> Result<(), Error> {
        if self.state == state {
            return Ok(());
        }
        Err(Error::State { found: self.state.name(), needed: state.name() })
    }

    // Maps, pools, events.

    /// Puts a request's map into executor memory, grouped for `devices` devices. Its cost grows with
    /// the number of entries; every operation that uses it afterwards costs the same.
    ///
    /// # Errors
    /// [`Error::Devices`] for another number of devices than the ring's, [`Error::Count`] for an
    /// empty map, [`Error::Executor`] without memory.
    pub fn upload_map(&mut self, entries: &[Affine], devices: u32) -> Result<BlockMap, Error> {
        if devices != self.devices() {
            let (found, devices) = (u64::from(devices), self.devices());
            return Err(Error::Devices { what: "the map", found, devices });
        }
        // Half the index space leaves the kernel room to count pieces in 32 bits.
        let max = u32::MAX / 2;
        if entries.is_empty() || entries.len() > max as usize {
            return Err(Error::Count { what: "the map", found: entries.len(), max });
        }
        let bytes = BlockMap::bytes(entries.len(), devices);
        let block = self.arena.take(bytes, self.executor.as_ref())?;
        Ok(BlockMap::upload(entries, devices, block))
    }

    /// The status of every entry of `map` in the caller's order, as of the operations waited for.
    ///
    /// # Errors
    /// [`Error::Foreign`].
    pub fn map_status(&self, map: &BlockMap) -> Result<Vec<IoStatus>, Error> {
        self.own("map", map.is_of(&self.arena))?;
        Ok(map.statuses())
    }

    /// Registers a KV pool: checks that no object of it can lie outside its memory or a namespace,
    /// and puts it where the kernel reads it.
    ///
    /// # Errors
    /// [`Error::Pool`] or [`Error::Devices`] in words, [`Error::Executor`] without memory.
    pub fn register_pool(&mut self, desc: &PoolDesc) -> Result<PoolHandle, Error> {
        desc.validate(&self.queues.devices)?;
        let block = self.arena.take(PoolHandle::bytes(desc), self.executor.as_ref())?;
        Ok(PoolHandle::write(desc, &self.queues.devices, block))
    }

    /// A word to wait for or to signal, 0 at first.
    ///
    /// # Errors
    /// [`Error::Executor`] without memory.
    pub fn event(&mut self) -> Result<Event, Error> {
        Ok(Event::new(self.arena.take(size_of::<u32>(), self.executor.as_ref())?))
    }

    fn own(&self, what: &'static str, owned: bool) -> Result<(), Error> {
        if owned { Ok(()) } else { Err(Error::Foreign { what }) }
    }

    // Taking and filling.

    /// Takes `count` IOCBs (at most [`crate::BATCH_MAX`]) whose operations start once `wait` is
    /// reached.
    ///
    /// # Errors
    /// [`Error::Busy`] when fewer are free, [`Error::Batch`], [`Error::Foreign`] for another ring's
    /// event.
    pub fn get_iocb(&mut self, count: u32, wait: Option<&Wait>) -> Result<Iocbs, Error> {
        self.own("event", wait.is_none_or(|wait| wait.event.is_of(&self.arena)))?;
        self.table.take(count, wait)
    }

    /// Gives an IOCB back that will not be issued.
    ///
    /// # Errors
    /// [`Error::Id`] when it was issued, or is not the caller's.
    pub fn release(&mut self, id: IocbId) -> Result<(), Error> {
        self.table.in_phase(id, &[Phase::Taken, Phase::Filled], "taken and not issued")?;
        self.table.free_again(id);
        Ok(())
    }

    /// Makes the operation that `id` will be filled with signal an event when it completed.
    ///
    /// # Errors
    /// [`Error::Id`] unless it is taken and not yet filled, [`Error::Foreign`].
    pub fn signal(&mut self, id: IocbId, signal: &Signal) -> Result<(), Error> {
        self.own("event", signal.event.is_of(&self.arena))?;
        let entry = self.table.in_phase(id, &[Phase::Taken], "taken and not filled")?;
        entry.signal = Some(signal.clone());
        Ok(())
    }

    /// Fills an IOCB with contexts that name memory and LBAs. They are copied, grouped by device.
    ///
    /// # Errors
    /// [`Error::Count`], [`Error::IoCtx`] for an unknown device, a range outside its namespace, a
    /// length that is not whole LBAs, or misaligned memory; [`Error::Id`].
    pub fn fill_explicit(
        &mut self,
        id: IocbId,
        op: Op,
        flags: Flags,
        contexts: &[IoCtx],
    ) -> Result<(), Error> {
        let max = self.options.explicit_max;
        if contexts.is_empty() || contexts.len() > max as usize {
            return Err(Error::Count { what: "the IOCB", found: contexts.len(), max });
        }
        let bytes_max = explicit::check(contexts, &self.queues.devices)?;
        let (layout, region, devices) = (&self.layout, &self.region, self.queues.devices.len());
        let entry = self.table.in_phase(id, FILLABLE, "taken and not issued")?;
        let index = id.index();
        let (at, starts) = (layout.contexts(index), layout.starts(index));
        map::group(
            contexts.len(),
            devices as u32,
            &mut entry.order,
            |index| contexts[index].device,
            |index| contexts[index].lba,
            |class, first| region.put(starts, class, first),
        );
        for (slot, &index) in entry.order.iter().enumerate() {
            region.put(at, slot, contexts[index as usize]);
        }
        region.zero(layout.statuses(index), contexts.len() * size_of::<u32>());
        entry.content = Content::Explicit;
        entry.expected = contexts.len() as u64;
        let iocb = Iocb {
            kind: abi::KIND_EXPLICIT,
            count: contexts.len() as u32,
            ioctx: region.address(at),
            starts: region.address(starts),
            status: region.address(layout.statuses(index)),
            bytes_max,
            ..Iocb::default()
        };
        self.fill(id, op, flags, iocb);
        Ok(())
    }

    /// Fills an IOCB with rows `rows` of every file of `map`. Costs the same for any map.
    ///
    /// # Errors
    /// [`Error::Rows`] outside the pool, [`Error::Foreign`], [`Error::Id`].
    pub fn fill_affine(
        &mut self,
        id: IocbId,
        op: Op,
        flags: Flags,
        map: &BlockMap,
        pool: &PoolHandle,
        rows: Range<u32>,
    ) -> Result<(), Error> {
        self.own("map", map.is_of(&self.arena))?;
        self.own("pool", pool.is_of(&self.arena))?;
        pool.check(map.len(), &rows)?;
        let entry = self.table.in_phase(id, FILLABLE, "taken and not issued")?;
        let row_count = rows.end - rows.start;
        entry.content = Content::Affine { map: map.clone(), _pool: pool.clone() };
        entry.expected = map.len() as u64 * u64::from(row_count);
        let [ioctx, starts, status] = map.addresses();
        let iocb = Iocb {
            kind: abi::KIND_AFFINE,
            count: map.len() as u32,
            ioctx,
            starts,
            status,
            pool: pool.address(),
            row_first: rows.start,
            row_count,
            ..Iocb::default()
        };
        self.fill(id, op, flags, iocb);
        Ok(())
    }

    fn fill(&mut self, id: IocbId, op: Op, flags: Flags, mut iocb: Iocb) {
        let devices = self.devices();
        let entry = self.table.get(id).expect("the caller looked it up");
        iocb.opcode = match op {
            Op::Read => abi::OP_READ,
            Op::Write => abi::OP_WRITE,
        };
        iocb.flags = if flags.fua { abi::FLAG_FUA } else { 0 };
        iocb.devices = devices;
        if let Some(Wait { event, value }) = &entry.wait {
            (iocb.wait, iocb.wait_value) = (event.address(), *value);
        }
        if let Some(Signal { event, value }) = &entry.signal {
            (iocb.signal, iocb.signal_value) = (event.address(), *value);
        }
        self.region.write(self.layout.iocb(id.index()), iocb);
        entry.phase = Phase::Filled;
    }

    // Issuing and waiting.

    /// Publishes filled IOCBs in this order. `sms` is how many SMs the executor should spend on them,
    /// where it has some.
    ///
    /// # Errors
    /// [`Error::Id`] (none is issued then) or [`Error::State`]; [`Error::Executor`] when the kernel
    /// failed: they count as issued then, and complete when the ring is stopped.
    pub fn issue_io(&mut self, ids: &[IocbId], sms: u32) -> Result<(), Error> {
        self.expect(State::Running)?;
        for (done, &id) in ids.iter().enumerate() {
            match self.table.in_phase(id, &[Phase::Filled], "filled and not issued") {
                Ok(entry) => entry.phase = Phase::Issued,
                Err(error) => {
                    for &id in &ids[..done] {
                        self.table.get(id)?.phase = Phase::Filled;
                    }
                    return Err(error);
                }
            }
        }
        let warps = self.queues.len();
        for id in ids {
            let left = self.layout.iocb(id.index()) + std::mem::offset_of!(Iocb, warps_left);
            self.region.write(left, warps);
            self.submit.publish(id.index());
        }
        self.issued += ids.len() as u64;
        self.tell_time();
        self.executor.submitted(self.submit.tail(), sms)?;
        Ok(())
    }

    /// The completion of `id`, if it is there; `id` is free then.
    ///
    /// # Errors
    /// [`Error::Id`] when it was not issued, [`Error::State`] when it never will complete because the
    /// ring is stuck, [`Error::Ring`].
    pub fn try_cqe(&mut self, id: IocbId) -> Result<Option<Completion>, Error> {
        self.reap()?;
        let entry = self.table.in_phase(id, &[Phase::Issued, Phase::Done], "issued")?;
        if entry.phase == Phase::Issued {
            if self.state == State::Stuck {
                self.expect(State::Running)?;
            }
            return Ok(None);
        }
        let completion = entry.completion;
        self.table.free_again(id);
        Ok(Some(completion))
    }

    /// Waits for the completion of `id` until `deadline`, giving the executor turns; `id` is free
    /// then. Statuses are found at [`Uring::map_status`] or [`Uring::iocb_status`].
    ///
    /// # Errors
    /// [`Error::Timeout`] (`id` stays issued, and may be waited for again), [`Error::Executor`] when
    /// the kernel failed, and as [`Uring::try_cqe`].
    pub fn wait_cqe(&mut self, id: IocbId, deadline: Nanos) -> Result<Completion, Error> {
        let mut idle = 0;
        loop {
            if let Some(completion) = self.try_cqe(id)? {
                return Ok(completion);
            }
            let late = self.clock.now() >= deadline;
            match self.turn()? {
                Progress::Moved => idle = 0,
                // The turn may have completed it: look once more before giving up.
                Progress::Idle if late => {
                    let found = self.try_cqe(id)?;
                    return found.ok_or(Error::Timeout { index: id.index() });
                }
                Progress::Idle => {
                    self.clock.pause(idle, deadline);
                    idle = idle.saturating_add(1);
                }
            }
        }
    }

    /// Gives the executor a turn and collects completions, without waiting.
    ///
    /// # Errors
    /// [`Error::Executor`] when the kernel failed, [`Error::Ring`].
    pub fn poll(&mut self) -> Result<Progress, Error> {
        let progress = self.turn()?;
        let before = self.completed;
        self.reap()?;
        Ok(if self.completed == before { progress } else { Progress::Moved })
    }

    /// The status of every explicit context in the caller's order, after its completion was seen and
    /// until the IOCB is taken again.
    ///
    /// # Errors
    /// [`Error::Id`].
    pub fn iocb_status(&mut self, id: IocbId) -> Result<Vec<IoStatus>, Error> {
        let needed = "an explicit one that completed";
        let entry = self.table.in_phase(id, &[Phase::Done, Phase::Free], needed)?;
        if !matches!(entry.content, Content::Explicit) {
            return Err(Error::Id { index: id.index(), found: "not explicit", needed });
        }
        let mut statuses = vec![IoStatus::Ok; entry.order.len()];
        for (at, &index) in entry.order.iter().enumerate() {
            let offset = self.layout.statuses(id.index()) + at * size_of::<u32>();
            // Relaxed: the completion published the words.
            let word = self.region.load32(offset, Ordering::Relaxed);
            statuses[index as usize] = IoStatus::decode(word);
        }
        Ok(statuses)
    }

    fn tell_time(&self) {
        if self.options.virtual_time {
            // Relaxed: a time, from which nothing else follows.
            self.region.store64(Layout::CLOCK, self.clock.now().0, Ordering::Relaxed);
        }
    }

    fn turn(&mut self) -> Result<Progress, Error> {
        self.tell_time();
        Ok(self.executor.poll()?)
    }

    fn reap(&mut self) -> Result<(), Error> {
        while let Some(index) = self.complete.take() {
            let iocb: Iocb = self.region.read(self.layout.iocb(index.min(self.depth() - 1)));
            let entry = self.table.issued(index)?;
            entry.completion = entry.outcome(&iocb);
            entry.phase = Phase::Done;
            entry.let_go();
            self.completed += 1;
        }
        Ok(())
    }

    // Health and life.

    /// What was counted so far.
    #[must_use]
    pub fn counters(&self) -> UringCounters {
        let queues = self.queues.counters();
        let total = queues.iter().fold(self.before, |sum, queue| sum + queue.counters);
        let usage = self.arena.usage();
        UringCounters {
            total,
            queues,
            issued: self.issued,
            completed: self.completed,
            arena_bytes: usage.bytes,
            arena_bytes_used: usage.used,
            arena_growths: usage.growths,
        }
    }

    /// The first queue that stopped because its device misbehaved or timed out. Everything on it
    /// fails from then on; stop the ring, recover the controller, and restart.
    #[must_use]
    pub fn faulted(&self) -> Option<FaultInfo> {
        self.queues.faulted()
    }

    /// Ends the kernel. Commands that a device already has are waited for; what was not sent is
    /// cancelled. Every IOCB in flight is done afterwards, and can be waited for. The token takes the
    /// grants back.
    ///
    /// # Errors
    /// [`Error::Executor`] when the kernel did not end before `deadline`: the ring is stuck, may be
    /// stopped again, and leaks its memory when dropped. [`Error::State`] when it is stopped already.
    pub fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, Error> {
        if self.state == State::Stopped {
            self.expect(State::Running)?;
        }
        // Release: a warp that sees the word sees everything published before it.
        self.region.store32(Layout::STOP, 1, Ordering::Release);
        self.state = State::Stuck;
        // Turns first: an executor without threads (or time) of its own cannot wait inside `stop`.
        let mut idle = 0;
        while !self.queues.are_idle() && self.clock.now() < deadline {
            match self.turn() {
                Ok(Progress::Moved) => idle = 0,
                Ok(Progress::Idle) => {
                    self.clock.pause(idle, deadline);
                    idle += 1;
                }
                Err(error) => {
                    tracing::debug!(%error, "polling while stopping");
                    break;
                }
            }
        }
        self.tell_time();
        let quiesced = self.executor.stop(deadline)?;
        self.state = State::Stopped;
        // A ring that holds nonsense is of no further interest: nothing writes it any more.
        if let Err(error) = self.reap() {
            tracing::error!(%error, "completion ring after the stop");
        }
        self.cancel_the_rest();
        Ok(quiesced)
    }

    /// Completes what the kernel did not. Which of its contexts were done is not known, so all of
    /// them that say Ok are marked.
    fn cancel_the_rest(&mut self) {
        let left: Vec<u32> = self.table.in_flight().collect();
        for index in left {
            let iocb: Iocb = self.region.read(self.layout.iocb(index));
            let statuses = self.layout.statuses(index);
            let entry = self.table.issued(index).expect("listed as in flight");
            match &entry.content {
                Content::Affine { map, .. } => map.mark(0..map.len(), abi::STATUS_CANCELLED),
                Content::Explicit => {
                    let all = 0..entry.order.len();
                    map::mark(&self.region, statuses, all, abi::STATUS_CANCELLED);
                }
                Content::Nothing => {}
            }
            let outcome = entry.outcome(&iocb);
            entry.completion = match outcome.error {
                Some((status, _)) if status != IoStatus::Incomplete => outcome,
                _ => Completion { errors: 1, error: Some((IoStatus::Cancelled, 0)), ..outcome },
            };
            entry.phase = Phase::Done;
            entry.let_go();
            self.completed += 1;
        }
    }

    /// Starts the kernel again after a [`Uring::stop`], on queues that were recovered: fresh grants
    /// of the same devices. Maps, pools and events stay good.
    ///
    /// # Errors
    /// As [`Uring::init_queue`]; [`Error::State`] unless stopped; [`Error::Grants`] when the devices
    /// are not the same.
    pub fn restart(&mut self, grants: &[(u32, QueueGrant)]) -> Result<(), Error> {
        self.expect(State::Stopped)?;
        let queues = Queues::lay_out(grants, self.executor.as_ref())?;
        if queues.devices != self.queues.devices {
            let problem = format!(
                "the devices changed from {:?} to {:?}; open a new ring",
                self.queues.devices, queues.devices
            );
            return Err(Error::Grants { problem });
        }
        for queue in self.queues.counters() {
            self.before += queue.counters;
        }
        self.queues = queues;
        self.layout.reset(&self.region);
        (self.submit, self.complete) = self.layout.rings(&self.region);
        self.start()
    }
}

/// Phases in which an IOCB can be filled (again).
const FILLABLE: &[Phase] = &[Phase::Taken, Phase::Filled];

impl Drop for Uring {
    fn drop(&mut self) {
        if self.state == State::Stopped {
            return;
        }
        let deadline = self.clock.now() + self.options.stop_timeout;
        if let Err(error) = self.stop(deadline) {
            tracing::error!(%error, "dropping a ring whose kernel runs on; its memory is leaked");
            // A kernel that may still run must never see this memory used for something else.
            std::mem::forget((self.region.clone(), self.queues.memory(), self.arena.clone()));
        }
    }
}
