//! Threads that carry out what `io_uring` would, where that is forbidden.
#![allow(unsafe_code, reason = "reads and writes memory by the addresses in entries")]

use std::{
    collections::VecDeque,
    fmt, io, mem,
    os::fd::{AsRawFd as _, OwnedFd, RawFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use io_uring::{
    IoUring, cqueue, opcode,
    squeue::{self, Entry128},
};
use zerocopy::FromBytes;

use super::passthrough;

/// A disk gains little from more reads at a time, and each one costs a stack and two switches.
const THREADS_MAX: usize = 16;

/// A ring, and why there is none, or not the best.
pub type MadeRing<S, C> = (Option<IoUring<S, C>>, Option<io::Error>);

/// Makes a ring for one thread, whose results wait until that thread asks for them. Linux before
/// 6.1 does not have that: then a plain ring, and its error. `None` and the reason if `io_uring` is
/// forbidden. Rings of large entries carry commands for drives.
///
/// # Errors
/// Returns other errors of the operating system: too little memory, or too many open files.
pub fn ring<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    entries: u32,
) -> io::Result<MadeRing<S, C>> {
    let mut builder = IoUring::<S, C>::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let why = match unless_forbidden(|| builder.build(entries)) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => error,
        Err(error) => return Err(error),
        Ok(Ok(ring)) => return Ok((Some(ring), None)),
        Ok(Err(why)) => return Ok((None, Some(why))),
    };
    Ok((Some(IoUring::builder().build(entries)?), Some(why)))
}

/// Makes a ring; returns the reason if `io_uring` is forbidden.
///
/// # Errors
/// Returns other errors of the operating system.
pub fn unless_forbidden<T>(
    make: impl FnOnce() -> io::Result<T>,
) -> io::Result<Result<T, io::Error>> {
    match make() {
        // A container's policy; the kernel's; a security module's.
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS | libc::EACCES)) =>
        {
            Ok(Err(error))
        }
        made => made.map(Ok),
    }
}

/// The kernel's layout of an entry: see `io_uring_enter(2)`.
#[derive(FromBytes)]
#[repr(C)]
struct Sqe {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    op_flags: u32,
    user_data: u64,
    rest: u64,
    command: [u8; 80],
}

const _: () = assert!(size_of::<Sqe>() == size_of::<Entry128>(), "an entry has another layout");

/// An entry, and the file that it is about.
type Queued = (Entry128, Arc<OwnedFd>);

/// A submission and a completion queue, like those of an [`IoUring`], for reads, writes, `fsync`,
/// `fallocate` and commands for drives. Entries run in any order, up to 16 at a time.
pub struct EntryThreads {
    desk: Arc<Desk>,
    unsubmitted: Vec<Queued>,
}

struct Desk {
    state: Mutex<Queues>,
    more: Condvar,
    /// Called when there are as many results as someone waits for.
    wake: Box<dyn Fn() + Send + Sync>,
}

struct Queues {
    queue: VecDeque<Queued>,
    results: Vec<(u64, i32)>,
    /// Number of results that someone waits for.
    wanted: usize,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

impl EntryThreads {
    /// Starts the first thread. `wake` is called by one of them: see [`EntryThreads::want`].
    ///
    /// # Errors
    /// Returns the operating system's error if it cannot be started.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> io::Result<Self> {
        let state = Queues {
            queue: VecDeque::new(),
            results: Vec::new(),
            wanted: usize::MAX,
            threads: 1,
            idle: 0,
            is_closed: false,
        };
        let (state, more) = (Mutex::new(state), Condvar::new());
        let desk = Arc::new(Desk { state, more, wake: Box::new(wake) });
        desk.clone().start()?;
        Ok(Self { desk, unsubmitted: Vec::new() })
    }

    /// Queues an entry.
    ///
    /// # Safety
    /// Everything that it points to lives until its result is taken. Its descriptor is not used.
    pub unsafe fn push(&mut self, entry: impl Into<Entry128>, file: &Arc<OwnedFd>) {
        self.unsubmitted.push((entry.into(), file.clone()));
    }

    /// Returns the number of entries that the threads do not have yet.
    #[must_use]
    pub fn unsubmitted(&self) -> usize {
        self.unsubmitted.len()
    }

    /// Hands what is queued to the threads.
    pub fn submit(&mut self) {
        let count = self.unsubmitted.len();
        let mut state = self.desk.lock();
        state.queue.extend(self.unsubmitted.drain(..));
        // Started when they are needed: most stores are idle most of the time.
        let more = state.queue.len().saturating_sub(state.idle).min(THREADS_MAX - state.threads);
        state.threads += more;
        drop(state);
        (0..count).for_each(|_| self.desk.more.notify_one());
        for _ in 0..more {
            if let Err(error) = self.desk.clone().start() {
                // The others take its share.
                let threads = &mut self.desk.lock().threads;
                *threads -= 1;
                tracing::warn!(%error, threads, "fewer threads than needed serve the files");
            }
        }
    }

    /// Has `wake` be called once there are this many results. Returns false if there are already.
    #[must_use]
    pub fn want(&self, results: usize) -> bool {
        let mut state = self.desk.lock();
        let is_short = state.results.len() < results;
        state.wanted = if is_short { results } else { usize::MAX };
        is_short
    }

    /// Gives up an entry that no thread has begun. Others cannot be cancelled.
    pub fn cancel(&self, user_data: u64) {
        let mut state = self.desk.lock();
        let is_it = |(entry, _): &Queued| entry.get_user_data() == user_data;
        if let Some(at) = state.queue.iter().position(is_it) {
            state.queue.remove(at);
            state.results.push((user_data, -libc::ECANCELED));
        }
    }

    /// Takes all results: the entries' `user_data`, and what the kernel would return.
    pub fn take(&self, results: &mut Vec<(u64, i32)>) {
        results.append(&mut self.desk.lock().results);
    }
}

impl Drop for EntryThreads {
    /// Ends the threads once they have done what they have begun: without waiting, for a disk may
    /// hang. The rest is not begun: after a panic, the lists of its parts are gone.
    fn drop(&mut self) {
        let mut state = self.desk.lock();
        state.is_closed = true;
        state.queue.clear();
        drop(state);
        self.desk.more.notify_all();
    }
}

impl fmt::Debug for EntryThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EntryThreads").finish_non_exhaustive()
    }
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // Nothing in it panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(self: Arc<Self>) -> io::Result<()> {
        thread::Builder::new().name("gio-entries".to_owned()).spawn(move || self.work()).map(drop)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some((entry, file)) = state.queue.pop_front() {
                drop(state);
                let result = run(&entry, file.as_raw_fd());
                // Before its result: then the file may be closed and unlocked.
                drop(file);
                state = self.lock();
                state.results.push((entry.get_user_data(), result));
                if state.results.len() >= state.wanted {
                    state.wanted = usize::MAX;
                    drop(state);
                    (self.wake)();
                    state = self.lock();
                }
            } else if state.is_closed {
                return;
            } else {
                state.idle += 1;
                state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

/// Carries out an entry. Returns what the kernel would: a number of bytes, or a negative error.
fn run(entry: &Entry128, file: RawFd) -> i32 {
    // SAFETY: the type is the kernel's structure, and nothing else; every pattern is a value.
    let sqe: Sqe = unsafe { mem::transmute_copy(entry) };
    let address = std::ptr::with_exposed_provenance_mut(sqe.address as usize);
    let one = libc::iovec { iov_base: address, iov_len: sqe.len as usize };
    let is_list = [opcode::Readv::CODE, opcode::Writev::CODE].contains(&sqe.opcode);
    let list = if is_list { address.cast_const().cast() } else { &raw const one };
    let (count, at) = (if is_list { sqe.len.cast_signed() } else { 1 }, sqe.offset.cast_signed());
    // SAFETY: the caller of push() vouches for the memory; `list` has `count` parts.
    let moved = unsafe {
        match sqe.opcode {
            opcode::Read::CODE | opcode::Readv::CODE => match libc::preadv(file, list, count, at) {
                // As with io_uring, a file without positions, such as a pipe, is read as it comes.
                -1 if error() == libc::ESPIPE => libc::readv(file, list, count),
                read => read,
            },
            opcode::Write::CODE | opcode::Writev::CODE if sqe.op_flags == 0 => {
                libc::pwritev(file, list, count, at)
            }
            opcode::Write::CODE | opcode::Writev::CODE => {
                let flags = sqe.op_flags.cast_signed();
                match libc::pwritev2(file, list, count, at, flags) {
                    // The only flag is RWF_DSYNC, which the kernel or the file system lacks.
                    -1 if [libc::EOPNOTSUPP, libc::ENOSYS].contains(&error()) => {
                        match libc::pwritev(file, list, count, at) {
                            wrote if wrote > 0 && libc::fdatasync(file) != 0 => -1,
                            wrote => wrote,
                        }
                    }
                    wrote => wrote,
                }
            }
            opcode::Fsync::CODE => libc::fdatasync(file) as isize,
            opcode::Fallocate::CODE => {
                let (mode, len) = (sqe.len.cast_signed(), sqe.address.cast_signed());
                libc::fallocate(file, mode, at, len) as isize
            }
            opcode::UringCmd80::CODE => {
                return passthrough::run(file, sqe.offset as u32, sqe.command);
            }
            _ => return -libc::EINVAL,
        }
    };
    // Of 32 bits as in an entry's result: the kernel moves less than 2 GiB at a time.
    if moved < 0 { -error() } else { moved as i32 }
}

fn error() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests;
