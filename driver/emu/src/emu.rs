//! A software controller with its locks, bus and clock.

use std::{
    fmt, io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::Thread,
};

use nvme_driver::{
    Bus, Clock, DmaSpace, DoorbellPage, Gone, Interrupt, InterruptError, Nanos, ResetError,
};
use nvme_spec::{ids::Nsid, log::CriticalWarning};

use crate::{
    config::{ConfigError, EmuConfig},
    controller::Controller,
    domain::EmuDomain,
    doorbell::Doorbells,
    fault::FaultPlan,
    interrupt::Interrupts,
    progress::{EmuCounters, Progress},
};

/// A software controller. It works only in [`Emu::step`], called by an [`crate::EmuRunner`] in real
/// time, a [`crate::SimClock`] in virtual time, or a test.
///
/// As a [`Bus`], an unplugged controller reads as all ones, like a function behind a dead PCIe
/// link: the bus knows no more than a real one, so drivers must detect the removal themselves.
pub struct Emu {
    id: String,
    /// Held while waiting for `state`. Its holder is next in line, so a loop of steps cannot starve
    /// a register access (a std mutex alone is unfair).
    fair_lock: Mutex<()>,
    state: Mutex<State>,
    attached: Mutex<Attached>,
    pci_id: Option<(u16, u16)>,
    platform: Mutex<Platform>,
    doorbells: Doorbells,
    interrupts: Interrupts,
    domain: Arc<EmuDomain>,
    /// `domain`, as a [`Bus`] returns it.
    dma: Arc<dyn DmaSpace>,
}

struct State {
    controller: Controller,
    /// Latest time of any caller. Register accesses without a clock use it.
    now: Nanos,
}

/// Driver of this controller.
#[derive(Default)]
struct Attached {
    clock: Option<Arc<dyn Clock>>,
    thread: Option<Thread>,
}

/// Platform events of the function.
#[derive(Default)]
struct Platform {
    /// The host wants the function back.
    requested: bool,
}

impl Emu {
    /// Powers on a controller in `domain`.
    ///
    /// # Errors
    /// Returns [`EmuError`] for an invalid configuration, or without memory for the doorbells.
    pub fn new(domain: Arc<EmuDomain>, config: EmuConfig) -> Result<Arc<Self>, EmuError> {
        config.validate()?;
        let id = config.id.clone();
        let doorbells = Doorbells::new(config.io_queues_max, config.dstrd)
            .map_err(|source| EmuError::Doorbells { id: id.clone(), source })?;
        let interrupts = Interrupts::new(config.vectors);
        let pci_id = config.pci_id;
        let controller =
            Controller::new(config, domain.clone(), doorbells.clone(), interrupts.clone());
        Ok(Arc::new(Self {
            id,
            fair_lock: Mutex::new(()),
            state: Mutex::new(State { controller, now: Nanos::default() }),
            attached: Mutex::new(Attached::default()),
            pci_id,
            platform: Mutex::new(Platform::default()),
            doorbells,
            interrupts,
            dma: domain.clone(),
            domain,
        }))
    }

    /// Returns the display name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the address space.
    #[must_use]
    pub fn domain(&self) -> &Arc<EmuDomain> {
        &self.domain
    }

    /// Returns the doorbells.
    #[must_use]
    pub fn doorbells(&self) -> &Doorbells {
        &self.doorbells
    }

    /// Returns the interrupt vectors.
    #[must_use]
    pub fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    /// Returns the bus for a driver to attach to.
    #[must_use]
    pub fn bus(self: &Arc<Self>) -> Arc<dyn Bus> {
        self.clone()
    }

    /// Performs the work due at `now`, fetching at most `budget` commands.
    pub fn step(&self, now: Nanos, budget: u32) -> Progress {
        let mut state = self.state();
        state.now = state.now.max(now);
        let now = state.now;
        state.controller.step(now, budget)
    }

    /// Reads a register.
    #[must_use]
    pub fn read32(&self, offset: u32) -> u32 {
        let mut state = self.state_now();
        let now = state.now;
        state.controller.read32(offset, now)
    }

    /// Writes a register and wakes the thread that steps this controller.
    pub fn write32(&self, offset: u32, value: u32) {
        let mut state = self.state_now();
        let now = state.now;
        state.controller.write32(offset, value, now);
        drop(state);
        self.wake();
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> EmuCounters {
        self.state().controller.counters()
    }

    /// Replaces the fault plan and restarts its counters.
    ///
    /// # Panics
    /// Panics if a condition of `faults` has a value without a meaning, such as `nth: 0`.
    pub fn set_faults(&self, faults: FaultPlan) {
        self.state().controller.set_faults(faults);
        self.wake();
    }

    /// Cuts the power and restores it: commands in flight are lost, volatile caches may be lost,
    /// and registers have their power-on values.
    pub fn power_loss(&self) {
        let mut state = self.state();
        let now = state.now;
        state.controller.power_loss(now);
        drop(state);
        self.wake();
    }

    /// Performs a Function Level Reset and wakes the stepping thread. Returns false if it has none.
    pub fn reset_function(&self) -> bool {
        let mut state = self.state_now();
        let now = state.now;
        let done = state.controller.reset_function(now);
        drop(state);
        self.wake();
        done
    }

    /// Simulates an uncorrectable PCIe error of this function.
    pub fn report_pcie_error(&self) {
        let mut state = self.state();
        let now = state.now;
        state.controller.report_pcie_error(now);
    }

    /// Takes the link down for `span` ([`FaultAction::LinkLoss`](crate::FaultAction::LinkLoss)).
    pub fn lose_link(&self, span: Nanos) {
        let mut state = self.state_now();
        let now = state.now;
        state.controller.lose_link(now, span);
    }

    /// Removes the controller from its slot: registers read as all ones, nothing completes.
    pub fn unplug(&self) {
        self.state().controller.unplug();
        self.wake();
    }

    /// Sets the critical warnings.
    pub fn warn(&self, warnings: CriticalWarning) {
        self.state().controller.warn(warnings);
        self.wake();
    }

    /// Reports changed Identify data of a namespace to the host ([`crate::IdentifyOverrides`]).
    pub fn namespace_changed(&self, nsid: Nsid) {
        self.state().controller.raise_namespace_changed(nsid.0);
        self.wake();
    }

    /// Requests the function back, as unbinding a PCIe function from vfio-pci does.
    pub fn request(&self) {
        self.platform().requested = true;
    }

    /// Sets the clock for register accesses and the thread to wake.
    pub(crate) fn attach(&self, clock: Option<Arc<dyn Clock>>, thread: Option<Thread>) {
        *self.attached() = Attached { clock, thread };
    }

    /// Sets whether only the calling thread steps the controller from now on. That thread must
    /// reset this before it ends.
    pub(crate) fn set_exclusive(&self, exclusive: bool) {
        self.state().controller.set_exclusive(exclusive);
    }

    /// Returns the state, with the time of the clock if there is one.
    fn state_now(&self) -> MutexGuard<'_, State> {
        let now = self.attached().clock.as_ref().map_or(Nanos::default(), |clock| clock.now());
        let mut state = self.state();
        state.now = state.now.max(now);
        state
    }

    fn wake(&self) {
        if let Some(thread) = &self.attached().thread {
            thread.unpark();
        }
    }

    fn platform(&self) -> MutexGuard<'_, Platform> {
        self.platform.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attached(&self) -> MutexGuard<'_, Attached> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let _next = self.fair_lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bus for Emu {
    fn id(&self) -> &str {
        &self.id
    }

    fn read32(&self, offset: u32) -> Result<u32, Gone> {
        Ok(self.read32(offset))
    }

    fn write32(&self, offset: u32, value: u32) -> Result<(), Gone> {
        self.write32(offset, value);
        Ok(())
    }

    fn doorbells(&self) -> DoorbellPage {
        self.doorbells.page()
    }

    fn dma(&self) -> &Arc<dyn DmaSpace> {
        &self.dma
    }

    fn pci_id(&self) -> Option<(u16, u16)> {
        self.pci_id
    }

    fn numa_node(&self) -> Option<u32> {
        None
    }

    fn requested(&self) -> bool {
        self.platform().requested
    }

    fn interrupt(&self, vector: u16) -> Result<Interrupt, InterruptError> {
        self.interrupts.listen(&self.id, vector)
    }

    fn reset(&self) -> Result<(), ResetError> {
        let absent = {
            let state = self.state_now();
            state.controller.is_absent(state.now)
        };
        if absent {
            return Err(Gone.into());
        }
        if !self.reset_function() {
            return Err(ResetError::Unsupported { bus: self.id.clone() });
        }
        Ok(())
    }

    fn pcie_error(&self) -> bool {
        let mut state = self.state_now();
        let now = state.now;
        state.controller.take_pcie_error(now)
    }
}

impl fmt::Debug for Emu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Emu").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Failure to create a controller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmuError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no memory for the doorbells.
    #[error("{id}: making the doorbell page failed: {source}; free memory or file descriptors")]
    Doorbells {
        /// The controller.
        id: String,
        /// The cause.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use nvme_driver::platform::mmio;

    use super::*;

    #[test]
    fn the_bus_is_the_controller_seen_from_outside() {
        let domain = EmuDomain::new("test");
        let config = EmuConfig { io_queues_max: 4, vectors: 2, dstrd: 1, ..EmuConfig::new("emu3") };
        let emu = Emu::new(domain.clone(), config).unwrap();
        let bus = emu.bus();
        assert_eq!(bus.id(), "emu3");
        assert_eq!(bus.dma().name(), "test");
        let memory = bus.dma().alloc(4096).unwrap();
        assert_eq!(domain.mapped(), memory.segments());
        let page = bus.doorbells();
        assert_eq!(page.stride(), 8);
        assert!(page.len() >= 10 * 8, "four I/O queues and the admin queue");
        ring(page, 2, 77);
        assert_eq!(emu.doorbells().sq_tail(1), 77);
        bus.interrupt(1).unwrap();
        assert!(emu.interrupts().raise(1));
        let missing = bus.interrupt(2).unwrap_err();
        assert!(matches!(missing, InterruptError::NoSuchVector { available: 2, .. }));
    }

    #[allow(unsafe_code, reason = "rings a doorbell by address, as a driver does")]
    fn ring(page: nvme_driver::DoorbellPage, index: usize, value: u32) {
        // SAFETY: the caller's index is inside the page; doorbells are accessed as dwords only.
        unsafe {
            mmio::store_release32(page.host().byte_add(index * page.stride() as usize), value)
        };
    }

    #[test]
    fn impossible_controllers_are_errors() {
        let config = EmuConfig { dstrd: 16, ..EmuConfig::default() };
        let error = Emu::new(EmuDomain::new("test"), config).unwrap_err();
        assert!(error.to_string().contains("dstrd"), "{error}");
    }
}
