//! The ring, the one table of operations in flight, and the streams that wait for them.
//!
//! An operation ends in the ring, or with the stream that moves its objects behind it. A fault
//! affects one queue: commands outstanding on others, and on other devices, complete first. All
//! queues are then recreated, which resets no controller that responds normally.

use std::{fmt, sync::Arc};

use gio_uring::{
    AffineOp, BlockMap, Completion, Error, IoExecutor, IoStatus, IocbId, Progress, RawStream,
    ScatterGather, Signal, Uring, UringOptions, Wait,
};
use nvme_driver::{Clock, Nanos, Quiesced, Waiter, wait_until};

use super::{
    devices::{Devices, Trouble},
    retry::Attempts,
    streams::{Refused, Streams},
};
use crate::{
    config::{ExecutorFactory, StoreOptions},
    error::StoreError,
    ids::{JobId, Ticket},
    order::Order,
};

/// Idle time after which the queues are taken to have completed everything.
const SETTLED: Nanos = Nanos::from_millis(10);

/// An operation on a layer, in flight: in the ring, or on a stream behind it.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) ticket: Ticket,
    /// `None` if only a stream copies.
    pub(super) iocb: Option<IocbId>,
    /// Its map, whose entries have a status each; `None` if those are not known.
    pub(super) map: Option<BlockMap>,
    pub(super) attempts: Attempts,
    /// The event that it waits for.
    wait: Option<Wait>,
    /// Its result in the ring. The IOCB may be used by another operation then.
    pub(super) completion: Option<Completion>,
    /// With streams: reached when it ended in the ring.
    end: Option<Wait>,
    /// The staging buffer, on the staged path.
    pub(super) buffer: Option<usize>,
    /// Reached when a stream has moved its objects: staged objects of a retrieve are in the pool,
    /// and copies to and from the DRAM cache are done.
    moved: Option<Wait>,
    /// The event that a stream waits for before it moves them. Kept alive for the stream.
    first: Option<Wait>,
}

impl Op {
    fn new(ticket: Ticket, since: Nanos) -> Self {
        let attempts = Attempts::first(since);
        let (iocb, map, wait, completion) = (None, None, None, None);
        let (end, buffer, moved, first) = (None, None, None, None);
        Self { ticket, iocb, map, attempts, wait, completion, end, buffer, moved, first }
    }

    /// Returns true if neither the ring nor a stream works on it.
    fn is_over(&self) -> bool {
        self.completion.is_some() && self.moved.as_ref().is_none_or(Wait::is_reached)
    }

    /// Returns true if it waits for no event any more.
    pub(super) fn can_start(&self) -> bool {
        self.wait.as_ref().is_none_or(Wait::is_reached)
    }
}

/// A boxed closure that implements `Debug`.
struct Factory(ExecutorFactory);

impl fmt::Debug for Factory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExecutorFactory")
    }
}

/// Ring, streams, devices, and the operations in flight.
#[derive(Debug)]
pub(super) struct Transport {
    /// `None` once it was closed, or failed: then it was leaked, with everything its kernel uses.
    ring: Option<Uring>,
    /// The events of streams; `None` without a GPU.
    pub(super) streams: Option<Streams>,
    pub(super) devices: Devices,
    pub(super) clock: Arc<dyn Clock>,
    executor: Factory,
    options: StoreOptions,
    /// Maximum contexts of an explicit operation.
    explicit_max: u32,
    ops: Vec<Op>,
    /// Operations that are over, until they are taken.
    over: Vec<Op>,
    /// Set when controllers must be recovered before anything else is done, with the cause.
    pub(super) fault: Option<String>,
    /// Set when every call is refused, with the cause.
    failed: Option<String>,
    /// Recoveries from a timeout or a fault.
    pub(super) recoveries: u64,
}

/// Ring and streams that were replaced, because their executor could not go on. They are leaked if
/// a stream still uses events and tables in the old executor's memory.
#[derive(Debug)]
pub(super) struct Replaced {
    ring: Option<Uring>,
    streams: Option<Streams>,
}

impl Replaced {
    /// Returns true if a stream still uses events and tables in the old executor's memory.
    fn is_used(&self) -> bool {
        !self.streams.as_ref().is_none_or(Streams::is_past)
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        if self.is_used() {
            std::mem::forget((self.ring.take(), self.streams.take()));
        }
    }
}

impl Transport {
    /// Grants the queues and starts the I/O kernel on them; on failure takes them back.
    pub(super) fn new(
        mut devices: Devices,
        mut executor: ExecutorFactory,
        clock: Arc<dyn Clock>,
        options: StoreOptions,
        explicit_max: u32,
    ) -> Result<Self, StoreError> {
        let started = devices.grant().and_then(|grants| {
            let (iocbs, clock) = (options.iocbs, clock.clone());
            let ring = ring_options(&options, explicit_max);
            Ok(Uring::init_queue(iocbs, executor()?, clock, &grants, ring)?)
        });
        let ring = started.inspect_err(|_| {
            let quiesced = devices.never_started();
            // They are leaked.
            let _ = devices.take_back(&quiesced, false);
        })?;
        let iocbs = options.iocbs as usize;
        Ok(Self {
            ring: Some(ring),
            streams: None,
            devices,
            clock,
            executor: Factory(executor),
            options,
            explicit_max,
            ops: Vec::with_capacity(iocbs),
            over: Vec::with_capacity(iocbs),
            fault: None,
            failed: None,
            recoveries: 0,
        })
    }

    /// Refuses calls after a failure.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        match &self.failed {
            Some(cause) => Err(StoreError::Failed { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    pub(super) fn ring(&mut self) -> Result<&mut Uring, StoreError> {
        match (&mut self.ring, &self.failed) {
            (Some(ring), None) => Ok(ring),
            (_, cause) => Err(StoreError::Failed { cause: cause.clone().unwrap_or_default() }),
        }
    }

    /// Returns the ring and the events of streams.
    pub(super) fn streams(&mut self) -> Result<(&mut Uring, &mut Streams), StoreError> {
        self.check()?;
        match (&mut self.ring, &mut self.streams) {
            (Some(ring), Some(streams)) => Ok((ring, streams)),
            _ => Err(StoreError::NoStreams),
        }
    }

    pub(super) fn executor_name(&self) -> &'static str {
        self.ring.as_ref().map_or("none", Uring::executor_name)
    }

    /// Returns the number of operations in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.ops.len()
    }

    /// Returns the operations in flight.
    pub(super) fn tickets(&self) -> impl Iterator<Item = Ticket> + '_ {
        self.ops.iter().map(|op| op.ticket)
    }

    /// Returns an operation in flight of a job.
    pub(super) fn of_job(&self, job: JobId) -> Option<Ticket> {
        self.tickets().find(|ticket| ticket.job == job)
    }

    pub(super) fn has(&self, ticket: Ticket) -> bool {
        self.ops.iter().any(|op| op.ticket == ticket)
    }

    /// Returns the condition that an operation waits for; a stream is made to signal it.
    pub(super) fn start_condition(&mut self, order: Order<'_>) -> Result<Option<Wait>, StoreError> {
        match order {
            Order::Unordered => Ok(None),
            Order::AfterEvent(wait) => Ok(Some(wait.clone())),
            Order::AfterStream(stream) | Order::InStream(stream) => {
                let (ring, streams) = self.streams()?;
                streams.mark(ring, stream).map(Some)
            }
        }
    }

    /// Submits the operation of a layer. With streams, returns its completion event.
    pub(super) fn issue(
        &mut self,
        ticket: Ticket,
        op: &AffineOp<'_>,
        buffer: Option<usize>,
    ) -> Result<Option<Wait>, StoreError> {
        let Some(ring) = &mut self.ring else {
            return Err(StoreError::Ended { layer: ticket.layer });
        };
        let end = self.streams.as_mut().map(Streams::take_end);
        let signal = end.as_ref().map(|end| Signal { event: end.event.clone(), value: end.value });
        let iocb = match ring.submit(&AffineOp { signal: signal.as_ref(), ..op.clone() }) {
            Ok(iocb) => iocb,
            // It fails when the ring is stopped, which is what comes next.
            Err(Error::Submitted { iocb, source }) => {
                self.fault = Some(source.to_string());
                iocb
            }
            Err(error) => {
                if let (Some(streams), Some(end)) = (&mut self.streams, end) {
                    streams.return_end(end);
                }
                return Err(error.into());
            }
        };
        self.ops.push(Op {
            iocb: Some(iocb),
            map: Some(op.map.clone()),
            wait: op.wait.cloned(),
            end: end.clone(),
            buffer,
            ..Op::new(ticket, self.clock.now())
        });
        Ok(end)
    }

    /// Has a stream copy a layer of which the devices move nothing. Returns the event of its end.
    pub(super) fn issue_copy(
        &mut self,
        ticket: Ticket,
        stream: Option<RawStream>,
        first: Option<Wait>,
        moves: &ScatterGather,
    ) -> Result<Wait, Refused> {
        let moved = self.copy(stream, [first.as_ref(), None], moves)?;
        let completion = Some(Completion { objects: 0, errors: 0, error: None });
        let moved_at = Some(moved.clone());
        let op = Op::new(ticket, self.clock.now());
        self.ops.push(Op { completion, moved: moved_at, first, ..op });
        Ok(moved)
    }

    /// Has a stream move objects of the operation that was just issued, which does not end before
    /// that.
    pub(super) fn copy_beside(
        &mut self,
        stream: Option<RawStream>,
        [first, behind]: [Option<Wait>; 2],
        moves: &ScatterGather,
    ) -> Result<Wait, Refused> {
        let moved = self.copy(stream, [first.as_ref(), behind.as_ref()], moves)?;
        if let Some(op) = self.ops.last_mut() {
            op.moved = Some(moved.clone());
            op.first = op.first.take().or(first);
        }
        Ok(moved)
    }

    /// Has a stream move objects: the store's own if none is given.
    pub(super) fn copy(
        &mut self,
        stream: Option<RawStream>,
        waits: [Option<&Wait>; 2],
        moves: &ScatterGather,
    ) -> Result<Wait, Refused> {
        let (ring, streams) = self.streams().map_err(|error| Refused { error, moving: false })?;
        let stream = stream.unwrap_or_else(|| streams.own());
        streams.copy_objects(ring, stream, waits, moves)
    }

    /// Makes work enqueued on `stream` from now on wait for events.
    pub(super) fn follow(
        &mut self,
        stream: RawStream,
        ends: &[Option<Wait>],
    ) -> Result<(), StoreError> {
        let (ring, streams) = self.streams()?;
        for end in ends.iter().flatten() {
            // An event of another ring, from before the executor was replaced: if streams may still
            // wait for it, it is kept for good; if it is reached, there is nothing to wait for.
            if ring.owns(&end.event) || !end.is_reached() {
                streams.follow(ring, stream, end)?;
            }
        }
        Ok(())
    }

    /// Processes completions. Operations that are over are to be taken with
    /// [`Transport::take_over`].
    pub(super) fn reap(&mut self) -> Result<Progress, StoreError> {
        let mut progress = Progress::Idle;
        if !self.ops.is_empty() {
            match self.ring()?.poll() {
                Ok(found) => progress = found,
                // The executor of a lost GPU reports that here.
                Err(error) => self.fault = Some(error.to_string()),
            }
        }
        let mut at = 0;
        while at < self.ops.len() {
            if let Op { completion: None, iocb: Some(iocb), .. } = self.ops[at] {
                match self.ring()?.try_completion(iocb) {
                    Ok(Some(completion)) => self.arrived(at, completion),
                    Ok(None) => {}
                    Err(error) => {
                        self.fault = Some(error.to_string());
                        break;
                    }
                }
            }
            if self.ops[at].is_over() {
                // The last operation takes its place.
                self.end(at);
            } else {
                at += 1;
            }
        }
        Ok(progress)
    }

    /// Keeps an operation that is to be sent again.
    pub(super) fn keep(&mut self, mut op: Op) {
        (op.iocb, op.map, op.completion) = (None, None, None);
        self.ops.push(op);
    }

    /// Takes an operation that is due to be sent again. Nothing is sent before a recovery.
    pub(super) fn take_due(&mut self, now: Nanos) -> Option<Op> {
        let at = self.ops.iter().position(|op| op.attempts.is_due(now));
        Some(self.ops.swap_remove(at.filter(|_| self.fault.is_none())?))
    }

    /// Notes that the operation that was just issued is another attempt.
    pub(super) fn was_sent_before(&mut self, attempts: Attempts) {
        if let Some(op) = self.ops.last_mut() {
            op.attempts = attempts.sent();
        }
    }

    /// Returns an operation that is over.
    pub(super) fn take_over(&mut self) -> Option<Op> {
        self.over.pop()
    }

    /// Processes the ring's completion of an operation.
    fn arrived(&mut self, at: usize, completion: Completion) {
        let op = &mut self.ops[at];
        op.completion = Some(completion);
        if completion.is_ok() {
            return;
        }
        let (status, _) = completion.error.unwrap_or((IoStatus::Incomplete, 0));
        let mut others = op.map.iter().flat_map(BlockMap::failures);
        if status.may_still_transfer() || others.any(|(_, status)| status.may_still_transfer()) {
            let layer = op.ticket.layer;
            self.fault.get_or_insert_with(|| format!("an operation on layer {layer}: {status}"));
        }
    }

    fn end(&mut self, at: usize) {
        let mut op = self.ops.swap_remove(at);
        let end = op.end.take();
        if let (Some(streams), Some(ring), Some(end)) = (&mut self.streams, &self.ring, end)
            // Not an event of a ring that was replaced.
            && ring.owns(&end.event)
        {
            streams.return_end(end);
        }
        self.over.push(op);
    }

    /// Handles an operation that did not end in time: declares the I/O kernel or a device dead.
    ///
    /// # Errors
    /// Returns the cause if it is the stream that moves the layer's objects.
    pub(super) fn overdue(&mut self, ticket: Ticket) -> Result<(), String> {
        let Some(op) = self.ops.iter().find(|op| op.ticket == ticket) else { return Ok(()) };
        let layer = ticket.layer;
        if op.completion.is_some() {
            return Err(format!(
                "the stream that moves layer {layer} between memory of the host and the pool did \
                 not get there in time"
            ));
        }
        let waited = self.options.wait_timeout.0 / 1_000_000;
        self.fault = Some(format!("layer {layer} did not complete within {waited} ms"));
        Ok(())
    }

    /// Does the periodic work that is due: aborts slow commands, polls the devices.
    pub(super) fn attend(&mut self) -> Result<(), String> {
        let (now, timeout) = (self.clock.now(), self.options.command_timeout);
        if let Some(ring) = &self.ring {
            let is_idle = self.ops.is_empty();
            let outstanding = || if is_idle { Vec::new() } else { ring.outstanding() };
            self.devices.abort_slow(now, timeout, outstanding);
        }
        if self.devices.is_due(now) { self.poll_devices() } else { Ok(()) }
    }

    /// Polls the devices.
    ///
    /// # Errors
    /// Returns the cause of a failure of the plane.
    pub(super) fn poll_devices(&mut self) -> Result<(), String> {
        match self.devices.poll(self.clock.now()) {
            Ok(()) => {}
            Err(Trouble::Fault(cause)) => _ = self.fault.get_or_insert(cause),
            Err(Trouble::Fatal(cause)) => return Err(cause),
        }
        Ok(())
    }

    /// Stops the I/O kernel and recovers the controllers: everything in flight is over, unless a
    /// stream has yet to get past it. The order matters. Operations that the fault does not affect
    /// end; the I/O kernel is stopped, so that no doorbell is rung; then the controllers are
    /// recovered, so that no old command is executed any more. Only then are blocks and files free.
    ///
    /// # Errors
    /// Returns the cause if any step fails: memory that a device might still reach is not freed.
    pub(super) fn recover(&mut self, cause: &str) -> Result<(), String> {
        let deadline = self.clock.now() + self.options.stop_timeout;
        self.let_others_end(deadline);
        let quiesced = self.stop(deadline).map_err(|error| format!("{cause}; then {error}"))?;
        self.devices.recover(&quiesced, cause)?;
        for at in 0..self.ops.len() {
            if self.ops[at].completion.is_some() || self.ops[at].attempts.is_waiting() {
                continue;
            }
            let ring = self.ring.as_mut().zip(self.ops[at].iocb);
            let found = ring.and_then(|(ring, iocb)| ring.try_completion(iocb).ok().flatten());
            // Without a completion the command may have got as far as the device.
            let lost = Completion { errors: 1, error: Some((IoStatus::Fault, 0)), objects: 0 };
            if found.is_none() {
                self.ops[at].map = None;
            }
            self.arrived(at, found.unwrap_or(lost));
        }
        // Operations that a stream has yet to get past stay: the signal was sent, so it gets there.
        for at in (0..self.ops.len()).rev() {
            if self.ops[at].is_over() {
                self.end(at);
            }
        }
        self.fault = None;
        Ok(())
    }

    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, StoreError> {
        Ok(self.ring()?.stop(deadline)?)
    }

    /// Lets working queues complete their commands. Operations that wait for an event do not delay
    /// this, and are cancelled.
    fn let_others_end(&mut self, deadline: Nanos) {
        let clock = self.clock.clone();
        let mut waiter = Waiter::new(&*clock, deadline);
        let mut moved_at = clock.now();
        loop {
            let Some(ring) = &mut self.ring else { return };
            match ring.poll() {
                Ok(Progress::Moved) => waiter.moved(),
                Ok(Progress::Idle) if ring.is_idle() => {
                    // A warp may be about to take an operation.
                    if clock.now() >= moved_at + SETTLED || !waiter.wait() {
                        return;
                    }
                    continue;
                }
                Ok(Progress::Idle) if waiter.wait() => {}
                // The deadline, or a kernel that cannot go on.
                _ => return,
            }
            moved_at = clock.now();
        }
    }

    /// Starts the kernel on new grants. If its executor cannot go on, replaces executor, ring and
    /// streams, and returns the old ones: pools and tables must be registered again.
    pub(super) fn restart(&mut self) -> Result<Option<Replaced>, StoreError> {
        let grants = self.devices.grant()?;
        let error = match self.ring()?.restart(&grants) {
            Ok(()) => return Ok(None),
            Err(error) => error,
        };
        tracing::warn!(%error, "the executor cannot go on; making a new one");
        let executor: Box<dyn IoExecutor> = (self.executor.0)()?;
        let (clock, options) = (self.clock.clone(), ring_options(&self.options, self.explicit_max));
        let mut ring = Uring::init_queue(self.options.iocbs, executor, clock, &grants, options)?;
        let gpu = self.streams.as_ref().map(|streams| streams.gpu().clone());
        let streams = gpu.map(|gpu| Streams::new(gpu, &mut ring)).transpose()?;
        let streams = std::mem::replace(&mut self.streams, streams);
        Ok(Some(Replaced { ring: self.ring.replace(ring), streams }))
    }

    /// Stops the kernel and takes the queues back, after everything in flight has ended. Waits
    /// until no stream uses events, tables or blocks any more.
    ///
    /// # Errors
    /// Returns the cause if any step fails.
    pub(super) fn shut(&mut self) -> Result<(), String> {
        let deadline = self.clock.now() + self.options.stop_timeout;
        let quiesced = self.stop(deadline).map_err(|error| error.to_string())?;
        self.devices.take_back(&quiesced, true).map_err(|error| error.to_string())?;
        // The ring has stopped: every event that a stream waits for has its value.
        let past = || self.streams.as_ref().is_none_or(Streams::is_past);
        if !wait_until(&*self.clock, deadline, past) {
            let cause = "a stream did not get past its operations for the store in time";
            return Err(cause.to_owned());
        }
        // It is stopped, and nothing is granted: dropping it frees its memory.
        self.ring = None;
        self.failed = Some("it was closed".to_owned());
        Ok(())
    }

    /// Gives up on a plane that could not be opened. Returns false if the kernel did not stop, or a
    /// device kept a queue: both are leaked.
    pub(super) fn give_up(mut self) -> bool {
        let deadline = self.clock.now() + self.options.stop_timeout;
        let Some(mut ring) = self.ring.take() else { return true };
        let stopped = ring.stop(deadline);
        stopped.is_ok_and(|quiesced| self.devices.take_back(&quiesced, false).is_ok())
    }

    /// Refuses every later call, and leaks the ring: it owns events, maps and tables.
    pub(super) fn fail(&mut self, cause: &str) {
        let mut ring = self.ring.take();
        if let Some(ring) = &mut ring {
            // No stream may wait forever for a kernel that was abandoned.
            ring.abandon();
        }
        std::mem::forget(ring);
        self.ops.clear();
        self.over.clear();
        self.failed = Some(cause.to_owned());
    }

    pub(super) fn is_open(&self) -> bool {
        self.failed.is_none() && self.ring.is_some()
    }
}

fn ring_options(options: &StoreOptions, explicit_max: u32) -> UringOptions {
    UringOptions {
        command_timeout: options.command_timeout,
        // The host's timeout is shorter, so that its error, which names the operation, comes first.
        event_timeout: Nanos(options.wait_timeout.0.saturating_mul(2)),
        virtual_time: options.virtual_time,
        stop_timeout: options.stop_timeout,
        arena_bytes: options.arena_bytes,
        explicit_max,
        ..UringOptions::default()
    }
}
