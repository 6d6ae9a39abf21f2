//! Threads that drive controllers in real time.

use std::{
    convert::Infallible,
    io,
    num::NonZero,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nvme_driver::{Clock, Nanos, join};

use crate::{emu::Emu, progress::Progress};

/// Commands that a controller may fetch before its thread steps the next controller.
const BUDGET: u32 = 64;
/// Idle rounds spent spinning.
const SPINS: u32 = 16;
/// First sleep after that. While nothing is in flight, each sleep is half as long again ...
const SLEEP_MIN: Duration = Duration::from_micros(20);
/// ... up to this ...
const SLEEP_SHORT: Duration = Duration::from_micros(100);
/// ... and from there, or while something is in flight, each one is longer than the last by this
/// fraction: writes to a slow disk take longer than a second ...
const SLOWLY: u32 = 16;
/// ... up to this, which bounds the latency of a doorbell: a store to memory wakes no thread.
/// Before that, the latency is a sixteenth of the idle time. With short sleeps only, an idle thread
/// would take 9 % of a core.
const SLEEP_MAX: Duration = Duration::from_millis(1);
/// Timer slack: how late the kernel may end a sleep. Its default is 50 microseconds.
const SLACK_NS: u64 = 1;

/// Steps controllers until it is dropped, which stops the threads and joins them
/// ([`nvme_driver::join`]).
///
/// Threads spin briefly, then sleep for 20 to 100 microseconds, and up to a millisecond after a
/// long idle time. They do not yield: on a busy machine that gives the CPU away for milliseconds.
/// If no controller of a thread is enabled, the thread sleeps until a register write wakes it.
///
/// While it exists, nothing else steps the controllers.
#[derive(Debug)]
pub struct EmuRunner {
    emus: Vec<Arc<Emu>>,
    workers: Vec<JoinHandle<()>>,
    /// Dropping them signals the threads to stop.
    running: Vec<Sender<Infallible>>,
}

impl EmuRunner {
    /// Starts stepping `emus` with the time of `clock`. Use at most one runner per controller.
    ///
    /// # Errors
    /// Fails if the operating system cannot create a thread.
    pub fn spawn(emus: Vec<Arc<Emu>>, clock: Arc<dyn Clock>) -> io::Result<Self> {
        // One per controller, but at most one less than the cores: the caller needs one, too.
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        Self::on_threads((cores - 1).max(1), emus, clock)
    }

    fn on_threads(threads: usize, emus: Vec<Arc<Emu>>, clock: Arc<dyn Clock>) -> io::Result<Self> {
        let count = threads.min(emus.len());
        let mut runner = Self { emus: emus.clone(), workers: Vec::new(), running: Vec::new() };
        for index in 0..count {
            let first = |index| emus.len() * index / count;
            let mine = emus[first(index)..first(index + 1)].to_vec();
            let (sender, running) = channel();
            let work = Worker { emus: mine.clone(), clock: clock.clone(), running };
            // An error drops `runner`, which ends the threads already started.
            let handle = thread::Builder::new()
                .name(format!("nvme-emu-{index}"))
                .spawn(move || work.run())?;
            for emu in &mine {
                emu.attach(Some(clock.clone()), Some(handle.thread().clone()));
            }
            // A register write may have come before it could wake the thread.
            handle.thread().unpark();
            runner.workers.push(handle);
            runner.running.push(sender);
        }
        Ok(runner)
    }
}

impl Drop for EmuRunner {
    fn drop(&mut self) {
        self.running.clear();
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            join(worker);
        }
        for emu in &self.emus {
            emu.attach(None, None);
        }
    }
}

struct Worker {
    emus: Vec<Arc<Emu>>,
    clock: Arc<dyn Clock>,
    /// Disconnected when the thread is to stop.
    running: Receiver<Infallible>,
}

impl Worker {
    fn run(self) {
        // Failure only makes sleeps longer.
        let _ = rustix::thread::set_current_timer_slack(NonZero::new(SLACK_NS));
        self.emus.iter().for_each(|emu| emu.set_exclusive(true));
        let mut idle = 0u32;
        let mut sleep = SLEEP_MIN;
        while !matches!(self.running.try_recv(), Err(TryRecvError::Disconnected)) {
            let now = self.clock.now();
            let all = self.round(now);
            if all.work > 0 {
                (idle, sleep) = (0, SLEEP_MIN);
                continue;
            }
            idle = idle.saturating_add(1);
            let asleep = !all.listening && all.outstanding == 0 && all.next_event.is_none();
            if asleep {
                // Only a register write, a fault plan or the end can bring work, and all unpark.
                thread::park();
            } else if idle <= SPINS {
                std::hint::spin_loop();
            } else {
                let event = all.next_event.map_or(sleep, |at| (at - now).duration());
                thread::park_timeout(sleep.min(event));
                let quickly = all.outstanding == 0 && sleep < SLEEP_SHORT;
                let more = if quickly { sleep / 2 } else { sleep / SLOWLY };
                sleep = (sleep + more).min(SLEEP_MAX);
            }
        }
        self.emus.iter().for_each(|emu| emu.set_exclusive(false));
        tracing::debug!(controllers = self.emus.len(), "a thread of software controllers ended");
    }

    fn round(&self, now: Nanos) -> Progress {
        let mut all = Progress::default();
        for emu in &self.emus {
            all.merge(emu.step(now, BUDGET));
        }
        all
    }
}

#[cfg(test)]
mod tests;
