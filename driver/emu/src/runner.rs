//! Threads that drive controllers in real time.

use std::{
    fmt, io,
    num::NonZero,
    sync::{
        Arc, Weak,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    thread::{self, JoinHandle, Thread},
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
/// ([`nvme_driver::join`]). They may run other work in between ([`EmuThread::host`]).
///
/// Threads spin briefly, then sleep for 20 to 100 microseconds, and up to a millisecond after a
/// long idle time. They do not yield: on a busy machine that gives the CPU away for milliseconds.
/// If no controller of a thread is enabled, and it has no guest, the thread sleeps until a register
/// write wakes it.
///
/// While it exists, nothing else steps the controllers.
#[derive(Debug)]
pub struct EmuRunner {
    emus: Vec<Arc<Emu>>,
    workers: Vec<JoinHandle<()>>,
    /// Dropping them signals the threads to stop.
    guests: Vec<Arc<Sender<Guest>>>,
}

/// Work that a controller's thread does between steps, until it returns `None`. Returns whether it
/// found something to do.
pub type Guest = Box<dyn FnMut() -> Option<bool> + Send>;

/// A thread of an [`EmuRunner`], which it does not keep alive.
#[derive(Clone)]
pub struct EmuThread {
    guests: Weak<Sender<Guest>>,
    thread: Thread,
}

impl EmuThread {
    /// Hands `guest` to the thread, and returns the thread to be unparked for new work. Returns
    /// `None`, and drops `guest`, if the thread has ended.
    #[must_use]
    pub fn host(&self, guest: Guest) -> Option<Thread> {
        self.guests.upgrade()?.send(guest).ok()?;
        self.thread.unpark();
        Some(self.thread.clone())
    }
}

impl fmt::Debug for EmuThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EmuThread({:?})", self.thread.name())
    }
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
        let mut runner = Self { emus: emus.clone(), workers: Vec::new(), guests: Vec::new() };
        for index in 0..count {
            // In order, as the I/O kernel's queues are: a guest then has its own controllers here.
            let first = |index| emus.len() * index / count;
            let mine = emus[first(index)..first(index + 1)].to_vec();
            let (sender, inbox) = channel();
            let ticks = clock.clone();
            let work = Worker { emus: mine.clone(), clock: ticks, inbox, guests: Vec::new() };
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
            runner.guests.push(Arc::new(sender));
        }
        Ok(runner)
    }

    /// Returns the threads.
    #[must_use]
    pub fn threads(&self) -> Vec<EmuThread> {
        let threads = self.guests.iter().zip(&self.workers);
        let one = |(guests, worker): (_, &JoinHandle<()>)| EmuThread {
            guests: Arc::downgrade(guests),
            thread: worker.thread().clone(),
        };
        threads.map(one).collect()
    }
}

impl Drop for EmuRunner {
    fn drop(&mut self) {
        self.guests.clear();
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
    inbox: Receiver<Guest>,
    guests: Vec<Guest>,
}

impl Worker {
    fn run(mut self) {
        // Failure only makes sleeps longer.
        let _ = rustix::thread::set_current_timer_slack(NonZero::new(SLACK_NS));
        self.emus.iter().for_each(|emu| emu.set_exclusive(true));
        let mut idle = 0u32;
        let mut sleep = SLEEP_MIN;
        loop {
            match self.inbox.try_recv() {
                Ok(guest) => self.guests.push(guest),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => break,
            }
            let now = self.clock.now();
            let all = self.round(now);
            if all.work > 0 {
                (idle, sleep) = (0, SLEEP_MIN);
                continue;
            }
            idle = idle.saturating_add(1);
            let asleep = !all.listening && all.outstanding == 0 && all.next_event.is_none();
            // Guests have times of their own, such as those of commands that nobody answers.
            if asleep && self.guests.is_empty() {
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

    fn round(&mut self, now: Nanos) -> Progress {
        let mut all = Progress::default();
        // First: what they submit is then fetched in the same round.
        self.guests.retain_mut(|guest| match guest() {
            Some(moved) => {
                all.work += u32::from(moved);
                true
            }
            None => false,
        });
        for emu in &self.emus {
            all.merge(emu.step(now, BUDGET));
        }
        all
    }
}

#[cfg(test)]
mod tests;
