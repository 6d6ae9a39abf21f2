#![allow(unsafe_code, reason = "runs the kernel on memory that the ring laid out")]
//! Runs the kernel's warps on host threads.

use std::{
    fmt,
    num::NonZero,
    ops::Range,
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    thread::{self, JoinHandle},
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

/// Runs the I/O kernel on threads of this process, each with its share of the queues.
///
/// An idle thread spins briefly, then sleeps until the next submission.
pub struct HostExecutor {
    options: HostOptions,
    clock: Arc<dyn Clock>,
    threads: Vec<JoinHandle<()>>,
    /// True between a successful `start` and a successful `stop`.
    running: bool,
    grants: Vec<GrantEpoch>,
}

/// Warps that one thread runs.
struct Share {
    args: Args,
    warps: Range<u32>,
}

impl Share {
    /// Runs each warp for a few rounds. Returns `None` if the kernel was stopped.
    fn turn(&self) -> Option<u32> {
        let Range { start, end } = self.warps;
        // SAFETY: the caller of `start` promised that everything `args` points to lives until
        // `stop` succeeds, which waits for the end of this share; and no other share has these
        // warps.
        let result = unsafe { ffi::run(&self.args, start, end - start) };
        (result & ffi::RUN_FINISHED == 0).then_some(result)
    }

    /// Runs the share, once every thread has been started. The sender is dropped if one could not
    /// be.
    fn run(&self, all_started: &Receiver<()>) {
        if all_started.recv().is_err() {
            return;
        }
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
    /// Creates an executor; [`IoExecutor::start`] starts it. `clock` must
    /// be the ring's clock: the deadline of [`IoExecutor::stop`] is measured with it.
    #[must_use]
    pub fn new(options: HostOptions, clock: Arc<dyn Clock>) -> Self {
        Self { options, clock, threads: Vec::new(), running: false, grants: Vec::new() }
    }

    /// Returns the number of threads for `warps` queues.
    fn thread_count(&self, warps: u32) -> u32 {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let wanted = self.options.threads.unwrap_or(processors / 2);
        u32::try_from(wanted).unwrap_or(u32::MAX).clamp(1, warps.max(1))
    }

    fn wake(&self) {
        self.threads.iter().for_each(|thread| thread.thread().unpark());
    }

    fn failed(cause: impl Into<String>) -> ExecutorError {
        ExecutorError::Failed { executor: NAME, cause: cause.into() }
    }

    /// Checks that every thread runs its share: without the stop word, only a panic ends one.
    fn check(&self) -> Result<(), ExecutorError> {
        if !self.running {
            return Err(Self::failed("it was not started, or stopped; start it (again)"));
        }
        match self.threads.iter().find(|thread| thread.is_finished()) {
            None => Ok(()),
            Some(thread) => {
                let name = thread.thread().name().unwrap_or("without a name");
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
        let mut starts = Vec::new();
        for index in 0..threads {
            let (start, all_started) = channel();
            let share = Share { args, warps: first(index)..first(index + 1) };
            let thread = thread::Builder::new().name(format!("gio-host-{index}"));
            match thread.spawn(move || share.run(&all_started)) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    starts.clear();
                    join(&mut self.threads);
                    return Err(Self::failed(format!("thread {index} did not start: {error}")));
                }
            }
            starts.push(start);
        }
        for start in starts {
            // A receiver is gone only if its thread ended, which `check` reports.
            let _ = start.send(());
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
        while !self.threads.iter().all(JoinHandle::is_finished) {
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

/// Joins threads that have ended or are about to.
fn join(threads: &mut Vec<JoinHandle<()>>) {
    for thread in threads.drain(..) {
        if thread.join().is_err() {
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
