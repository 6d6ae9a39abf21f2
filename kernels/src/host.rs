#![allow(unsafe_code, reason = "runs the kernel on memory that the ring laid out")]
//! Runs the kernel's warps on host threads.

use std::{
    num::NonZero,
    sync::Arc,
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
#[derive(Debug)]
pub struct HostExecutor {
    options: HostOptions,
    clock: Arc<dyn Clock>,
    threads: Vec<JoinHandle<()>>,
    /// True between a successful `start` and a successful `stop`.
    running: bool,
    grants: Vec<GrantEpoch>,
}

impl HostExecutor {
    /// Creates an executor; [`IoExecutor::start`] starts it. `clock` must be the ring's clock: the
    /// deadline of [`IoExecutor::stop`] is measured with it.
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

    fn failed(cause: impl Into<String>) -> ExecutorError {
        ExecutorError::Failed { executor: NAME, cause: cause.into() }
    }

    /// Checks that no thread has panicked: without the stop word, a thread ends in no other way.
    fn check(&self) -> Result<(), ExecutorError> {
        if !self.running {
            return Err(Self::failed("it was not started, or stopped; start it (again)"));
        }
        match self.threads.iter().position(JoinHandle::is_finished) {
            None => Ok(()),
            Some(index) => Err(Self::failed(format!("thread gio-host-{index} ended by itself"))),
        }
    }
}

/// Runs warps `first .. first + count` until the kernel is stopped.
fn work(args: &Args, first: u32, count: u32) {
    // Best effort: without it, sleeps take longer.
    let _ = rustix::thread::set_current_timer_slack(NonZero::new(SLACK_NS));
    let (mut idle, mut nap) = (0, NAP);
    loop {
        // SAFETY: the caller of `start` promised that everything `args` points to lives until
        // `stop` succeeds, which joins this thread; and no other thread has these warps.
        let result = unsafe { ffi::run(args, first, count) };
        if result & ffi::RUN_FINISHED != 0 {
            return;
        }
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
        // Nothing runs if any thread fails to start: they wait on `go`, and exit if it is dropped.
        let mut gates = Vec::new();
        for index in 0..threads {
            let (go, gate) = std::sync::mpsc::channel::<()>();
            let (begin, end) = (first(index), first(index + 1));
            let body = move || {
                if gate.recv().is_ok() {
                    work(&args, begin, end - begin);
                }
            };
            let thread = thread::Builder::new().name(format!("gio-host-{index}")).spawn(body);
            match thread {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    gates.clear();
                    drop(go);
                    join(&mut self.threads);
                    return Err(Self::failed(format!("thread {index} did not start: {error}")));
                }
            }
            gates.push(go);
        }
        for go in gates {
            // A receiver is gone only if its thread ended, which `check` reports.
            let _ = go.send(());
        }
        self.running = true;
        self.grants = grants.to_vec();
        tracing::debug!(threads, warps = args.warp_count, "host threads run the I/O kernel");
        Ok(())
    }

    fn submitted(&mut self, _tail: u32, _sms: u32) -> Result<(), ExecutorError> {
        self.check()?;
        for thread in &self.threads {
            thread.thread().unpark();
        }
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
            for thread in &self.threads {
                thread.thread().unpark();
            }
            if !waiter.wait() {
                return Err(ExecutorError::StopTimeout { executor: NAME });
            }
        }
        join(&mut self.threads);
        self.running = false;
        // SAFETY: every thread that used the grants has been joined.
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
