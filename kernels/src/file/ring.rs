#![allow(unsafe_code, reason = "moves data in memory that the ring laid out")]
//! The `io_uring` of a thread, and how it is woken.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use io_uring::{
    IoUring, cqueue, opcode,
    squeue::{self, Entry128},
    types,
};
use nvme_driver::{
    Nanos,
    platform::threads::{self, EntryThreads},
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::FileTarget;

/// The file of the ring.
pub(super) const FILE: types::Fixed = types::Fixed(0);
/// Marks the result of waiting for [`Wake`].
pub(super) const WOKEN: u64 = u64::MAX;
/// Marks the result of a cancellation, which is of no interest: that of the transfer follows.
pub(super) const CANCELLED: u64 = u64::MAX - 1;

/// Names in reports.
const PLAIN: &str = "file (plain io_uring)";
const THREADS: &str = "file (threads: io_uring is forbidden)";
const FORBIDDEN: &str = "threads read and write the files, which takes more CPU time; allow \
                         io_uring_setup, _enter and _register in the container's policy, and see \
                         io_uring_disabled in /proc/sys/kernel";

/// Times that entries are submitted to make room for one. The kernel may be short of memory.
const PUSHES_MAX: u32 = 10_000;

/// Wakes a thread that sleeps in the kernel.
#[derive(Debug)]
pub(super) struct Wake {
    asleep: Mutex<bool>,
    event: OwnedFd,
}

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { asleep: Mutex::new(false), event })
    }

    /// Has the thread look at the ring of operations and the stop word again.
    pub(super) fn wake(&self) {
        // Either this sees that the thread sleeps, or the thread, which takes the lock after this
        // and then looks a last time, sees what was published before.
        if self.set_asleep(false) {
            // It cannot be full: the thread empties it before it sleeps again.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Says whether the thread sleeps: true before it looks a last time. Returns what was said.
    pub(super) fn set_asleep(&self, asleep: bool) -> bool {
        let mut said = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *said, asleep)
    }

    /// Sleeps until someone wakes the thread, or a time has passed, or a signal arrives.
    fn sleep(&self, time: Nanos) {
        let span = time.duration();
        let limit = Timespec { tv_sec: span.as_secs() as i64, tv_nsec: span.subsec_nanos().into() };
        let mut event = [PollFd::new(&self.event, PollFlags::IN)];
        if poll(&mut event, Some(&limit)).is_ok_and(|ready| ready > 0) {
            self.clear();
        }
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

/// How it is less than the best.
#[derive(Debug)]
pub struct Lesser {
    /// Name of the executor in reports.
    pub name: &'static str,
    /// The kernel's answer.
    pub cause: io::Error,
    /// Consequence and remedy.
    pub remedy: &'static str,
}

impl Lesser {
    /// Returns how the executor is less than the best on this machine, if it is.
    ///
    /// # Errors
    /// Returns the operating system's error if it would not start at all.
    pub fn here() -> io::Result<Option<Self>> {
        made(2, Way::Kernel).map(|(_, lesser)| lesser)
    }
}

/// Makes a ring, if that is not forbidden. Says how it is less than the best, if it is.
fn made<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    entries: u32,
    way: impl FnOnce(IoUring<S, C>) -> Way,
) -> io::Result<(Option<Way>, Option<Lesser>)> {
    let (ring, cause) = threads::ring(entries)?;
    let (name, remedy) = match ring {
        Some(_) => (PLAIN, "it takes more CPU time; Linux 6.1 has what is missing"),
        None => (THREADS, FORBIDDEN),
    };
    Ok((ring.map(way), cause.map(|cause| Lesser { name, cause, remedy })))
}

/// Executes entries.
#[allow(clippy::large_enum_variant, reason = "a queue has one")]
enum Way {
    Kernel(IoUring),
    /// With entries that have room for a command.
    Drive(IoUring<Entry128, cqueue::Entry32>),
    /// For the file.
    Threads(EntryThreads, Arc<OwnedFd>),
}

/// Does the same with either kind of ring, or something else without one.
macro_rules! either {
    ($way:expr, $ring:ident => $with_ring:expr, $threads:pat => $without:expr $(,)?) => {
        match $way {
            Way::Kernel($ring) => $with_ring,
            Way::Drive($ring) => $with_ring,
            $threads => $without,
        }
    };
}

/// The ring; made and used by one thread.
pub(super) struct Ring {
    way: Way,
    /// True while the kernel watches the [`Wake`].
    is_watching: bool,
    unsubmitted: usize,
}

impl Ring {
    /// Makes a ring for `transfers` at a time. Says how it is less than the best, if it is.
    pub(super) fn new(
        target: &FileTarget,
        transfers: u32,
        wake: &Arc<Wake>,
    ) -> io::Result<(Self, Option<Lesser>)> {
        // The thread that is woken, and a cancellation.
        let entries = transfers + 2;
        let (ring, lesser) = match target.drive {
            Some(_) => made(entries, Way::Drive)?,
            None => made(entries, Way::Kernel)?,
        };
        let way = match ring {
            Some(ring) => ring,
            None => {
                let wake = wake.clone();
                Way::Threads(EntryThreads::new(move || wake.wake())?, target.file.clone())
            }
        };
        // The claims on a drive, too: they end when nothing is in the kernel any more, even if this
        // process is killed.
        let claims = target.drive.iter().flat_map(|drive| &drive.claims);
        let files: Vec<_> =
            std::iter::once(&*target.file).chain(claims).map(|file| file.as_raw_fd()).collect();
        either!(&way, ring => {
            ring.submitter().register_files(&files)?;
            // Saves a look-up for each call. Linux before 5.18 does not have that.
            let _ = ring.submitter().register_ring_fd();
        }, Way::Threads(..) => {});
        Ok((Self { way, is_watching: false, unsubmitted: 0 }, lesser))
    }

    /// Queues an entry.
    ///
    /// # Safety
    /// Everything that it points to lives until its result is seen.
    pub(super) unsafe fn push(&mut self, entry: &Entry128) -> io::Result<()> {
        for _ in 0..PUSHES_MAX {
            // SAFETY: the caller's promise.
            let is_pushed = unsafe {
                match &mut self.way {
                    // The first half is all of an entry without a command.
                    Way::Kernel(ring) => {
                        let half: squeue::Entry = std::mem::transmute_copy(entry);
                        ring.submission().push(&half).is_ok()
                    }
                    Way::Drive(ring) => ring.submission().push(entry).is_ok(),
                    Way::Threads(threads, file) => {
                        threads.push(entry.clone(), file);
                        true
                    }
                }
            };
            if is_pushed {
                self.unsubmitted += 1;
                return Ok(());
            }
            self.submit()?;
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Returns the number of entries that the kernel does not have yet.
    pub(super) fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// Asks the kernel to give up a transfer. A thread that has begun one cannot.
    pub(super) fn cancel(&mut self, transfer: u64) -> io::Result<()> {
        if let Way::Threads(threads, _) = &self.way {
            threads.cancel(transfer);
            return Ok(());
        }
        let entry = opcode::AsyncCancel::new(transfer).build().user_data(CANCELLED);
        // SAFETY: it points to nothing.
        unsafe { self.push(&entry.into()) }
    }

    /// Submits what is queued, with one system call.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        self.enter(0, Nanos(0))
    }

    /// Submits what is queued, and sleeps until there are `results`, or someone wakes the thread,
    /// or a time has passed.
    pub(super) fn sleep(&mut self, wake: &Wake, results: usize, time: Nanos) -> io::Result<()> {
        if let Way::Threads(threads, _) = &mut self.way {
            (self.unsubmitted, _) = (0, threads.submit());
            if threads.want(results) {
                wake.sleep(time);
            }
            return Ok(());
        }
        if !self.is_watching {
            let file = types::Fd(wake.event.as_raw_fd());
            let entry = opcode::PollAdd::new(file, libc::POLLIN as u32).build().user_data(WOKEN);
            // SAFETY: it points to nothing.
            unsafe { self.push(&entry.into())? };
            self.is_watching = true;
        }
        self.enter(results, time)
    }

    fn enter(&mut self, results: usize, time: Nanos) -> io::Result<()> {
        let span = time.duration();
        let limit = types::Timespec::new().sec(span.as_secs()).nsec(span.subsec_nanos());
        let args = types::SubmitArgs::new().timespec(&limit);
        let (entered, unsubmitted) = either!(&mut self.way, ring => {
            let entered = match results {
                0 => ring.submit(),
                _ => ring.submitter().submit_with_args(results, &args),
            };
            (entered, ring.submission().len())
        }, Way::Threads(threads, _) => {
            threads.submit();
            (Ok(0), 0)
        });
        self.unsubmitted = unsubmitted;
        match entered {
            Ok(_) => Ok(()),
            // The time has passed, a signal arrived, or the kernel is short of memory or has to
            // deliver results first: the caller comes again.
            Err(error) if is_transient(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes the results of transfers: numbers and values.
    pub(super) fn take(&mut self, wake: &Wake, results: &mut Vec<(u64, i32)>) {
        either!(&mut self.way, ring => for entry in ring.completion() {
            match entry.user_data() {
                WOKEN => {
                    self.is_watching = false;
                    wake.clear();
                }
                CANCELLED => {}
                transfer => results.push((transfer, entry.result())),
            }
        }, Way::Threads(threads, _) => threads.take(results));
    }
}

fn is_transient(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    matches!(number, Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME | libc::ENOMEM))
}
