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

use nvme_driver::{Clock, Nanos};

use crate::{emu::Emu, progress::Progress};

/// How a runner's threads behave.
#[derive(Debug, Clone, Copy)]
pub struct RunnerOptions {
    /// Threads; `None`: one per controller, but one less than there are cores, so that whoever
    /// waits for the controllers gets to run.
    pub threads: Option<NonZero<usize>>,
    /// Commands a controller may fetch before the next one of the same thread gets its turn.
    pub budget: u32,
    /// Fruitless rounds spent spinning.
    pub spins: u32,
    /// Fruitless rounds after that spent yielding.
    pub yields: u32,
    /// First sleep after that; each next one is half as long again ...
    pub nap_min: Duration,
    /// ... up to this. It bounds how late a doorbell is seen: nobody can tell us about one.
    pub nap_max: Duration,
}

impl Default for RunnerOptions {
    fn default() -> Self {
        Self {
            threads: None,
            budget: 64,
            spins: 16,
            yields: 128,
            nap_min: Duration::from_micros(20),
            nap_max: Duration::from_micros(100),
        }
    }
}

/// Steps controllers until it is dropped, which stops and joins the threads.
///
/// Threads spin a little, then yield, then sleep for 20 to 100 microseconds. When no controller of
/// a thread is enabled, the thread sleeps until a register write wakes it.
#[derive(Debug)]
pub struct EmuRunner {
    emus: Vec<Arc<Emu>>,
    workers: Vec<JoinHandle<()>>,
    /// Never sent on: dropping it is the signal to stop.
    stop: Vec<Sender<Infallible>>,
}

impl EmuRunner {
    /// Starts stepping `emus` with `clock`'s time. A controller should have one runner at most.
    ///
    /// # Errors
    /// When the operating system gives us no thread.
    pub fn spawn(emus: Vec<Arc<Emu>>, clock: Arc<dyn Clock>) -> io::Result<Self> {
        Self::with_options(emus, clock, RunnerOptions::default())
    }

    /// As [`EmuRunner::spawn`], with other habits.
    ///
    /// # Errors
    /// When the operating system gives us no thread.
    pub fn with_options(
        emus: Vec<Arc<Emu>>,
        clock: Arc<dyn Clock>,
        options: RunnerOptions,
    ) -> io::Result<Self> {
        let spare = thread::available_parallelism().map_or(1, |cores| cores.get() - 1).max(1);
        let wanted = options.threads.map_or(spare, NonZero::get);
        let count = wanted.min(emus.len());
        let mut runner = Self { emus: emus.clone(), workers: Vec::new(), stop: Vec::new() };
        for index in 0..count {
            let mine: Vec<_> = emus.iter().skip(index).step_by(count).cloned().collect();
            let (sender, stop) = channel();
            let ticks = clock.clone();
            let work = Worker { emus: mine.clone(), clock: ticks, options, stop };
            // An error drops `runner`, which ends the threads that did start.
            let handle = thread::Builder::new()
                .name(format!("nvme-emu-{index}"))
                .spawn(move || work.run())?;
            for emu in &mine {
                emu.attach(Some(clock.clone()), Some(handle.thread().clone()));
            }
            // A register write may have come before it could wake the thread.
            handle.thread().unpark();
            runner.workers.push(handle);
            runner.stop.push(sender);
        }
        Ok(runner)
    }

    /// Number of threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len()
    }
}

impl Drop for EmuRunner {
    fn drop(&mut self) {
        self.stop.clear();
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            if worker.join().is_err() {
                tracing::error!("a controller's thread panicked; its controllers have stopped");
            }
        }
        for emu in &self.emus {
            emu.attach(None, None);
        }
    }
}

struct Worker {
    emus: Vec<Arc<Emu>>,
    clock: Arc<dyn Clock>,
    options: RunnerOptions,
    stop: Receiver<Infallible>,
}

impl Worker {
    fn run(self) {
        let mut idle = 0u32;
        let mut nap = self.options.nap_min;
        while matches!(self.stop.try_recv(), Err(TryRecvError::Empty)) {
            let now = self.clock.now();
            let all = self.round(now);
            if all.work > 0 {
                (idle, nap) = (0, self.options.nap_min);
                continue;
            }
            idle = idle.saturating_add(1);
            let asleep = !all.listening && all.outstanding == 0 && all.next_event.is_none();
            if asleep {
                // Only a register write, a fault plan or the end can bring work, and all unpark.
                thread::park();
            } else if idle <= self.options.spins {
                std::hint::spin_loop();
            } else if idle <= self.options.spins + self.options.yields {
                thread::yield_now();
            } else {
                let event = all.next_event.map_or(nap, |at| (at - now).duration());
                thread::park_timeout(nap.min(event));
                if all.outstanding == 0 {
                    nap = (nap + nap / 2).min(self.options.nap_max);
                }
            }
        }
    }

    fn round(&self, now: Nanos) -> Progress {
        let mut all = Progress::default();
        for emu in &self.emus {
            all.merge(emu.step(now, self.options.budget));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use nvme_driver::MonotonicClock;

    use super::*;
    use crate::{EmuConfig, EmuDomain};

    fn emus(count: usize) -> Vec<Arc<Emu>> {
        let domain = EmuDomain::new("test");
        let one = |index| Emu::new(domain.clone(), EmuConfig::new(format!("emu{index}"))).unwrap();
        (0..count).map(one).collect()
    }

    #[test]
    fn stops_when_dropped_even_while_parked() {
        let emus = emus(3);
        for threads in [1, 2, 8] {
            let options =
                RunnerOptions { threads: NonZero::new(threads), ..RunnerOptions::default() };
            let clock = Arc::new(MonotonicClock::default());
            let runner = EmuRunner::with_options(emus.clone(), clock, options).unwrap();
            assert_eq!(runner.threads(), threads.min(3));
            // Disabled controllers: the threads are parked by now, or will be.
            thread::sleep(Duration::from_millis(5));
            drop(runner);
        }
        for emu in emus {
            assert_eq!(Arc::strong_count(&emu), 1, "the threads have let go");
        }
    }

    #[test]
    fn without_controllers_there_are_no_threads() {
        let runner = EmuRunner::spawn(Vec::new(), Arc::new(MonotonicClock::default())).unwrap();
        assert_eq!(runner.threads(), 0);
    }

    #[test]
    fn register_accesses_are_not_starved_by_steps() {
        let emus = emus(1);
        let clock = Arc::new(MonotonicClock::default());
        let runner = EmuRunner::spawn(emus.clone(), clock.clone()).unwrap();
        let before = clock.now();
        for _ in 0..1000 {
            let _ = emus[0].read32(0x1C);
            emus[0].write32(0x14, 0);
        }
        assert!(clock.now() - before < Nanos::from_millis(5000));
        drop(runner);
    }
}
