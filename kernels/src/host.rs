#![allow(unsafe_code, reason = "runs the kernel on memory that the ring laid out")]
//! Runs the kernel's warps on host threads.

use std::{
    convert::Infallible,
    fmt,
    num::NonZero,
    ops::Range,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    thread::{self, JoinHandle, Thread},
    time::Duration,
};

use gio_uring::{ExecutorError, IoExecutor, Progress, SharedMemory, abi::Args};
use nvme_driver::{Clock, GrantEpoch, Nanos, Place, Quiesced, Waiter};

use crate::{ffi, memory};

/// Name in reports.
const NAME: &str = "host";

/// Idle turns that a thread spins before it sleeps. It does not yield: on a loaded machine,
/// yielding gives up the processor for milliseconds.
const SPINS: u32 = 32;
/// First sleep while commands are outstanding: short compared with device latency times queue
/// depth ...
const NAP: Duration = Duration::from_micros(20);
/// ... each one is longer than the last by this fraction, which is then the latency's share of the
/// time waited: a disk may take longer than a second for a write ...
const SLOWLY: u32 = 16;
/// ... up to this.
const NAP_MAX: Duration = Duration::from_millis(1);
/// Timer slack: maximum delay of a wake-up to coalesce it with others. Linux's default is 50 us.
const SLACK_NS: u64 = 1;
/// Sleep while nothing is in progress; a submission ends it.
const REST: Duration = Duration::from_millis(100);

/// Number of threads that run the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostOptions {
    /// Threads; `None` means half of the processors. At most one per queue.
    pub threads: Option<usize>,
}

/// A part of the I/O kernel, run by repeated calls until one returns `None`. Each returns whether
/// it found something to do.
pub type Turns = Box<dyn FnMut() -> Option<bool> + Send>;

/// Hands turns to a thread that exists, and returns it, to be unparked for new work. Returns `None`
/// if it has ended.
pub type Lend = Box<dyn Fn(Turns) -> Option<Thread> + Send>;

/// Runs the I/O kernel on threads of this process, each with its share of the queues.
///
/// An idle thread spins briefly, then sleeps until the next submission.
pub struct HostExecutor {
    options: HostOptions,
    /// Threads to use instead of new ones, if there are any.
    lent: Vec<Lend>,
    clock: Arc<dyn Clock>,
    threads: Vec<Worker>,
    /// True between a successful `start` and a successful `stop`.
    running: bool,
    grants: Vec<GrantEpoch>,
}

/// A thread that runs a part of the kernel.
struct Worker {
    thread: Thread,
    /// Disconnected when the thread no longer runs the kernel.
    works: Receiver<Infallible>,
    /// `None` if it is lent.
    own: Option<JoinHandle<()>>,
}

impl Worker {
    fn has_ended(&self) -> bool {
        matches!(self.works.try_recv(), Err(TryRecvError::Disconnected))
    }
}

/// Warps that one thread runs.
struct Share {
    args: Args,
    warps: Range<u32>,
    /// Opens when every thread has been started, and is dropped if one could not be.
    gate: Option<Receiver<()>>,
    _works: Sender<Infallible>,
}

impl Share {
    /// Runs each warp for a few rounds. Returns `None` if the kernel was stopped.
    fn turn(&mut self) -> Option<u32> {
        if let Some(gate) = &self.gate {
            match gate.try_recv() {
                Ok(()) => self.gate = None,
                Err(TryRecvError::Empty) => return Some(0),
                Err(TryRecvError::Disconnected) => return None,
            }
        }
        let Range { start, end } = self.warps;
        // SAFETY: the caller of `start` promised that everything `args` points to lives until
        // `stop` succeeds, which waits for the end of this share; and no other share has these
        // warps.
        let result = unsafe { ffi::run(&self.args, start, end - start) };
        (result & ffi::RUN_FINISHED == 0).then_some(result)
    }

    /// Runs the share on a thread of its own.
    fn run(mut self) {
        // Best effort: without it, sleeps take longer.
        let _ = rustix::thread::set_current_timer_slack(NonZero::new(SLACK_NS));
        let (mut idle, mut nap) = (0, NAP);
        while let Some(result) = self.turn() {
            if result & ffi::RUN_MOVED != 0 {
                (idle, nap) = (0, NAP);
                continue;
            }
            idle += 1;
            if idle <= SPINS {
                std::hint::spin_loop();
            } else if result & ffi::RUN_IDLE != 0 {
                thread::park_timeout(REST);
            } else {
                thread::park_timeout(nap);
                nap = (nap + nap / SLOWLY).min(NAP_MAX);
            }
        }
    }
}

impl HostExecutor {
    /// Creates an executor with threads of its own; [`IoExecutor::start`] starts it. `clock` must
    /// be the ring's clock: the deadline of [`IoExecutor::stop`] is measured with it.
    #[must_use]
    pub fn new(options: HostOptions, clock: Arc<dyn Clock>) -> Self {
        let (lent, threads, grants) = (Vec::new(), Vec::new(), Vec::new());
        Self { options, lent, clock, threads, running: false, grants }
    }

    /// Same as [`HostExecutor::new`], on threads that also do something else, such as those of
    /// software controllers: a command and its result then change threads nowhere. They must keep
    /// calling what they are given.
    #[must_use]
    pub fn on_threads(lent: Vec<Lend>, clock: Arc<dyn Clock>) -> Self {
        let options = HostOptions { threads: Some(lent.len()) };
        Self { lent, ..Self::new(options, clock) }
    }

    /// Returns the number of threads for `warps` queues.
    fn thread_count(&self, warps: u32) -> u32 {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let wanted = self.options.threads.unwrap_or(processors / 2);
        u32::try_from(wanted).unwrap_or(u32::MAX).clamp(1, warps.max(1))
    }

    /// Starts one thread.
    fn begin(
        &self,
        index: usize,
        mut share: Share,
        works: Receiver<Infallible>,
    ) -> Result<Worker, ExecutorError> {
        let Some(lend) = self.lent.get(index) else {
            let thread = thread::Builder::new().name(format!("gio-host-{index}"));
            let own = thread
                .spawn(move || share.run())
                .map_err(|error| Self::failed(format!("thread {index} did not start: {error}")))?;
            return Ok(Worker { thread: own.thread().clone(), works, own: Some(own) });
        };
        let turns = move || share.turn().map(|result| result & ffi::RUN_MOVED != 0);
        match lend(Box::new(turns)) {
            Some(thread) => Ok(Worker { thread, works, own: None }),
            None => Err(Self::failed("the software controllers' thread that runs it has ended")),
        }
    }

    fn wake(&self) {
        self.threads.iter().for_each(|worker| worker.thread.unpark());
    }

    fn failed(cause: impl Into<String>) -> ExecutorError {
        ExecutorError::Failed { executor: NAME, cause: cause.into() }
    }

    /// Checks that every thread runs its share: without the stop word, only a panic ends one.
    fn check(&self) -> Result<(), ExecutorError> {
        if !self.running {
            return Err(Self::failed("it was not started, or stopped; start it (again)"));
        }
        match self.threads.iter().find(|worker| worker.has_ended()) {
            None => Ok(()),
            Some(worker) => {
                let name = worker.thread.name().unwrap_or("without a name");
                Err(Self::failed(format!("thread {name} ended by itself")))
            }
        }
    }
}

impl IoExecutor for HostExecutor {
    fn name(&self) -> &'static str {
        NAME
    }

    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        memory::alloc(NAME, len)
    }

    fn address(&self, place: &Place) -> Option<u64> {
        place.host
    }

    fn start(&mut self, args: Args, grants: &[GrantEpoch]) -> Result<(), ExecutorError> {
        if self.running {
            return Err(Self::failed("it is running already; stop it first"));
        }
        let threads = self.thread_count(args.warp_count);
        let first = |thread: u32| {
            (u64::from(args.warp_count) * u64::from(thread) / u64::from(threads)) as u32
        };
        let mut gates = Vec::new();
        for index in 0..threads {
            let ((open, gate), (working, works)) = (channel(), channel());
            let warps = first(index)..first(index + 1);
            let share = Share { args, warps, gate: Some(gate), _works: working };
            match self.begin(index as usize, share, works) {
                Ok(worker) => self.threads.push(worker),
                Err(error) => {
                    gates.clear();
                    self.wake();
                    join(&mut self.threads);
                    return Err(error);
                }
            }
            gates.push(open);
        }
        for open in gates {
            // A receiver is gone only if its thread ended, which `check` reports.
            let _ = open.send(());
        }
        self.wake();
        self.running = true;
        self.grants = grants.to_vec();
        tracing::debug!(threads, warps = args.warp_count, "host threads run the I/O kernel");
        Ok(())
    }

    fn submitted(&mut self, _tail: u32, _sms: u32) -> Result<(), ExecutorError> {
        self.check()?;
        self.wake();
        Ok(())
    }

    fn poll(&mut self) -> Result<Progress, ExecutorError> {
        self.check()?;
        // Progress happens on other threads.
        Ok(Progress::Idle)
    }

    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        let mut waiter = Waiter::new(&*self.clock, deadline);
        while !self.threads.iter().all(Worker::has_ended) {
            self.wake();
            if !waiter.wait() {
                return Err(ExecutorError::StopTimeout { executor: NAME });
            }
        }
        join(&mut self.threads);
        self.running = false;
        // SAFETY: every share that used the grants has ended.
        Ok(unsafe { Quiesced::assert(std::mem::take(&mut self.grants)) })
    }
}

/// Joins own threads that have ended or are about to.
fn join(threads: &mut Vec<Worker>) {
    for own in threads.drain(..).filter_map(|worker| worker.own) {
        if own.join().is_err() {
            tracing::error!("a host thread of the I/O kernel panicked");
        }
    }
}

impl fmt::Debug for HostExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostExecutor")
            .field("options", &self.options)
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}
