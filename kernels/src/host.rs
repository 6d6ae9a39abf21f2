#![allow(unsafe_code, reason = "runs the kernel on memory that the ring laid out")]
//! Host threads as warps.

use std::{
    num::NonZero,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use gio_uring::{ExecutorError, IoExecutor, Progress, SharedMemory, abi::Args};
use nvme_driver::{Clock, GrantEpoch, Nanos, Place, Quiesced};

use crate::{ffi, memory};

/// What reports call it.
const NAME: &str = "host";

/// Fruitless turns that a thread spins before it sleeps. It does not yield: where others want the
/// processor, that gives it away for milliseconds.
const SPINS: u32 = 32;
/// Sleep while commands are outstanding: short against a device's latency times its queue depth.
const NAP: Duration = Duration::from_micros(20);
/// How late the kernel may end a sleep, to end several at once. Its default is 50 microseconds.
const SLACK_NS: u64 = 1;
/// Sleep while nothing is in progress; a submission ends it.
const REST: Duration = Duration::from_millis(100);

/// How many threads run the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostOptions {
    /// Threads; `None` is half of the processors. Never more than there are queues.
    pub threads: Option<usize>,
}

/// Runs the I/O kernel on threads of this process, each with its share of the queues.
///
/// A thread with nothing to do spins and then sleeps until the next submission.
#[derive(Debug)]
pub struct HostExecutor {
    options: HostOptions,
    clock: Arc<dyn Clock>,
    threads: Vec<JoinHandle<()>>,
    /// Between a successful `start` and a successful `stop`.
    running: bool,
    grants: Vec<GrantEpoch>,
}

impl HostExecutor {
    /// An executor that has not been started. `clock` must be the one given to the ring: the
    /// deadline of [`IoExecutor::stop`] is measured with it.
    #[must_use]
    pub fn new(options: HostOptions, clock: Arc<dyn Clock>) -> Self {
        Self { options, clock, threads: Vec::new(), running: false, grants: Vec::new() }
    }

    /// Threads for `warps` queues.
    fn thread_count(&self, warps: u32) -> u32 {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let wanted = self.options.threads.unwrap_or(processors / 2);
        u32::try_from(wanted).unwrap_or(u32::MAX).clamp(1, warps.max(1))
    }

    fn failed(cause: impl Into<String>) -> ExecutorError {
        ExecutorError::Failed { executor: NAME, cause: cause.into() }
    }

    /// A thread ends only after the stop word: one that ended before has panicked.
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

/// Runs warps `first .. first + count` until the kernel was stopped.
fn work(args: &Args, first: u32, count: u32) {
    // Without that, sleeps are longer.
    let _ = rustix::thread::set_current_timer_slack(NonZero::new(SLACK_NS));
    let mut idle = 0;
    loop {
        // SAFETY: `start` got `args` with the promise that what they point to lives until `stop`
        // succeeded, which joins this thread; and no other thread has these warps.
        let result = unsafe { ffi::run(args, first, count) };
        if result & ffi::RUN_FINISHED != 0 {
            return;
        }
        if result & ffi::RUN_MOVED != 0 {
            idle = 0;
            continue;
        }
        idle += 1;
        if idle <= SPINS {
            std::hint::spin_loop();
        } else if result & ffi::RUN_IDLE != 0 {
            thread::park_timeout(REST);
        } else {
            thread::park_timeout(NAP);
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
        // Nothing runs if one of them cannot be started: they begin when `go` is dropped for good.
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
            // A receiver is gone only if its thread is, which `check` reports.
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
        // What moves, moves on other threads.
        Ok(Progress::Idle)
    }

    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        let mut idle = 0;
        while !self.threads.iter().all(JoinHandle::is_finished) {
            for thread in &self.threads {
                thread.thread().unpark();
            }
            if self.clock.now() >= deadline {
                return Err(ExecutorError::StopTimeout { executor: NAME });
            }
            self.clock.pause(idle, deadline);
            idle += 1;
        }
        join(&mut self.threads);
        self.running = false;
        // SAFETY: every thread that was given the grants has been joined.
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
