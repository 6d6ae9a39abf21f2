#![allow(unsafe_code, reason = "moves data in memory that the ring laid out")]
//! The thread of a warp.

use std::{collections::VecDeque, io, mem, mem::offset_of, sync::Arc, thread, time::Duration};

use gio_uring::{
    NvmeStatus,
    abi::{self, Args, Iocb, Warp},
};
use nvme_driver::{Clock, Nanos, platform::passthrough, status_of};

use super::{
    Ends, FileTarget, Reach,
    op::{Extent, Next, Object, Op},
    ring::{FILE, Lesser, Ring, Wake},
    transfer::Parts,
    words::{Words, load32, store32},
};
use crate::ffi;

/// Limits of bytes in the kernel. A disk is no faster with more reads, but serves all of them
/// together: of 48 MiB, the first arrived after 28 ms of 30, and now after 7 of 28. Nobody waits
/// for the first write, and a busy machine is slow to hand over the next.
const BYTES_MAX: [u64; 2] = [8 << 20, 32 << 20];
/// Entries and bytes after which the kernel gets what is queued, while there is more to do.
const BATCH: usize = 32;
const BATCH_BYTES: u64 = 256 << 10;
/// Turns between looks at the clock, unless a sleep ends without a result: in a virtual machine a
/// look can take as long as the checksum of 4 KiB.
const TURNS: u32 = 16;
/// Sleep while nothing is in progress; a submission ends it.
const REST: Nanos = Nanos::from_millis(10_000);
/// First sleep while an operation waits for an event, which may be a store to memory by anyone ...
const NAP: Nanos = Nanos(20_000);
/// ... each one is longer than the last by this fraction, up to a maximum.
const SLOWLY: u64 = 16;
const NAP_MAX: Nanos = Nanos::from_millis(1);

/// A read or write.
struct OnWay {
    /// Number of its operation.
    op: usize,
    run: Extent,
    is_read: bool,
    transfer: Parts,
    /// When it was first seen in the kernel.
    since: Option<Nanos>,
    state: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Free,
    /// In the kernel, or queued for it.
    Flying,
    /// Its operation has failed, but the kernel may still use the memory.
    GivenUp,
}

/// The next operation of the ring, while it waits for its event.
struct Delayed {
    id: u32,
    iocb: Iocb,
    since: Nanos,
    nap: Nanos,
}

/// Surroundings of a worker.
pub(super) struct Around {
    pub(super) target: FileTarget,
    pub(super) reach: Reach,
    pub(super) ends: Arc<Ends>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) wake: Arc<Wake>,
}

/// Operations that are not all generated: reads, and writes. Neither wait for the other.
struct Lanes {
    ops: [VecDeque<usize>; 2],
    /// Bytes of each lane in the kernel.
    bytes: [u64; 2],
    /// The lane that started a transfer last.
    turn: usize,
}

pub(super) struct Worker {
    words: Words,
    warp: Warp,
    at: Around,
    ring: Ring,
    /// Position of the next entry of the ring of operations.
    position: u32,
    waiting: Option<Delayed>,
    ops: Vec<Option<Op>>,
    unused: Vec<usize>,
    lanes: Lanes,
    slots: Vec<OnWay>,
    free: Vec<usize>,
    /// Bytes that are queued for the kernel.
    queued: u64,
    results: Vec<(u64, i32)>,
    /// Status of operations that are refused.
    refusal: u32,
    given_up: u32,
    /// Turns since the last look at the clock.
    turns: u32,
}

impl Worker {
    /// # Safety
    /// `args` is what [`gio_uring::IoExecutor::start`] was given, and lives until the thread ends;
    /// no other thread has this warp. `around`: of the warp's device.
    pub(super) unsafe fn new(
        args: Args,
        warp: u32,
        around: impl FnOnce(u32) -> io::Result<Around>,
    ) -> io::Result<(Self, Option<Lesser>)> {
        // SAFETY: the caller's promise.
        let words = unsafe { Words::new(args, warp) };
        let warp = words.warp();
        let at = around(warp.device)?;
        let depth = 1usize << warp.depth_log2;
        let (ring, lesser) = Ring::new(&at.target, depth as u32, &at.wake)?;
        let slot = |_| OnWay {
            op: 0,
            run: Extent { first: 0, count: 0, row: 0, offset: 0, slot_bytes: 0 },
            is_read: false,
            transfer: Parts::default(),
            since: None,
            state: Stage::Free,
        };
        let iocbs = args.ring_mask as usize + 1;
        let worker = Self {
            words,
            warp,
            at,
            ring,
            position: 0,
            waiting: None,
            ops: (0..iocbs).map(|_| None).collect(),
            unused: (0..iocbs).rev().collect(),
            lanes: Lanes {
                ops: [VecDeque::with_capacity(iocbs), VecDeque::with_capacity(iocbs)],
                bytes: [0; 2],
                turn: 0,
            },
            slots: (0..depth).map(slot).collect(),
            free: (0..depth).rev().collect(),
            queued: 0,
            results: Vec::with_capacity(depth),
            refusal: abi::STATUS_OK,
            given_up: 0,
            turns: 0,
        };
        Ok((worker, lesser))
    }

    /// Works until the ring is stopped, and nothing is in the kernel any more.
    pub(super) fn run(mut self) {
        while self.has_work() {
            if let Err(error) = self.turn() {
                tracing::error!(%error, "io_uring failed for good");
                self.fail(abi::FAULT_TIMEOUT, Nanos(0));
                // The kernel may still use memory of the transfers: this must not end, and then
                // the stop of the executor fails, and nothing is freed.
                while self.in_kernel() > 0 {
                    thread::park_timeout(Duration::from_secs(3600));
                }
                return;
            }
        }
    }

    fn has_work(&self) -> bool {
        let is_idle = self.unused.len() == self.ops.len() && self.waiting.is_none();
        !(is_idle && self.in_kernel() == 0 && self.words.is_stopped())
    }

    fn in_kernel(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Starts what can be started, sleeps until something ends or arrives, and handles that.
    fn turn(&mut self) -> io::Result<()> {
        if self.refusal == abi::STATUS_OK && self.words.is_stopped() {
            self.refuse(abi::STATUS_CANCELLED);
        }
        let arrived = self.accept();
        self.fill()?;
        self.count();
        // Something may have been published meanwhile; and what arrived may all be done.
        self.at.wake.set_asleep(true);
        let is_new = self.words.entry(self.position).is_some() && self.waiting.is_none();
        let must_end = self.refusal == abi::STATUS_OK && self.words.is_stopped();
        if is_new || must_end || (arrived && self.in_kernel() == 0) || !self.has_work() {
            self.at.wake.set_asleep(false);
            if self.ring.unsubmitted() > 0 {
                self.submit()?;
            }
            return Ok(());
        }
        let (results, time) = self.sleep_limits();
        self.queued = 0;
        self.words.add(offset_of!(Warp, sq_doorbells), u64::from(self.ring.unsubmitted() > 0));
        self.ring.sleep(&self.at.wake, results, time)?;
        self.at.wake.set_asleep(false);
        let is_empty = self.reap()? == 0;
        self.turns += 1;
        if is_empty || self.turns >= TURNS {
            self.turns = 0;
            self.check_time()?;
        }
        Ok(())
    }

    /// Returns the results for which the thread sleeps, and for how long at most.
    fn sleep_limits(&self) -> (usize, Nanos) {
        let timeout = Nanos(self.words.args().timeout_ns / 8);
        let time = if self.in_kernel() == 0 { REST } else { timeout };
        if let Some(waiting) = &self.waiting {
            return (1, time.min(waiting.nap));
        }
        if self.lanes.ops.iter().any(|lane| !lane.is_empty()) {
            // There is more to start: the disk stays busy with the rest.
            return ((self.in_kernel() / 4).max(1), time);
        }
        // No operation ends before that; half of it, because another may be submitted.
        let left = self.ops.iter().flatten().map(|op| op.outstanding).min();
        (left.map_or(1, |left| left.div_ceil(2).max(1) as usize), time)
    }

    /// Takes operations from the ring. Returns true if there were any.
    fn accept(&mut self) -> bool {
        let before = self.position;
        loop {
            let (id, iocb) = match self.waiting.take() {
                Some(waiting) => match self.await_event(waiting) {
                    Some(ready) => ready,
                    None => break,
                },
                None => match self.words.entry(self.position) {
                    Some((id, iocb)) if self.refusal == 0 && !self.words.is_reached(&iocb) => {
                        self.waiting =
                            Some(Delayed { id, iocb, since: self.at.clock.now(), nap: NAP });
                        break;
                    }
                    Some(ready) => ready,
                    None => break,
                },
            };
            self.position = self.position.wrapping_add(1);
            // SAFETY: it is the IOCB of this entry, which the host keeps until it completes.
            let op = unsafe { Op::new(id, iocb, &self.warp) };
            // There are as many as there are IOCBs.
            let at = self.unused.pop().expect("an operation is free");
            let (lane, is_generated) = (usize::from(!op.is_read()), op.is_generated());
            self.ops[at] = Some(op);
            if is_generated {
                self.finish_if_done(at);
            } else {
                self.lanes.ops[lane].push_back(at);
            }
        }
        if self.refusal != abi::STATUS_OK {
            self.refuse(self.refusal);
        }
        self.position != before
    }

    /// Returns an operation that need not wait any more.
    fn await_event(&mut self, mut waiting: Delayed) -> Option<(u32, Iocb)> {
        let limit = self.words.args().event_timeout_ns;
        let waited = self.at.clock.now() - waiting.since;
        if self.refusal == abi::STATUS_OK && limit != 0 && waited.0 >= limit {
            self.fail(abi::FAULT_EVENT, Nanos(0));
        }
        if self.refusal != abi::STATUS_OK || self.words.is_reached(&waiting.iocb) {
            return Some((waiting.id, waiting.iocb));
        }
        waiting.nap = Nanos(waiting.nap.0 + waiting.nap.0 / SLOWLY).min(NAP_MAX);
        self.waiting = Some(waiting);
        None
    }

    /// Refuses what is not started.
    fn refuse(&mut self, status: u32) {
        self.refusal = status;
        for lane in 0..BYTES_MAX.len() {
            for at in mem::take(&mut self.lanes.ops[lane]) {
                let Some(op) = &mut self.ops[at] else { continue };
                while let Some(next) = op.next(&self.at.reach) {
                    let indices = match next {
                        Next::Extent(run) => run.indices(),
                        Next::Invalid(index) => index..index + 1,
                    };
                    let errors = indices.len() as u32;
                    note(op, status, indices, errors);
                    self.words.add(offset_of!(Warp, errors), u64::from(errors));
                }
                self.finish_if_done(at);
            }
        }
    }

    /// Starts transfers of the lanes in turns.
    fn fill(&mut self) -> io::Result<()> {
        let mut empty = 0;
        while empty < BYTES_MAX.len() && !self.free.is_empty() {
            self.lanes.turn = (self.lanes.turn + 1) % BYTES_MAX.len();
            let lane = self.lanes.turn;
            let at = match self.lanes.ops[lane].front() {
                Some(&at) if self.lanes.bytes[lane] < BYTES_MAX[lane] => at,
                _ => {
                    empty += 1;
                    continue;
                }
            };
            empty = 0;
            let Some(op) = &mut self.ops[at] else { continue };
            match op.next(&self.at.reach) {
                Some(Next::Extent(run)) => self.start(at, run)?,
                Some(Next::Invalid(index)) => {
                    note(op, abi::STATUS_INVALID, index..index + 1, 1);
                    self.words.add(offset_of!(Warp, errors), 1);
                }
                None => {}
            }
            // It is over already if its last transfer could not be started.
            if self.ops[at].as_ref().is_none_or(Op::is_generated) {
                self.lanes.ops[lane].pop_front();
                self.finish_if_done(at);
            }
        }
        Ok(())
    }

    fn start(&mut self, at: usize, run: Extent) -> io::Result<()> {
        let Some(op) = &mut self.ops[at] else { return Ok(()) };
        let Some(number) = self.free.pop() else { return Ok(()) };
        let slot = &mut self.slots[number];
        (slot.op, slot.run, slot.is_read) = (at, run, op.is_read());
        op.outstanding += 1;
        slot.state = Stage::Flying;
        slot.since = None;
        self.lanes.bytes[usize::from(!slot.is_read)] += run.bytes();
        self.words.add(offset_of!(Warp, commands), 1);
        if !self.prepare(number, false) {
            let status = NvmeStatus::INTERNAL_ERROR.with_dnr();
            self.end(number, abi::STATUS_NVME | u32::from(status.0));
            return Ok(());
        }
        self.queue(number)?;
        // Behind it: the disk writes meanwhile.
        if let Some(op) = self.ops[at].as_ref().filter(|op| !op.is_read()) {
            store_checksums(op, &run, &self.at.reach);
        }
        Ok(())
    }

    /// Lists the memory of a transfer. Returns false if there is none for a bounce buffer.
    fn prepare(&mut self, number: usize, bounce: bool) -> bool {
        let OnWay { op, run, is_read, transfer, .. } = &mut self.slots[number];
        let Some(op) = &self.ops[*op] else { return false };
        let place = [run.offset, u64::from(run.slot_bytes)];
        let objects = objects(op, run, &self.at.reach);
        // SAFETY: the caller of the ring lends the memory until the operation completes, or the
        // executor has stopped.
        let prepared =
            unsafe { transfer.prepare(objects, place, *is_read, &self.at.target, bounce) };
        prepared.inspect_err(|error| tracing::error!(%error, "no bounce buffer")).is_ok()
    }

    /// Queues the rest of a transfer for the kernel.
    fn queue(&mut self, number: usize) -> io::Result<()> {
        let OnWay { op, run, is_read, transfer, .. } = &mut self.slots[number];
        let iocb = self.ops[*op].as_ref().map(|op| op.iocb).unwrap_or_default();
        let sync = iocb.flags & abi::FLAG_FUA != 0;
        let entry = match &self.at.target.drive {
            Some(drive) => {
                let Warp { placements, placement_ids, .. } = &self.warp;
                let known = &placement_ids[..placement_ids.len().min(*placements as usize)];
                let id = known.get((iocb.placement as usize).wrapping_sub(1)).filter(|_| !*is_read);
                transfer.command(drive, *is_read, sync && !*is_read, id.copied().unwrap_or(0))
            }
            None => transfer.entry(FILE, *is_read, sync),
        };
        let entry = entry.user_data(number as u64);
        self.queued += run.bytes();
        // SAFETY: its list and buffer are in the slot, which is used again only after the result;
        // the objects' memory is lent until the executor has stopped.
        unsafe { self.ring.push(&entry)? };
        if self.ring.unsubmitted() >= BATCH || self.queued >= BATCH_BYTES {
            self.submit()?;
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.queued = 0;
        self.words.add(offset_of!(Warp, sq_doorbells), 1);
        self.ring.submit()
    }

    /// Handles results of the kernel, and returns their number.
    fn reap(&mut self) -> io::Result<usize> {
        let mut results = mem::take(&mut self.results);
        self.ring.take(&self.at.wake, &mut results);
        let count = results.len();
        if count > 0 {
            self.words.add(offset_of!(Warp, cq_doorbells), 1);
        }
        for (number, result) in results.drain(..) {
            self.advance(number as usize, result)?;
        }
        self.results = results;
        Ok(count)
    }

    /// Handles a result of a transfer.
    fn advance(&mut self, number: usize, result: i32) -> io::Result<()> {
        let slot = &mut self.slots[number];
        if slot.state == Stage::GivenUp {
            self.given_up -= 1;
            self.words.add(offset_of!(Warp, late), 1);
            self.release(number);
            return Ok(());
        }
        let is_drive = self.at.target.drive.is_some();
        let moved = match result {
            0 if is_drive => Ok(slot.transfer.asked()),
            _ => usize::try_from(result),
        };
        let status = match moved {
            Ok(_) if is_drive && result > 0 => {
                abi::STATUS_NVME | u32::from(passthrough::status_of(result).0)
            }
            Ok(moved) if slot.transfer.advance(moved) => abi::STATUS_OK,
            // A part of it: the rest follows.
            Ok(moved) if moved > 0 => return self.queue(number),
            Ok(_) => {
                // The file is shorter than it was.
                let error = io::Error::from(io::ErrorKind::UnexpectedEof);
                self.status_of(number, &error)
            }
            Err(_) => match -result {
                libc::EAGAIN => return self.queue(number),
                libc::EINTR if !is_drive => return self.queue(number),
                // Memory that the kernel cannot pin, such as a device's: the CPU can copy it.
                libc::EFAULT if !slot.transfer.is_bounced() && self.prepare(number, true) => {
                    return self.queue(number);
                }
                error => self.status_of(number, &io::Error::from_raw_os_error(error)),
            },
        };
        self.end(number, status);
        Ok(())
    }

    /// Returns the status that a drive would have, for an error of the operating system.
    fn status_of(&self, number: usize, error: &io::Error) -> u32 {
        let OnWay { run, is_read, .. } = &self.slots[number];
        let (offset, bytes, device) = (run.offset, run.bytes(), self.warp.device);
        let direction = if *is_read { "reading" } else { "writing" };
        tracing::warn!(device, offset, bytes, %error, "{direction} the file failed");
        abi::STATUS_NVME | u32::from(status_of(error, *is_read).0)
    }

    /// Credits a transfer that has ended to its operation.
    fn end(&mut self, number: usize, status: u32) {
        let OnWay { op: at, run, is_read, transfer, .. } = &self.slots[number];
        let (at, run, is_read) = (*at, *run, *is_read);
        if let Some(op) = &mut self.ops[at] {
            op.outstanding -= 1;
            if status == abi::STATUS_OK {
                let counter = if is_read {
                    offset_of!(Warp, bytes_read)
                } else {
                    offset_of!(Warp, bytes_written)
                };
                self.words.add(counter, run.bytes());
                let mut wrong = 0;
                if is_read {
                    let objects = objects(op, &run, &self.at.reach);
                    // SAFETY: they are those that were prepared.
                    unsafe { transfer.deliver(objects, u64::from(run.slot_bytes)) };
                    wrong = verify(op, &run, &self.at.reach);
                }
                op.objects += u64::from(run.count - wrong);
                self.words.add(offset_of!(Warp, errors), u64::from(wrong));
            } else {
                note(op, status, run.indices(), 1);
                self.words.add(offset_of!(Warp, errors), 1);
            }
        }
        self.release(number);
        self.finish_if_done(at);
    }

    /// Frees a slot, whose transfer the kernel does not know.
    fn release(&mut self, number: usize) {
        let OnWay { run, is_read, state, .. } = &mut self.slots[number];
        *state = Stage::Free;
        self.lanes.bytes[usize::from(!*is_read)] -= run.bytes();
        self.free.push(number);
    }

    /// Completes this warp's share of an operation, if all of it is generated and has ended.
    fn finish_if_done(&mut self, at: usize) {
        let is_done = |op: &Op| op.is_generated() && op.outstanding == 0;
        if !self.ops[at].as_ref().is_some_and(is_done) {
            return;
        }
        if let Some(op) = self.ops[at].take() {
            self.unused.push(at);
            self.words.add(offset_of!(Warp, objects), op.objects);
            if self.words.finish(op.id, op.errors, op.error, op.objects) {
                self.at.ends.add();
            }
        }
    }

    /// Gives up if a transfer takes too long.
    fn check_time(&mut self) -> io::Result<()> {
        if self.in_kernel() == 0 {
            return Ok(());
        }
        let (now, timeout) = (self.at.clock.now(), self.words.args().timeout_ns);
        let mut is_late = false;
        for slot in self.slots.iter_mut().filter(|slot| slot.state == Stage::Flying) {
            is_late |= (now - *slot.since.get_or_insert(now)).0 >= timeout;
        }
        if is_late {
            self.fail(abi::FAULT_TIMEOUT, Nanos(now.0.saturating_sub(timeout)));
            for number in 0..self.slots.len() {
                if self.slots[number].state == Stage::GivenUp {
                    self.ring.cancel(number as u64)?;
                }
            }
        }
        Ok(())
    }

    /// Fails the warp: what is in the kernel since `late` or longer has timed out, the rest has
    /// failed with it. Nothing more is started until the executor is started again.
    fn fail(&mut self, fault: u32, late: Nanos) {
        self.words.set(offset_of!(Warp, fault), fault);
        for number in 0..self.slots.len() {
            let OnWay { state, since, op: at, run, .. } = &mut self.slots[number];
            if *state != Stage::Flying {
                continue;
            }
            *state = Stage::GivenUp;
            let status = if since.is_some_and(|since| since <= late) {
                abi::STATUS_TIMEOUT
            } else {
                abi::STATUS_FAULT
            };
            let (at, indices) = (*at, run.indices());
            self.given_up += 1;
            if let Some(op) = &mut self.ops[at] {
                op.outstanding -= 1;
                note(op, status, indices, 1);
                self.words.add(offset_of!(Warp, errors), 1);
            }
            self.finish_if_done(at);
        }
        self.refuse(abi::STATUS_FAULT);
        self.count();
    }

    /// Publishes the numbers of transfers in the kernel.
    fn count(&self) {
        let flying = self.in_kernel() as u32 - self.given_up;
        self.words.set(offset_of!(Warp, outstanding), flying);
        self.words.set(offset_of!(Warp, quarantined), self.given_up);
    }
}

/// Returns the objects of a run. They were found when it was made.
fn objects<'a>(
    op: &'a Op,
    run: &'a Extent,
    reach: &'a Reach,
) -> impl Iterator<Item = Object> + Clone + 'a {
    run.indices().filter_map(|index| op.object(run.row, index, reach))
}

/// Records that IOCTXs failed.
fn note(op: &mut Op, status: u32, indices: std::ops::Range<u32>, errors: u32) {
    op.errors += errors;
    if op.error == 0 {
        op.error = u64::from(status) << 32 | u64::from(indices.start);
    }
    for index in indices {
        // SAFETY: the ring has a status for each IOCTX; the completion publishes them.
        unsafe { store32(op.iocb.status + u64::from(index) * 4, status) };
    }
}

fn crc(object: Object) -> u32 {
    let address = object.memory.as_ptr().expose_provenance() as u64;
    // SAFETY: the object is in memory that the caller of the ring lends.
    unsafe { ffi::gio_host_checksum(address, object.bytes as u32) }
}

/// Stores the checksums of objects that are about to be written.
fn store_checksums(op: &Op, run: &Extent, reach: &Reach) {
    for index in run.indices() {
        if let Some(to) = op.checksum(run.row, index)
            && let Some(object) = op.object(run.row, index, reach)
        {
            // SAFETY: the ring has a checksum for each; the completion publishes them.
            unsafe { store32(to, crc(object)) };
        }
    }
}

/// Compares objects that were read with their checksums. Returns the number of those that differ.
fn verify(op: &mut Op, run: &Extent, reach: &Reach) -> u32 {
    let mut wrong = 0;
    for index in run.indices() {
        if let Some(at) = op.checksum(run.row, index)
            && let Some(object) = op.object(run.row, index, reach)
        {
            // SAFETY: as in store_checksums; the ring entry published it.
            if unsafe { load32(at) } != crc(object) {
                wrong += 1;
                note(op, abi::STATUS_CHECKSUM, index..index + 1, 1);
            }
        }
    }
    wrong
}
