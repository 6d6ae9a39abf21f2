//! Software controllers, and what runs them.

use std::sync::Arc;

use nvme_driver::{Clock, MonotonicClock};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, SimClock};

use crate::{error::StackError, gpu::Gpu};

/// Queue pairs that a software controller offers.
pub const EMU_QUEUES: u16 = 64;
/// Maximum entries of a software controller's queue (MQES).
pub const EMU_DEPTH: u32 = 1024;

/// The clock of devices and store.
#[derive(Debug, Clone)]
pub(crate) enum Time {
    /// Real time: threads run the software controllers.
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

/// Software controllers, and the threads that run them. It outlives the driver's controllers: one
/// that is dropped shuts down, which needs these threads.
#[derive(Debug)]
pub(crate) struct Emulation {
    /// `None` in virtual time.
    _runner: Option<EmuRunner>,
    pub(crate) emus: Vec<Arc<Emu>>,
    /// Their address space, which reaches memory of the GPU, too.
    pub(crate) domain: Arc<EmuDomain>,
}

impl Emulation {
    /// Makes software controllers, in an address space of this name.
    ///
    /// # Errors
    /// Returns [`StackError::Emu`], or [`StackError::Failed`] without threads.
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
        let runner = match time {
            Time::Real(clock) => {
                let runner = EmuRunner::spawn(emus.clone(), clock.clone());
                Some(runner.map_err(|error| StackError::of_threads(&error))?)
            }
            Time::Simulated(clock) => {
                emus.iter().for_each(|emu| clock.drive(emu.clone()));
                None
            }
        };
        Ok(Self { _runner: runner, emus, domain })
    }
}
