//! A medium in a file, accessed with `io_uring` and direct I/O.
//!
//! Bytes go directly between file and DMA memory if direct I/O supports its alignment; else through
//! a bounce buffer. Operations are queued in `submit` and passed to the kernel together in `poll`,
//! with one system call. Threads carry them out where `io_uring` is forbidden. For a namespace that
//! the kernel's driver has, operations are NVMe commands, which threads send.
#![allow(unsafe_code, reason = "gives the kernel addresses to read and write asynchronously")]

use std::{
    collections::VecDeque,
    fmt, io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use io_uring::{
    IoUring, opcode,
    squeue::{self, Entry128},
    types,
};
use nvme_driver::{
    Clock, MonotonicClock, Nanos,
    platform::{
        passthrough::{PAGE, Passthrough, status_of},
        threads::{self, EntryThreads},
    },
    wait_until,
};
use nvme_spec::{
    ids::Cid,
    nvm::{DatasetManagement, DatasetRange, NvmOpcode},
    sqe::Sqe,
};
use rustix::fs::{FallocateFlags, FlockOperation};
use zerocopy::IntoBytes as _;

use self::{
    buffers::Buffers,
    open::{capacity, explain, limits, open},
    transfer::{Limits, Transfer},
};
use super::{DROP_TIMEOUT, Media, MediaDone, MediaError, MediaKind, MediaOp, drain};
use crate::{domain::SgList, memory::HostMap};

mod buffers;
mod open;
#[cfg(test)]
mod tests;
mod transfer;

/// Options for opening a [`FileMedia`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOptions {
    /// Bypasses the page cache (`O_DIRECT`). Opening fails on a filesystem without support. With
    /// `false`, the kernel's page cache determines the timings.
    pub direct: bool,
    /// Keeps the file's blocks allocated: deallocated ranges read as zeroes and stay reserved.
    /// Otherwise a later write may find the disk full.
    pub keep_space: bool,
    /// Opens the file for reading only: writes fail, and a read-only file system is no obstacle.
    /// It is not locked, so that it can be read beside the process that writes to it.
    pub read_only: bool,
    /// Operations in the kernel at a time; more are queued.
    pub depth: u32,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { direct: true, keep_space: false, read_only: false, depth: 256 }
    }
}

/// A medium in a file; see the module documentation.
pub struct FileMedia {
    ring: Ring,
    file: Arc<OwnedFd>,
    path: PathBuf,
    capacity: u64,
    limits: Limits,
    keep_space: bool,
    slots: Vec<Option<Flight>>,
    free: Vec<u32>,
    /// Reads, and everything else: neither waits for the other.
    lanes: [Lane; 2],
    /// The lane that started an operation last.
    turn: usize,
    /// Entries in the submission queue not yet passed to the kernel by a system call.
    unsubmitted: usize,
    /// Results from the kernel, before `finish`. Kept for its capacity.
    reaped: Vec<(u64, i32)>,
    /// Idle transfers, for reuse.
    spare: Vec<Transfer>,
    buffers: Buffers,
    /// Destination for holes of reads.
    drain: HostMap,
    /// Set once the ring has failed.
    broken: Option<MediaError>,
}

/// An operation in the kernel.
struct Flight {
    op: MediaOp,
    transfer: Transfer,
    /// The operation is abandoned, but the kernel still works on it.
    cancelled: bool,
}

/// Operations of a kind, which start in the order of their submission.
#[derive(Debug)]
struct Lane {
    backlog: VecDeque<MediaOp>,
    /// Bytes of its operations in the kernel, and their limit.
    bytes: u64,
    bytes_max: u64,
}

/// Bytes of the drain: a bit bucket of any length is read into it repeatedly.
const DRAIN_BYTES: usize = 64 << 10;
/// Queued operations after which they are passed to the kernel immediately.
const BATCH: usize = 32;
/// Limit of bytes that are read in the kernel at a time. A disk is no faster with more, but serves
/// all of them together: of 48 MiB, the first arrived after 28 ms of 30, and now after 7 of 28.
const READS_MAX: u64 = 8 << 20;
/// Limit of bytes that are written: nobody waits for the first ones, and a busy machine is slow to
/// hand over the next. Bounce buffers stay in the CPU cache, and are allocated soon.
const WRITES_MAX: u64 = 32 << 20;

impl FileMedia {
    /// Opens the file at `path`, created and extended to `bytes` if necessary (0: it must exist,
    /// and its length is used). Only one medium may write to it at a time.
    ///
    /// A block device is used like a file. It is opened exclusively: one with a mounted file
    /// system, or in use by another driver, is refused.
    ///
    /// # Errors
    /// Returns the operating system's error with a remedy, for the file, the lock, `O_DIRECT`, or
    /// `io_uring` (unless that is forbidden). Fails for a block device smaller than `bytes`.
    pub fn open(path: &Path, bytes: u64, options: FileOptions) -> io::Result<Self> {
        let file = open(path, bytes > 0, options)?;
        if !options.read_only {
            let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
            locked.map_err(|error| {
                explain(path, "locking it", error, "is another controller using it?")
            })?;
        }
        let capacity = capacity(&file, path, bytes)?;
        let limits = limits(&file, path, options.direct)?;
        Self::over(Arc::new(file), path, capacity, limits, options)
    }

    /// Creates the medium of a namespace, which `path` names in messages.
    ///
    /// # Errors
    /// Returns the operating system's error if there is no memory or thread for it.
    pub fn of_namespace(drive: Arc<Passthrough>, path: &Path) -> io::Result<Self> {
        let space = &drive.namespace;
        let limits = Limits { memory_align: PAGE, offset_align: space.lba_bytes() as usize };
        let (file, options) = (drive.file.clone(), FileOptions::default());
        let mut made = Self::over(file, path, space.bytes(), limits, options)?;
        made.ring = Ring::Threads(EntryThreads::new(|| {})?, Some(drive));
        Ok(made)
    }

    fn over(
        file: Arc<OwnedFd>,
        path: &Path,
        capacity: u64,
        limits: Limits,
        options: FileOptions,
    ) -> io::Result<Self> {
        let FileOptions { keep_space, depth, .. } = options;
        let depth = depth.clamp(1, 4096);
        let ring = ring(depth, Issuer::Any).map_err(|error| {
            explain(path, "setting up io_uring for it", error, "use memory media")
        })?;
        Ok(Self {
            ring,
            file,
            path: path.to_owned(),
            capacity,
            limits,
            keep_space,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            lanes: [Lane::new(READS_MAX), Lane::new(WRITES_MAX)],
            turn: 0,
            unsubmitted: 0,
            reaped: Vec::new(),
            spare: Vec::new(),
            buffers: Buffers::default(),
            drain: HostMap::anonymous(DRAIN_BYTES)?,
            broken: None,
        })
    }

    /// Returns the file, which stays locked while it is used, and the alignment that direct I/O
    /// requires: of memory, and of offsets and lengths.
    #[must_use]
    pub fn file(&self) -> (Arc<OwnedFd>, [usize; 2]) {
        (self.file.clone(), [self.limits.memory_align, self.limits.offset_align])
    }

    /// Returns the namespace, if that is the file.
    #[must_use]
    pub fn drive(&self) -> Option<&Arc<Passthrough>> {
        match &self.ring {
            Ring::Threads(_, drive) => drive.as_ref(),
            Ring::Kernel(_) => None,
        }
    }

    /// Starts `op` in a free slot. The caller has checked both.
    fn start(&mut self, op: MediaOp, slot: u32) -> Option<MediaDone> {
        let mut transfer = self.spare.pop().unwrap_or_default();
        let prepared = match (op.kind, self.drive().cloned()) {
            (MediaKind::Read | MediaKind::Write { .. }, _) => {
                transfer.prepare(&op, self.limits, &self.drain, &mut self.buffers, false)
            }
            (MediaKind::Deallocate, Some(drive)) => {
                let [slba, lbas] = [op.offset, op.len].map(|it| it >> drive.namespace.lba_shift);
                let range = DatasetRange { attributes: 0, lbas: lbas as u32, slba };
                transfer.carry(range.as_bytes(), &mut self.buffers)
            }
            _ => Ok(()),
        };
        if let Err(error) = prepared {
            self.free.push(slot);
            return Some(op.done(Err(MediaError::os("allocating a bounce buffer", &error))));
        }
        self.lane(op.kind).bytes += moved(&op);
        self.slots[slot as usize] = Some(Flight { op, transfer, cancelled: false });
        self.queue(slot);
        None
    }

    /// Queues the rest of a slot's operation for the kernel.
    fn queue(&mut self, slot: u32) {
        let Some(flight) = &self.slots[slot as usize] else { return };
        let file = types::Fd(self.file.as_raw_fd());
        let entry = || flight.entry(file, self.keep_space).user_data(u64::from(slot));
        // SAFETY: everything the entry points to lives until its completion: the list of parts and
        // the bounce buffer in the slot, the memory behind them by the operation's sg_list, the
        // drain and the file in `self`. A slot is emptied only by `finish`, or leaked.
        let pushed = unsafe {
            match &mut self.ring {
                Ring::Kernel(ring) => ring.submission().push(&entry()).is_ok(),
                Ring::Threads(threads, drive) => {
                    let command = drive.as_ref().map(|drive| flight.command(drive));
                    let command = command.map(|it| it.user_data(u64::from(slot)));
                    threads.push(command.unwrap_or_else(|| entry().into()), &self.file);
                    true
                }
            }
        };
        // The queue has at least as many entries as there are slots, and each slot uses one.
        assert!(pushed, "the kernel's queue is full with a slot free");
        self.unsubmitted += 1;
        if self.unsubmitted >= BATCH {
            self.hand_over();
        }
    }

    /// Submits queued entries with one system call. On a single-issuer ring, this also collects
    /// available results.
    fn hand_over(&mut self) {
        let ring = match &mut self.ring {
            Ring::Kernel(ring) => ring,
            Ring::Threads(threads, _) => {
                (self.unsubmitted, _) = (0, threads.submit());
                return;
            }
        };
        match ring.submit() {
            Ok(_) => self.unsubmitted = ring.submission().len(),
            // Interrupted, short of memory, or another thread's ring: the queue is unchanged, and
            // the next call tries again.
            Err(error) if transient(&error) => std::thread::yield_now(),
            Err(error) => {
                tracing::error!(path = %self.path.display(), %error, "io_uring failed for good");
                self.broken = Some(MediaError::os("handing operations to io_uring", &error));
            }
        }
    }

    /// Abandons everything after a failure of the ring. The kernel may still access the memory of
    /// operations in flight, so it is leaked; the operations fail.
    fn abandon(&mut self, error: &MediaError, done: &mut Vec<MediaDone>) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Some(Flight { op, transfer, cancelled }) = slot.take() else { continue };
            let token = op.token;
            std::mem::forget((op, transfer));
            if !cancelled {
                let sg_list = SgList::new();
                done.push(MediaDone { token, result: Err(error.clone()), sg_list });
            }
            self.free.push(u32::try_from(index).unwrap_or(0));
        }
        for lane in &mut self.lanes {
            lane.bytes = 0;
            done.extend(lane.backlog.drain(..).map(|op| op.done(Err(error.clone()))));
        }
        std::mem::forget(self.drive().cloned());
        let drain = HostMap::anonymous(1).map(|small| std::mem::replace(&mut self.drain, small));
        std::mem::forget(drain);
    }

    /// Takes the kernel's results out of the ring.
    fn collect(&mut self) {
        match &mut self.ring {
            Ring::Kernel(ring) => {
                let results = ring.completion().map(|entry| (entry.user_data(), entry.result()));
                self.reaped.extend(results);
            }
            Ring::Threads(threads, _) => threads.take(&mut self.reaped),
        }
    }

    fn reap(&mut self, done: &mut Vec<MediaDone>) {
        self.collect();
        let mut reaped = std::mem::take(&mut self.reaped);
        for (slot, result) in reaped.drain(..) {
            if let Ok(slot) = u32::try_from(slot)
                && let Some(finished) = self.finish(slot, result)
            {
                done.push(finished);
            }
        }
        self.reaped = reaped;
    }

    /// Handles a result of the kernel. Returns `None` if the operation continues.
    fn finish(&mut self, slot: u32, result: i32) -> Option<MediaDone> {
        let is_drive = self.drive().is_some();
        let flight = self.slots.get_mut(slot as usize)?.as_mut()?;
        let outcome = match flight.advance(result, is_drive) {
            _ if flight.cancelled => Ok(()),
            // Interrupted: the submitting thread ended, or a signal arrived.
            Step::Again => {
                self.queue(slot);
                return None;
            }
            // Memory that the kernel cannot pin, such as a device's: the CPU can still copy it.
            Step::Unpinnable => {
                let Flight { op, transfer, .. } = flight;
                match transfer.prepare(op, self.limits, &self.drain, &mut self.buffers, true) {
                    Ok(()) => {
                        self.queue(slot);
                        return None;
                    }
                    Err(error) => Err(MediaError::os("allocating a bounce buffer", &error)),
                }
            }
            Step::NoHoles => self.write_zeroes(slot),
            Step::Done(outcome) => outcome,
        };
        let Flight { op, mut transfer, cancelled } = self.slots[slot as usize].take()?;
        self.free.push(slot);
        self.lane(op.kind).bytes -= moved(&op);
        if outcome.is_ok() && op.kind == MediaKind::Read && !cancelled {
            transfer.deliver(&op.sg_list);
        }
        transfer.rest();
        self.spare.push(transfer);
        (!cancelled).then(|| op.done(outcome))
    }

    /// Writes zeroes explicitly, for filesystems without hole punching.
    fn write_zeroes(&self, slot: u32) -> Result<(), MediaError> {
        let Some(Flight { op, .. }) = &self.slots[slot as usize] else { return Ok(()) };
        let failed = |error: io::Error| MediaError::os("writing zeroes", &error);
        let zeroes = HostMap::anonymous(DRAIN_BYTES).map_err(failed)?;
        let (mut at, end) = (op.offset, op.offset + op.len);
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(DRAIN_BYTES).min(DRAIN_BYTES);
            // SAFETY: `zeroes` is ours, has that length, and is never written.
            let bytes = unsafe { std::slice::from_raw_parts(zeroes.ptr().as_ptr(), len) };
            let wrote =
                rustix::io::pwrite(&*self.file, bytes, at).map_err(|error| failed(error.into()))?;
            if wrote == 0 {
                return Err(failed(io::ErrorKind::WriteZero.into()));
            }
            at += wrote as u64;
        }
        Ok(())
    }

    fn lane(&mut self, kind: MediaKind) -> &mut Lane {
        &mut self.lanes[usize::from(kind != MediaKind::Read)]
    }

    /// Starts operations of the lanes in turns.
    fn refill(&mut self, done: &mut Vec<MediaDone>) {
        let mut empty = 0;
        while empty < self.lanes.len()
            && let Some(slot) = self.free.pop()
        {
            self.turn = (self.turn + 1) % self.lanes.len();
            if let Some(op) = self.lanes[self.turn].next() {
                empty = 0;
                done.extend(self.start(op, slot));
            } else {
                empty += 1;
                self.free.push(slot);
            }
        }
    }

    fn flying(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the number of operations without a result, submitted or not.
    fn unfinished(&self) -> usize {
        self.flying() - self.reaped.len()
    }

    /// Replaces the ring once it has delivered all results, for which it waits [`DROP_TIMEOUT`].
    /// Returns `false`, and keeps the ring, if they did not arrive.
    fn change_ring(&mut self, issuer: Issuer) -> io::Result<bool> {
        let Ring::Kernel(old) = &self.ring else { return Ok(true) };
        let entries = old.params().sq_entries();
        let clock = MonotonicClock::default();
        let ended = wait_until(&clock, clock.now() + DROP_TIMEOUT, || {
            self.hand_over();
            self.collect();
            self.unfinished() == 0
        });
        if ended {
            self.ring = ring(entries, issuer)?;
        }
        Ok(ended)
    }
}

/// Returns the bytes that an operation moves.
fn moved(op: &MediaOp) -> u64 {
    let moves = matches!(op.kind, MediaKind::Read | MediaKind::Write { .. });
    if moves { op.len } else { 0 }
}

impl Lane {
    fn new(bytes_max: u64) -> Self {
        Self { backlog: VecDeque::new(), bytes: 0, bytes_max }
    }

    fn has_room(&self, op: &MediaOp) -> bool {
        self.bytes == 0 || self.bytes + moved(op) <= self.bytes_max
    }

    /// Takes the first operation of the backlog, if it may start.
    fn next(&mut self) -> Option<MediaOp> {
        let may_start = self.backlog.front().is_some_and(|op| self.has_room(op));
        if may_start { self.backlog.pop_front() } else { None }
    }
}

/// Meaning of a kernel result for its operation.
enum Step {
    Again,
    Unpinnable,
    NoHoles,
    Done(Result<(), MediaError>),
}

impl Flight {
    fn entry(&self, fd: types::Fd, keep_space: bool) -> squeue::Entry {
        match self.op.kind {
            MediaKind::Read | MediaKind::Write { .. } => self.transfer_entry(fd),
            MediaKind::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            MediaKind::Deallocate | MediaKind::WriteZeroes => {
                let keeping = FallocateFlags::ZERO_RANGE;
                let zeroes = if keep_space { keeping } else { FallocateFlags::PUNCH_HOLE };
                let mode = zeroes | FallocateFlags::KEEP_SIZE;
                let mode = i32::try_from(mode.bits()).unwrap_or(0);
                opcode::Fallocate::new(fd, self.op.len).offset(self.op.offset).mode(mode).build()
            }
        }
    }

    fn transfer_entry(&self, fd: types::Fd) -> squeue::Entry {
        let (parts, at) = self.transfer.rest_of(self.op.offset);
        let flags =
            if self.op.kind == (MediaKind::Write { fua: true }) { libc::RWF_DSYNC } else { 0 };
        let reads = self.op.kind == MediaKind::Read;
        // The kernel would copy a list and allocate memory for it; a single part needs none.
        if let [part] = parts
            && let Ok(len) = u32::try_from(part.iov_len)
        {
            let base = part.iov_base.cast();
            return if reads {
                opcode::Read::new(fd, base, len).offset(at).build()
            } else {
                opcode::Write::new(fd, base, len).offset(at).rw_flags(flags).build()
            };
        }
        // At most PARTS_MAX.
        let (list, count) = (parts.as_ptr(), parts.len() as u32);
        if reads {
            opcode::Readv::new(fd, list, count).offset(at).build()
        } else {
            opcode::Writev::new(fd, list, count).offset(at).rw_flags(flags).build()
        }
    }

    /// Returns the operation as a command for a drive.
    fn command(&self, drive: &Passthrough) -> Entry128 {
        let MediaOp { offset, len, placement, .. } = self.op;
        let plain = |opcode: NvmOpcode| Sqe::new(opcode.0, Cid(0), drive.namespace.nsid);
        let blocks = |opcode, fua| drive.blocks(opcode, [offset, len], fua, placement);
        let sqe = match self.op.kind {
            MediaKind::Read => blocks(NvmOpcode::READ, false),
            MediaKind::Write { fua } => blocks(NvmOpcode::WRITE, fua),
            MediaKind::WriteZeroes => blocks(NvmOpcode::WRITE_ZEROES, false),
            MediaKind::Flush => plain(NvmOpcode::FLUSH),
            MediaKind::Deallocate => {
                let mut sqe = plain(NvmOpcode::DATASET_MANAGEMENT);
                DatasetManagement { nr_z: 0, deallocate: true }.write_to(&mut sqe);
                sqe
            }
        };
        drive.entry(&sqe, self.transfer.rest_of(0).0)
    }

    fn advance(&mut self, result: i32, is_drive: bool) -> Step {
        let action = match self.op.kind {
            MediaKind::Read => "reading the file",
            MediaKind::Write { .. } => "writing the file",
            MediaKind::Flush => "flushing the file",
            MediaKind::Deallocate | MediaKind::WriteZeroes => "zeroing a range of the file",
        };
        if is_drive && result >= 0 {
            let failed = MediaError::Drive { action, status: status_of(result) };
            return Step::Done(if result == 0 { Ok(()) } else { Err(failed) });
        }
        let Ok(moved) = usize::try_from(result) else {
            let error = io::Error::from_raw_os_error(-result);
            let zeroing = matches!(self.op.kind, MediaKind::Deallocate | MediaKind::WriteZeroes);
            return match -result {
                libc::ECANCELED => Step::Again,
                // A command was cancelled, which may have been a flush: no other replaces it.
                libc::EINTR | libc::EAGAIN if !is_drive => Step::Again,
                libc::EOPNOTSUPP if zeroing && !is_drive => Step::NoHoles,
                libc::EFAULT if self.transfer.is_straight() => Step::Unpinnable,
                _ => Step::Done(Err(MediaError::os(action, &error))),
            };
        };
        if !matches!(self.op.kind, MediaKind::Read | MediaKind::Write { .. }) {
            return Step::Done(Ok(()));
        }
        if self.transfer.advance(moved) {
            return Step::Done(Ok(()));
        }
        if moved == 0 {
            let error = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Step::Done(Err(MediaError::os(action, &error)));
        }
        Step::Again
    }
}

impl Media for FileMedia {
    fn capacity_bytes(&self) -> u64 {
        self.capacity
    }

    fn granularity_bytes(&self) -> u32 {
        u32::try_from(self.limits.offset_align).unwrap_or(4096)
    }

    fn submit(&mut self, op: MediaOp, _now: Nanos) -> Option<MediaDone> {
        if let Err(error) = op.check(self.capacity) {
            return Some(op.done(Err(error)));
        }
        if let Some(error) = self.broken.clone() {
            return Some(op.done(Err(error)));
        }
        if op.len == 0 && op.kind != MediaKind::Flush {
            return Some(op.done(Ok(())));
        }
        let lane = self.lane(op.kind);
        if lane.backlog.is_empty()
            && lane.has_room(&op)
            && let Some(slot) = self.free.pop()
        {
            return self.start(op, slot);
        }
        self.lane(op.kind).backlog.push_back(op);
        None
    }

    fn poll(&mut self, _now: Nanos, done: &mut Vec<MediaDone>) {
        if self.unsubmitted > 0 || self.ring.has_results_to_fetch() {
            self.hand_over();
        }
        if self.flying() > 0 {
            self.reap(done);
            self.refill(done);
            // The disk must not wait until the caller has checked what arrived.
            if self.unsubmitted > 0 {
                self.hand_over();
            }
        }
        if let Some(error) = self.broken.clone() {
            self.abandon(&error, done);
        }
    }

    fn next_event(&self) -> Option<Nanos> {
        None
    }

    fn set_exclusive(&mut self, exclusive: bool) {
        let changed = self.change_ring(if exclusive { Issuer::One } else { Issuer::Any });
        let path = self.path.display();
        match changed {
            Ok(true) => {}
            Ok(false) => {
                tracing::error!(%path, "operations have not ended; their results are lost")
            }
            Err(error) => {
                tracing::error!(%path, %error, "making another ring failed; this one stays")
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.flying() + self.lanes.iter().map(|lane| lane.backlog.len()).sum::<usize>()
    }

    /// Operations in the kernel cannot be aborted.
    fn cancel(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.backlog.clear());
        self.slots.iter_mut().flatten().for_each(|flight| flight.cancelled = true);
    }

    /// Operations in the kernel finish, and its page cache is kept: the power of this machine is
    /// on. [`super::SimMedia`] simulates the loss.
    fn power_loss(&mut self) {
        self.cancel();
    }
}

impl Drop for FileMedia {
    fn drop(&mut self) {
        // The kernel writes into memory that our slots keep: it must finish first.
        self.cancel();
        if !drain(self) {
            let (path, operations) = (self.path.display(), self.flying());
            tracing::error!(%path, operations, "operations have not ended; their memory is leaked");
            self.abandon(&MediaError::Unreachable, &mut Vec::new());
            return;
        }
        // Not only by closing it: a child that another thread is forking has the lock until `exec`.
        // But not while others write to it, which may go on after their store was given up.
        if Arc::strong_count(&self.file) == 1 {
            let _ = rustix::fs::flock(&*self.file, FlockOperation::Unlock);
        }
    }
}

impl fmt::Debug for FileMedia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileMedia({}, {} bytes)", self.path.display(), self.capacity)
    }
}

/// Threads that may use a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Issuer {
    /// Any thread.
    Any,
    /// Only the thread that creates it. The kernel then keeps results until that thread asks for
    /// them; otherwise each one interrupts or wakes the submitting thread.
    One,
}

/// Executes entries.
#[allow(clippy::large_enum_variant, reason = "a medium has one")]
enum Ring {
    Kernel(IoUring),
    /// For the file, or as commands for a namespace.
    Threads(EntryThreads, Option<Arc<Passthrough>>),
}

impl Ring {
    /// Returns true if the kernel has results that it hands out only when asked.
    fn has_results_to_fetch(&mut self) -> bool {
        match self {
            Self::Kernel(ring) => ring.submission().taskrun(),
            Self::Threads(..) => false,
        }
    }
}

fn ring(depth: u32, issuer: Issuer) -> io::Result<Ring> {
    let made = match issuer {
        Issuer::One => threads::ring(depth)?.0,
        Issuer::Any => threads::unless_forbidden(|| IoUring::new(depth))?.ok(),
    };
    // Nobody sleeps until there is a result: the controller polls.
    made.map_or_else(
        || EntryThreads::new(|| {}).map(|it| Ring::Threads(it, None)),
        |ring| Ok(Ring::Kernel(ring)),
    )
}

fn transient(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    matches!(number, Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::EEXIST))
}
