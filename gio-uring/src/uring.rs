//! The engine: submits IOCBs and collects completions.

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
    iocb_id::IocbId,
    layout::Layout,
    map::BlockMap,
    options::UringOptions,
    pool::{PoolDesc, PoolHandle},
    queues::{self, Queues},
    ring::{Consumer, SharedWords, SubmitProducer},
    shared::Region,
    status::IoStatus,
    sync::Ordering,
};

mod iocb;
mod lifecycle;

pub use iocb::AffineOp;
use iocb::{Content, Phase, Table};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Stopped,
    /// The executor did not end its kernel: all memory the kernel may reach is leaked.
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
    complete: Consumer<SharedWords>,
    table: Table,
    arena: Arc<Arena>,
    /// Memory near the kernel, for tables that it only reads.
    near: Arc<Arena>,
    state: State,
    /// Counters accumulated before the last restart.
    before: Counters,
    issued: u64,
    completed: u64,
}

impl Uring {
    /// Lays out rings of `depth` IOCBs (a power of two) and one warp per granted queue, and starts
    /// the kernel. `queues` pairs each grant with the index of its device; devices are numbered 0
    /// .. N without gaps.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] for `depth`, [`Error::Option`], [`Error::Grants`], or
    /// [`Error::Executor`] if memory, a grant's address, or the kernel is unavailable.
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
        let arena = |allocate| Arena::new(options.arena_bytes, allocate, executor.as_ref());
        let near = arena(|executor, len| executor.alloc_tables(len))?;
        let arena = arena(|executor, len| executor.alloc(len))?;
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
            near,
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

    /// Returns the number of IOCBs.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.table.len()
    }

    /// Returns the number of devices.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.queues.devices.len() as u32
    }

    /// Returns the current time on the ring's clock, to compute deadlines.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// Returns the executor's name for reports.
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

    /// Uploads a request's map into executor memory, grouped for `devices` devices. The cost grows
    /// with the number of entries; the cost of each operation that uses the map does not.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] if `devices` differs from the ring's, or the map is empty or
    /// too long, [`Error::Executor`] if memory is exhausted.
    pub fn upload_map(&mut self, entries: &[Affine], devices: u32) -> Result<BlockMap, Error> {
        if devices != self.devices() {
            return Err(Error::devices("the map", devices as usize, self.devices() as usize));
        }
        // Limited to half the index space, so that the kernel can count pieces with 32 bits.
        let max = u32::MAX / 2;
        if entries.is_empty() || entries.len() > max as usize {
            return Err(Error::count("the map", entries.len(), max));
        }
        let [bytes, statuses] = BlockMap::bytes(entries.len(), devices);
        let block = self.near.take(bytes, self.executor.as_ref())?;
        let statuses = self.arena.take(statuses, self.executor.as_ref())?;
        Ok(BlockMap::upload(entries, devices, [block, statuses])?)
    }

    /// Registers a KV pool: checks that no object can lie outside its memory or a namespace, and
    /// uploads the description for the kernel, to memory near it.
    ///
    /// # Errors
    /// Returns [`Error::Argument`], or [`Error::Executor`] if memory is exhausted.
    pub fn register_pool(&mut self, desc: &PoolDesc) -> Result<PoolHandle, Error> {
        desc.validate(&self.queues.devices)?;
        let row_base = desc.row_addresses(self.executor.as_ref())?;
        let block = self.near.take(PoolHandle::bytes(desc), self.executor.as_ref())?;
        Ok(PoolHandle::write(desc, &row_base, &self.queues.devices, block)?)
    }

    /// Allocates checksums for all objects of `map` in a pool of `rows` rows, which a write stores.
    ///
    /// # Errors
    /// Returns [`Error::Foreign`], or [`Error::Executor`] if memory is exhausted.
    pub fn new_checksums(&mut self, map: &BlockMap, rows: u32) -> Result<Checksums, Error> {
        self.own("map", map.is_of(&self.arena))?;
        let count = rows as usize * map.len();
        Ok(Checksums::new(self.zeroes(count)?, map, rows))
    }

    /// Uploads the expected checksums of all objects of `map` in a pool of `rows` rows, which a
    /// read compares: `value(row, entry)`, with the entry in the caller's order.
    ///
    /// # Errors
    /// Returns [`Error::Foreign`], or [`Error::Executor`] if memory is exhausted.
    pub fn upload_checksums(
        &mut self,
        map: &BlockMap,
        rows: u32,
        value: impl Fn(u32, u32) -> u32,
    ) -> Result<Checksums, Error> {
        self.own("map", map.is_of(&self.arena))?;
        let bytes = (rows as usize).saturating_mul(map.len()).saturating_mul(size_of::<u32>());
        let block = self.near.take(bytes, self.executor.as_ref())?;
        let order = map.order();
        let values = (0..rows).flat_map(|row| order.iter().map(move |&entry| (row, entry)));
        let values = values.map(|(row, entry)| value(row, entry));
        let values = DeviceArray::write(values, block);
        values.push()?;
        Ok(Checksums::new(values, map, rows))
    }

    /// Creates an event with value 0.
    ///
    /// # Errors
    /// Returns [`Error::Executor`] if memory is exhausted.
    pub fn event(&mut self) -> Result<Event, Error> {
        Ok(Event::new(self.arena.take(size_of::<u32>(), self.executor.as_ref())?))
    }

    /// Returns true if operations of this ring can wait for and signal `event`.
    #[must_use]
    pub fn owns(&self, event: &Event) -> bool {
        event.is_of(&self.arena)
    }

    /// Uploads an array that another kernel only reads, to memory near it.
    ///
    /// # Errors
    /// Returns [`Error::Executor`] if memory is exhausted.
    pub fn upload<T: DeviceScalar>(
        &mut self,
        values: impl ExactSizeIterator<Item = T>,
    ) -> Result<DeviceArray<T>, Error> {
        let bytes = values.len().saturating_mul(size_of::<T>());
        let values = DeviceArray::write(values, self.near.take(bytes, self.executor.as_ref())?);
        values.push()?;
        Ok(values)
    }

    /// Allocates `len` zeroes for another kernel that writes them, in memory that the host reads.
    ///
    /// # Errors
    /// Returns [`Error::Executor`] if memory is exhausted.
    pub fn zeroes<T: DeviceScalar + Default>(
        &mut self,
        len: usize,
    ) -> Result<DeviceArray<T>, Error> {
        let block = self.arena.take(len.saturating_mul(size_of::<T>()), self.executor.as_ref())?;
        Ok(DeviceArray::write(std::iter::repeat_n(T::default(), len), block))
    }

    fn own(&self, what: &'static str, owned: bool) -> Result<(), Error> {
        if owned { Ok(()) } else { Err(Error::Foreign { what }) }
    }

    // Waiting.

    /// Returns the completion of `id`, if present, and then frees `id`.
    ///
    /// # Errors
    /// Returns [`Error::Id`] if `id` was not issued, [`Error::State`] if it can never complete
    /// because the ring is stuck, or [`Error::Ring`].
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

    /// Waits for the completion of `id` until `deadline`, polling the executor; then frees `id`.
    /// [`BlockMap::statuses`] or [`Uring::iocb_status`] returns the statuses.
    ///
    /// # Errors
    /// Returns [`Error::Timeout`] (`id` stays issued and can be waited for again),
    /// [`Error::Executor`] if the kernel failed; otherwise same as [`Uring::try_completion`].
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
                // It may have completed between the last check and the deadline.
                Progress::Idle => {
                    let found = self.try_completion(id)?;
                    return found.ok_or(Error::Timeout { index: id.index() });
                }
            }
        }
    }

    /// Polls the executor and collects completions; never blocks.
    ///
    /// # Errors
    /// Returns [`Error::Executor`] if the kernel failed, or [`Error::Ring`].
    pub fn poll(&mut self) -> Result<Progress, Error> {
        let progress = self.poll_executor()?;
        let before = self.completed;
        self.reap()?;
        Ok(if self.completed == before { progress } else { Progress::Moved })
    }

    /// Returns the status of every explicit context in the caller's order. Valid after the
    /// completion was consumed and until the IOCB is reused.
    ///
    /// # Errors
    /// Returns [`Error::Id`] if `id` is stale, in flight or not explicit.
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
            // Relaxed: only a time; no other memory depends on it.
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
