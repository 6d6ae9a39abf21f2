#![allow(unsafe_code, reason = "moves data in memory that the ring laid out")]
//! Runs operations on files, with `io_uring` and without NVMe.
//!
//! One thread for each warp of the ring does the warp's share of every operation: the objects of
//! its device. It computes offset and memory of each, as `cursor.cuh` does, merges neighbours into
//! one read or write, submits them together, and sleeps in the kernel until some have ended or
//! another operation is submitted. Nobody polls. Where `io_uring` is forbidden, more threads read
//! and write in its place, and the executor's name says so. A namespace that the kernel's driver
//! has is such a file, to which reads and writes go as NVMe commands.

mod op;
mod ring;
mod transfer;
mod words;
mod worker;

use std::{
    fmt, io,
    os::fd::OwnedFd,
    ptr::NonNull,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        mpsc::{Receiver, channel},
    },
    thread::{self, JoinHandle},
};

use gio_uring::{ExecutorError, IoExecutor, Progress, SharedMemory, abi::Args};
use nvme_driver::{
    Clock, GrantEpoch, Iova, Nanos, Place, Quiesced, Waiter, platform::passthrough::Passthrough,
    remedy,
};

pub use self::ring::Lesser;
use self::{
    ring::Wake,
    worker::{Around, Worker},
};
use crate::memory;

/// Name in reports.
const NAME: &str = "file";
const PANICKED: &str = "one of its threads panicked; the kernel may still use its memory";

/// A file, a block device, or a namespace of the kernel's driver, in place of a device's namespace:
/// LBA 0 is its first byte.
#[derive(Debug, Clone)]
pub struct FileTarget {
    /// Open for direct I/O.
    pub file: Arc<OwnedFd>,
    /// Alignment of memory that direct I/O requires, and of the lengths of its parts.
    pub memory_align: usize,
    /// Alignment of lengths and offsets that direct I/O requires.
    pub offset_align: usize,
    /// The namespace, if the file is one: it takes commands instead of reads and writes.
    pub drive: Option<Arc<Passthrough>>,
}

/// Finds memory by its address for devices: `bytes` bytes, which stay mapped while an operation
/// uses them. `None` if they are not, or this process does not reach them.
pub type Reach = Arc<dyn Fn(Iova, usize) -> Option<NonNull<u8>> + Send + Sync>;

/// Counts operations that have ended, and wakes threads that wait for one.
#[derive(Debug, Default)]
pub struct Ends {
    count: Mutex<u64>,
    more: Condvar,
}

impl Ends {
    fn count(&self) -> u64 {
        // A number is never half written.
        *self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.more.notify_all();
    }
}

/// Longest sleep of a waiter, which may wait for something else than the end of an operation.
const SLEEP_MAX: Nanos = Nanos::from_millis(10);
/// Pauses before a waiter sleeps: an operation in the page cache or on a fast drive may end first.
const SPINS: u32 = 8;

/// A clock whose pauses last until an operation ends.
#[derive(Debug)]
pub struct EndsClock {
    /// Its time.
    pub clock: Arc<dyn Clock>,
    /// The operations.
    pub ends: Arc<Ends>,
}

impl Clock for EndsClock {
    fn now(&self) -> Nanos {
        self.clock.now()
    }

    fn happened(&self) -> u64 {
        self.ends.count()
    }

    fn pause(&self, idle: u32, until: Nanos) {
        self.pause_since(self.happened(), idle, until);
    }

    fn pause_since(&self, seen: u64, idle: u32, until: Nanos) {
        if idle < SPINS {
            return std::hint::spin_loop();
        }
        let left = (until - self.now()).min(SLEEP_MAX);
        let count = self.ends.count.lock().unwrap_or_else(PoisonError::into_inner);
        // It returns early if it likes: the caller polls either way.
        let _ = self.ends.more.wait_timeout_while(count, left.duration(), |count| *count == seen);
    }
}

/// Executes operations on files; see the module.
pub struct FileExecutor {
    targets: Vec<FileTarget>,
    reach: Reach,
    ends: Arc<Ends>,
    clock: Arc<dyn Clock>,
    workers: Vec<Handle>,
    grants: Vec<GrantEpoch>,
    /// Name in reports: how it was started.
    name: &'static str,
    /// A thread panicked, whose transfers may still be in the kernel: there is no proof any more.
    is_lost: bool,
    /// The GPU whose streams wait for events of the ring, and read its tables.
    #[cfg(feature = "cuda")]
    gpu: Option<Arc<crate::cuda::CudaDevice>>,
}

/// Message of a thread about its ring.
type Made = io::Result<Option<Lesser>>;

/// A thread, and its waker.
struct Handle {
    thread: JoinHandle<()>,
    wake: Arc<Wake>,
}

impl FileExecutor {
    /// Creates an executor over the files of devices 0, 1, ... in this order;
    /// [`IoExecutor::start`] starts its threads. `clock` must be the ring's: the deadline of
    /// [`IoExecutor::stop`] and the timeouts of transfers are measured with it. `ends` counts the
    /// operations.
    #[must_use]
    pub fn new(
        targets: Vec<FileTarget>,
        reach: Reach,
        ends: Arc<Ends>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            targets,
            reach,
            ends,
            clock,
            workers: Vec::new(),
            grants: Vec::new(),
            name: NAME,
            is_lost: false,
            #[cfg(feature = "cuda")]
            gpu: None,
        }
    }

    /// Allocates rings, events and tables in memory that this GPU reaches, too: for a KV pool in
    /// its memory, to and from which its streams copy.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn beside(mut self, gpu: Arc<crate::cuda::CudaDevice>) -> Self {
        self.gpu = Some(gpu);
        self
    }

    fn failed(cause: impl Into<String>) -> ExecutorError {
        ExecutorError::Failed { executor: NAME, cause: cause.into() }
    }

    /// Starts the thread of a warp. It says when its ring is made, and of what kind.
    fn begin(&self, args: Args, warp: u32) -> io::Result<(Handle, Receiver<Made>)> {
        let wake = Arc::new(Wake::new()?);
        let (said, says) = channel();
        let Self { targets, reach, ends, clock, .. } = self;
        let (targets, reach) = (targets.clone(), reach.clone());
        let (ends, clock, wake_of_it) = (ends.clone(), clock.clone(), wake.clone());
        let around = move |device: u32| {
            let target = targets.get(device as usize).cloned();
            let target = target.ok_or_else(|| io::Error::other("it has too few files"))?;
            Ok(Around { target, reach, ends, clock, wake: wake_of_it })
        };
        let run = move || {
            // SAFETY: the caller of `start` promised that everything `args` points to lives until
            // `stop` succeeds, which joins this thread; and no other thread has this warp.
            let made = unsafe { Worker::new(args, warp, around) };
            match made {
                Ok((worker, lesser)) => {
                    // If nobody listens, another thread could not be started: the stop word is set.
                    let _ = said.send(Ok(lesser));
                    worker.run();
                }
                Err(error) => {
                    let _ = said.send(Err(error));
                }
            }
        };
        let thread = thread::Builder::new().name(format!("gio-file-{warp}")).spawn(run)?;
        Ok((Handle { thread, wake }, says))
    }

    fn start_all(&mut self, args: Args) -> Made {
        let mut says = Vec::new();
        for warp in 0..args.warp_count {
            let (worker, made) = self.begin(args, warp)?;
            self.workers.push(worker);
            says.push(made);
        }
        let mut lesser = None;
        for made in says {
            lesser = lesser.or(made.recv().map_err(|_| io::Error::other("its thread ended"))??);
        }
        Ok(lesser)
    }

    /// Ends what was started, if not all of it could be. Nothing was submitted yet.
    fn give_up(&mut self, args: Args) {
        // SAFETY: as in `begin`: the ring's stop word.
        unsafe { words::set_stop(args.stop) };
        for worker in self.workers.drain(..) {
            worker.wake.wake();
            if worker.thread.join().is_err() {
                tracing::error!("a thread of the file executor panicked");
            }
        }
    }
}

impl IoExecutor for FileExecutor {
    fn name(&self) -> &'static str {
        self.name
    }

    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            // Its address for the GPU is good in this process as well (CUDA Driver API, section
            // Unified Addressing): threads and streams use the same.
            return gpu.pinned_shared(NAME, len);
        }
        memory::alloc(NAME, len)
    }

    fn address(&self, place: &Place) -> Option<u64> {
        place.host
    }

    fn start(&mut self, args: Args, grants: &[GrantEpoch]) -> Result<(), ExecutorError> {
        if self.is_lost {
            return Err(Self::failed(PANICKED));
        }
        if !self.workers.is_empty() {
            return Err(Self::failed("it is running already; stop it first"));
        }
        if args.clock != 0 {
            return Err(Self::failed("files have no virtual time; take another executor"));
        }
        self.name = match self.start_all(args) {
            Ok(None) => NAME,
            Ok(Some(Lesser { name, cause, remedy })) => {
                tracing::warn!(%cause, "{name}: {remedy}");
                name
            }
            Err(error) => {
                self.give_up(args);
                let hint = remedy(&error).unwrap_or("take executor host");
                return Err(Self::failed(format!("setting up io_uring failed: {error}; {hint}")));
            }
        };
        self.grants = grants.to_vec();
        tracing::debug!(threads = args.warp_count, "threads run operations on files");
        Ok(())
    }

    fn submitted(&mut self, _tail: u32, _sms: u32) -> Result<(), ExecutorError> {
        self.workers.iter().for_each(|worker| worker.wake.wake());
        Ok(())
    }

    /// Progress happens on other threads; checks that they run.
    fn poll(&mut self) -> Result<Progress, ExecutorError> {
        if self.workers.is_empty() {
            return Err(Self::failed("it was not started, or stopped; start it (again)"));
        }
        match self.workers.iter().position(|worker| worker.thread.is_finished()) {
            None => Ok(Progress::Idle),
            Some(warp) => Err(Self::failed(format!("thread gio-file-{warp} ended by itself"))),
        }
    }

    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        let mut waiter = Waiter::new(&*self.clock, deadline);
        while !self.workers.iter().all(|worker| worker.thread.is_finished()) {
            self.workers.iter().for_each(|worker| worker.wake.wake());
            if !waiter.wait() {
                return Err(ExecutorError::StopTimeout { executor: NAME });
            }
        }
        for worker in self.workers.drain(..) {
            self.is_lost |= worker.thread.join().is_err();
        }
        if self.is_lost {
            return Err(Self::failed(PANICKED));
        }
        // SAFETY: every thread has ended, after it has seen the results of all its transfers.
        Ok(unsafe { Quiesced::assert(std::mem::take(&mut self.grants)) })
    }
}

impl fmt::Debug for FileExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileExecutor")
            .field("targets", &self.targets)
            .field("threads", &self.workers.len())
            .finish_non_exhaustive()
    }
}
