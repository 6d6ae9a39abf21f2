//! Software controllers and their threads or clocks.

use std::{fmt, sync::Arc};

use nvme_driver::{Bus, Clock, Controller, ControllerOptions, MonotonicClock};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, FaultPlan, FaultRule, MemoryMedia, SimClock};

/// Returns configurations `emu0`, `emu1` and so on, each with one namespace of `bytes` in memory.
#[must_use]
pub fn memory_drives(count: usize, bytes: u64, lba_bytes: u32) -> Vec<EmuConfig> {
    let drive = |at| {
        let media = MemoryMedia::new(bytes).expect("address space for the media");
        EmuConfig::new(format!("emu{at}")).namespace(media, lba_bytes)
    };
    (0..count).map(drive).collect()
}

/// Software controllers in one address space.
pub struct Drives {
    /// The address space.
    pub domain: Arc<EmuDomain>,
    /// The controllers.
    pub emus: Vec<Arc<Emu>>,
    /// Their clock.
    pub clock: Arc<dyn Clock>,
    /// Their threads, in real time. Without threads the controllers make no progress.
    pub runner: Option<EmuRunner>,
}

impl fmt::Debug for Drives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Drives({})", self.emus.len())
    }
}

impl Drives {
    fn new(domain: Arc<EmuDomain>, configs: Vec<EmuConfig>, clock: Arc<dyn Clock>) -> Self {
        let emu = |config| Emu::new(domain.clone(), config).expect("a valid configuration");
        let emus = configs.into_iter().map(emu).collect();
        Self { domain, emus, clock, runner: None }
    }

    /// Creates controllers in virtual time: waiting on `sim` runs them.
    #[must_use]
    pub fn simulated(domain: Arc<EmuDomain>, configs: Vec<EmuConfig>, sim: &Arc<SimClock>) -> Self {
        let drives = Self::new(domain, configs, sim.clone());
        drives.emus.iter().for_each(|emu| sim.drive(emu.clone()));
        drives
    }

    /// Creates controllers in real time, on threads.
    #[must_use]
    pub fn threaded(domain: Arc<EmuDomain>, configs: Vec<EmuConfig>) -> Self {
        let mut drives = Self::new(domain, configs, Arc::new(MonotonicClock::default()));
        drives.run();
        drives
    }

    /// Starts the threads.
    pub fn run(&mut self) {
        let runner = EmuRunner::spawn(self.emus.clone(), self.clock.clone());
        self.runner = Some(runner.expect("threads"));
    }

    /// Returns the controllers as buses.
    #[must_use]
    pub fn buses(&self) -> Vec<Arc<dyn Bus>> {
        self.emus.iter().map(|emu| emu.bus() as Arc<dyn Bus>).collect()
    }

    /// Attaches the driver to every controller.
    #[must_use]
    pub fn attach(&self, options: &ControllerOptions) -> Vec<Controller> {
        let attach = |bus| Controller::attach(bus, self.clock.clone(), options.clone());
        let attached: Result<Vec<_>, _> = self.buses().into_iter().map(attach).collect();
        attached.expect("the driver attaches")
    }
}

/// Sets this rule in every controller, or clears the rules.
pub fn set_faults(emus: &[Arc<Emu>], rule: Option<FaultRule>) {
    let plan = FaultPlan { seed: 1, rules: rule.into_iter().collect(), ..FaultPlan::default() };
    emus.iter().for_each(|emu| emu.set_faults(plan.clone()));
}
