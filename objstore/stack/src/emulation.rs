//! Software controllers, and what runs them.

use std::sync::{Arc, OnceLock, Weak};

use nvme_driver::{Clock, MonotonicClock, Nanos};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, SimClock};

use crate::{error::StackError, gpu::Gpu};

/// Queue pairs that a software controller offers.
pub const EMU_QUEUES: u16 = 64;
/// Maximum entries of a software controller's queue (MQES).
pub const EMU_DEPTH: u32 = 1024;

/// Most commands that a wait has a software controller fetch before it looks for its own again.
const BUDGET: u32 = 64;

/// The clock of devices and store.
#[derive(Debug, Clone)]
pub(crate) enum Time {
    /// Real time.
    Real(Arc<dyn Clock>),
    /// Waiting on the clock runs them.
    Simulated(Arc<SimClock>),
}

impl Time {
    pub(crate) fn clock(&self) -> Arc<dyn Clock> {
        match self {
            Self::Real(clock) => clock.clone(),
            Self::Simulated(clock) => clock.clone(),
        }
    }
}

impl Default for Time {
    fn default() -> Self {
        Self::Real(Arc::new(MonotonicClock::default()))
    }
}

/// Software controllers, and the threads that run them, if there are any. It outlives the driver's
/// controllers: one that is dropped shuts down, which needs these.
#[derive(Debug)]
pub(crate) struct Emulation {
    runner: OnceLock<EmuRunner>,
    pub(crate) emus: Vec<Arc<Emu>>,
    /// Their address space, which reaches memory of the GPU, too.
    pub(crate) domain: Arc<EmuDomain>,
    time: Time,
}

impl Emulation {
    /// Makes software controllers, in an address space of this name. In real time they run while
    /// the driver waits for them ([`Emulation::clock`]), until [`Emulation::run`].
    ///
    /// # Errors
    /// Returns [`StackError::Emu`].
    pub(crate) fn new(
        configs: Vec<EmuConfig>,
        name: String,
        time: &Time,
        gpu: Option<&Gpu>,
    ) -> Result<Self, StackError> {
        let domain = match gpu {
            Some(gpu) => EmuDomain::with_copies(name, gpu.copies()),
            None => EmuDomain::new(name),
        };
        let emus = configs.into_iter().map(|config| {
            // One more than offered: the driver keeps one I/O queue for itself.
            let io_queues_max = EMU_QUEUES + 1;
            Emu::new(domain.clone(), EmuConfig { io_queues_max, mqes: EMU_DEPTH as u16, ..config })
        });
        let emus = emus.collect::<Result<Vec<_>, _>>()?;
        if let Time::Simulated(clock) = time {
            emus.iter().for_each(|emu| clock.drive(emu.clone()));
        }
        Ok(Self { runner: OnceLock::new(), emus, domain, time: time.clone() })
    }

    /// Has threads run the controllers from now on: for an I/O kernel, which waits for them
    /// elsewhere.
    ///
    /// # Errors
    /// Returns [`StackError::Failed`] without threads.
    pub(crate) fn run(&self) -> Result<(), StackError> {
        if let (Time::Real(clock), false) = (&self.time, self.has_threads()) {
            let runner = EmuRunner::spawn(self.emus.clone(), clock.clone());
            let _ = self.runner.set(runner.map_err(|error| StackError::of_threads(&error))?);
        }
        Ok(())
    }

    pub(crate) fn has_threads(&self) -> bool {
        self.runner.get().is_some()
    }

    /// Returns the clock of the driver of controller number `at`.
    pub(crate) fn clock(self: &Arc<Self>, at: usize) -> Arc<dyn Clock> {
        match &self.time {
            Time::Real(clock) => {
                let emulation = Arc::downgrade(self);
                Arc::new(WaitClock { clock: clock.clone(), emulation, at })
            }
            Time::Simulated(clock) => clock.clone(),
        }
    }
}

/// A clock whose pauses run a controller, if no threads do: a store in files asks for its journal
/// and its health only, for which a thread would have to look at doorbells all the time.
#[derive(Debug)]
struct WaitClock {
    clock: Arc<dyn Clock>,
    /// Handles of a closed store have the clock, and must not keep its files open.
    emulation: Weak<Emulation>,
    at: usize,
}

impl Clock for WaitClock {
    fn now(&self) -> Nanos {
        self.clock.now()
    }

    fn pause(&self, idle: u32, until: Nanos) {
        let step = |emulation: Arc<Emulation>| {
            !emulation.has_threads() && emulation.emus[self.at].step(self.now(), BUDGET).work > 0
        };
        if !self.emulation.upgrade().is_some_and(step) {
            self.clock.pause(idle, until);
        }
    }
}
