//! Software controllers: their threads, and the attached driver.

use std::sync::Arc;

use nvme_driver::{Clock, Controller, ControllerOptions};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, EmuThread, SimClock};

use crate::error::StackError;

/// Queue pairs that a software controller offers.
pub const EMU_QUEUES: u16 = 64;
/// Maximum entries of a software controller's queue (MQES).
pub const EMU_DEPTH: u32 = 1024;

/// Software controllers, and the threads that run them.
#[derive(Debug)]
pub struct Emulation {
    /// `None` in virtual time.
    runner: Option<EmuRunner>,
    /// The threads have time for the I/O kernel, since they do not move the bytes.
    has_time: bool,
    emus: Vec<Arc<Emu>>,
}

impl Emulation {
    /// Makes software controllers whose DMA goes through `domain`, and attaches the driver to them.
    /// Drop it last: dropping a controller shuts it down, which needs these threads.
    ///
    /// # Errors
    /// Returns [`StackError::Emu`], [`StackError::Threads`] or [`StackError::Attach`].
    pub fn start(
        configs: impl IntoIterator<Item = EmuConfig>,
        domain: &Arc<EmuDomain>,
        clock: &Arc<dyn Clock>,
        options: &ControllerOptions,
    ) -> Result<(Self, Vec<Controller>), StackError> {
        let configs: Vec<EmuConfig> = configs.into_iter().collect();
        let mut media = configs.iter().flat_map(|config| &config.namespaces);
        let has_time = media.all(|namespace| namespace.media.is_asynchronous());
        let emus = make(configs, domain)?;
        let runner = EmuRunner::spawn(emus.clone(), clock.clone()).map_err(StackError::Threads)?;
        let (emulation, controllers) = Self::attach(emus, Some(runner), clock, options)?;
        Ok((Self { has_time, ..emulation }, controllers))
    }

    /// Same as [`Emulation::start`], without threads: waiting on `clock` runs the controllers.
    ///
    /// # Errors
    /// Same as [`Emulation::start`].
    pub fn simulate(
        configs: impl IntoIterator<Item = EmuConfig>,
        domain: &Arc<EmuDomain>,
        clock: &Arc<SimClock>,
        options: &ControllerOptions,
    ) -> Result<(Self, Vec<Controller>), StackError> {
        let emus = make(configs, domain)?;
        emus.iter().for_each(|emu| clock.drive(emu.clone()));
        let clock: Arc<dyn Clock> = clock.clone();
        Self::attach(emus, None, &clock, options)
    }

    fn attach(
        emus: Vec<Arc<Emu>>,
        runner: Option<EmuRunner>,
        clock: &Arc<dyn Clock>,
        options: &ControllerOptions,
    ) -> Result<(Self, Vec<Controller>), StackError> {
        let attach = |emu: &Arc<Emu>| {
            let attached = Controller::attach(emu.bus(), clock.clone(), options.clone());
            let device = || emu.id().to_owned();
            attached.map_err(|source| StackError::Attach { device: device(), source })
        };
        let controllers = emus.iter().map(attach).collect::<Result<_, _>>()?;
        Ok((Self { runner, has_time: false, emus }, controllers))
    }

    /// Returns the threads of the controllers, if they have time to run the I/O kernel as well: a
    /// command and its result then change threads nowhere.
    pub(crate) fn threads(&self) -> Vec<EmuThread> {
        let runner = self.runner.as_ref().filter(|_| self.has_time);
        runner.map(EmuRunner::threads).unwrap_or_default()
    }

    /// Returns the controllers, for fault injection.
    #[must_use]
    pub fn emus(&self) -> &[Arc<Emu>] {
        &self.emus
    }
}

fn make(
    configs: impl IntoIterator<Item = EmuConfig>,
    domain: &Arc<EmuDomain>,
) -> Result<Vec<Arc<Emu>>, StackError> {
    let emus = configs.into_iter().map(|config| {
        // One more than offered: the driver keeps one I/O queue for itself.
        let io_queues_max = EMU_QUEUES + 1;
        Emu::new(domain.clone(), EmuConfig { io_queues_max, mqes: EMU_DEPTH as u16, ..config })
    });
    Ok(emus.collect::<Result<_, _>>()?)
}
