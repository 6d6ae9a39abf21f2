//! The engine: IOCBs out, completions in.

use std::sync::Arc;

use nvme_driver::{Clock, Nanos, QueueGrant, Waiter};

use crate::{
    abi::{Affine, Args, Iocb},
    arena::Arena,
    checksums::Checksums,
    completion::Completion,
    counters::Counters,
    device_array::{DeviceArray, DeviceScalar},
    error::Error,
    event::Event,
    executor::{IoExecutor, Progress},
    iocb::{Content, Phase, Table},
    iocb_id::IocbId,
    layout::Layout,
    map::BlockMap,
    options::UringOptions,
    pool::{PoolDesc, PoolHandle},
    queues::{self, Queues},
    ring::{CompleteConsumer, SharedWords, SubmitProducer},
    shared::Region,
    status::IoStatus,
    sync::Ordering,
};

mod lifecycle;
mod submit;

pub use submit::AffineOp;

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
    /// Lays out rings of `depth` IOCBs (a power of two) and a warp per granted queue, and starts
    /// the kernel. `queues` pairs each grant with the index of its device; devices are 0 .. N, all
    /// there.
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
        let devices = queues::devices(queues)?.len() as u32;
        let layout = Layout::new(depth, options.explicit_max, devices)?;
        let queues = Queues::lay_out(queues, depth, executor.as_ref())?;
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
        let [warps, progress, cq_tail] = self.queues.addresses();
        let args = Args {
            warps,
            iocbs: at(layout.iocb(0)),
            progress,
            sq_ring: at(layout.sq_ring()),
            cq_ring: at(layout.cq_ring()),
            cq_tail,
            stop: at(Layout::STOP),
            clock: if options.virtual_time { at(Layout::CLOCK) } else { 0 },
            timeout_ns: options.command_timeout.0,
            event_timeout_ns: options.event_timeout.0,
            warp_count: self.queues.len(),
            ring_mask: layout.depth() - 1,
            rounds: options.rounds,
            ..Args::default()
        };
        self.write_clock();
        self.executor.start(args, &self.queues.grants)?;
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

    /// Number of IOCBs that are free.
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

    /// Puts a request's map into executor memory, grouped for `devices` devices. Its cost grows
    /// with the number of entries; every operation that uses it afterwards costs the same.
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
    /// [`Error::Pool`] or [`Error::Devices`], [`Error::Executor`] without memory.
    pub fn register_pool(&mut self, desc: &PoolDesc) -> Result<PoolHandle, Error> {
        desc.validate(&self.queues.devices)?;
        let row_base = desc.row_addresses(self.executor.as_ref())?;
        let block = self.arena.take(PoolHandle::bytes(desc), self.executor.as_ref())?;
        Ok(PoolHandle::write(desc, &row_base, &self.queues.devices, block))
    }

    /// Puts checksums for all objects of `map` in a pool of `rows` rows into executor memory:
    /// `value(row, entry)`, the entry in the caller's order. For a write, whose checksums the
    /// kernel stores, any values.
    ///
    /// # Errors
    /// [`Error::Foreign`], [`Error::Executor`] without memory.
    pub fn upload_checksums(
        &mut self,
        map: &BlockMap,
        rows: u32,
        value: impl Fn(u32, u32) -> u32,
    ) -> Result<Checksums, Error> {
        self.own("map", map.is_of(&self.arena))?;
        let bytes = (rows as usize).saturating_mul(map.len()).saturating_mul(size_of::<u32>());
        let block = self.arena.take(bytes, self.executor.as_ref())?;
        let order = map.order();
        let values = (0..rows).flat_map(|row| order.iter().map(move |&entry| (row, entry)));
        let values = values.map(|(row, entry)| value(row, entry));
        Ok(Checksums::new(DeviceArray::write(values, block), map, rows))
    }

    /// An event to wait for or to signal, 0 at first.
    ///
    /// # Errors
    /// [`Error::Executor`] without memory.
    pub fn event(&mut self) -> Result<Event, Error> {
        Ok(Event::new(self.arena.take(size_of::<u32>(), self.executor.as_ref())?))
    }

    /// Whether operations of this ring can wait for `event` and signal it.
    #[must_use]
    pub fn owns(&self, event: &Event) -> bool {
        event.is_of(&self.arena)
    }

    /// Puts an array into executor memory, for another kernel that gets its address.
    ///
    /// # Errors
    /// [`Error::Executor`] without memory.
    pub fn upload<T: DeviceScalar>(
        &mut self,
        values: impl ExactSizeIterator<Item = T>,
    ) -> Result<DeviceArray<T>, Error> {
        let bytes = values.len().saturating_mul(size_of::<T>());
        Ok(DeviceArray::write(values, self.arena.take(bytes, self.executor.as_ref())?))
    }

    fn own(&self, what: &'static str, owned: bool) -> Result<(), Error> {
        if owned { Ok(()) } else { Err(Error::Foreign { what }) }
    }

    // Waiting.

    /// The completion of `id`, if it is there; `id` is free then.
    ///
    /// # Errors
    /// [`Error::Id`] when it was not issued, [`Error::State`] when it never will complete because
    /// the ring is stuck, [`Error::Ring`].
    pub fn try_completion(&mut self, id: IocbId) -> Result<Option<Completion>, Error> {
        self.reap()?;
        let entry = self.table.in_phase(id, &[Phase::Issued, Phase::Done], "issued")?;
        if entry.phase == Phase::Issued {
            if self.state == State::Stuck {
                self.expect(State::Running)?;
            }
            return Ok(None);
        }
        let completion = entry.completion;
        self.table.release(id);
        Ok(Some(completion))
    }

    /// Waits for the completion of `id` until `deadline`, polling the executor; `id` is free
    /// then. Statuses are found at [`Uring::map_status`] or [`Uring::iocb_status`].
    ///
    /// # Errors
    /// [`Error::Timeout`] (`id` stays issued, and may be waited for again), [`Error::Executor`]
    /// when the kernel failed, and as [`Uring::try_completion`].
    pub fn wait_completion(&mut self, id: IocbId, deadline: Nanos) -> Result<Completion, Error> {
        let clock = self.clock.clone();
        let mut waiter = Waiter::new(&*clock, deadline);
        loop {
            if let Some(completion) = self.try_completion(id)? {
                return Ok(completion);
            }
            match self.poll_executor()? {
                Progress::Moved => waiter.moved(),
                Progress::Idle if waiter.wait() => {}
                // It may have completed while the clock was read.
                Progress::Idle => {
                    let found = self.try_completion(id)?;
                    return found.ok_or(Error::Timeout { index: id.index() });
                }
            }
        }
    }

    /// Polls the executor and collects completions, without waiting.
    ///
    /// # Errors
    /// [`Error::Executor`] when the kernel failed, [`Error::Ring`].
    pub fn poll(&mut self) -> Result<Progress, Error> {
        let progress = self.poll_executor()?;
        let before = self.completed;
        self.reap()?;
        Ok(if self.completed == before { progress } else { Progress::Moved })
    }

    /// The status of every explicit context in the caller's order, after its completion was seen
    /// and until the IOCB is taken again.
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

    fn write_clock(&self) {
        if self.options.virtual_time {
            // Relaxed: a time, from which nothing else follows.
            self.region.store64(Layout::CLOCK, self.clock.now().0, Ordering::Relaxed);
        }
    }

    fn poll_executor(&mut self) -> Result<Progress, Error> {
        self.write_clock();
        Ok(self.executor.poll()?)
    }

    fn reap(&mut self) -> Result<(), Error> {
        while let Some(index) = self.complete.take() {
            let iocb: Iocb = self.region.read(self.layout.iocb(index.min(self.depth() - 1)));
            let entry = self.table.issued(index)?;
            entry.completion = entry.outcome(&iocb);
            entry.phase = Phase::Done;
            entry.release_refs();
            self.completed += 1;
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
