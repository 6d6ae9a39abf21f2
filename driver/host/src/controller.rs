//! The controller's state machine: attach, enable, identify, reset, shut down.

use std::{collections::BTreeMap, sync::Arc};

use nvme_spec::{
    admin::{Cns, FeatureId, NumberOfQueues},
    identify::{IdentifyController, IdentifyNvmController},
    ids::{Nsid, QueueId},
    reg::{self, Cap, Cc, Csts, ShutdownNotification, ShutdownStatus, Version},
};

use crate::{
    admin::Admin,
    bus::{Bus, ResetError},
    clock::{Clock, Nanos, Waiter, wait_until},
    dma::DmaSlice,
    error::{Error, FailCause},
    event::Seen,
    grant::{HOST_QUEUE, IoQueue, OnDevice},
    info::ControllerInfo,
    io::{HostMemory, HostQueue},
    namespace::{NamespaceError, NamespaceInfo, Namespaces},
    options::{ControllerOptions, DescriptorPreference},
    port::Port,
    queue::DeviceError,
    quirks::{Quirks, READY_CHECK_DELAY},
    rate::RateLimit,
    state::{ResetCount, State},
    wait::Dead,
};

/// Time that a link takes to go down after a reset.
const LINK_SETTLES: Nanos = Nanos::from_millis(100);
/// Time limit for the link to come back.
const LINK_TIMEOUT: Nanos = Nanos::from_millis(10_000);
/// Time in which the platform reports the error that took a link down. The link goes down first: a
/// thread of the kernel handles the interrupt of the port (DPC), or of the root port (AER).
const ERROR_TIMEOUT: Nanos = Nanos::from_millis(1_000);

/// A controller owned by this process.
///
/// Blocking calls take `&mut self`: one owner, no locks. Executors drive granted queues meanwhile.
///
/// # Errors
/// Every method that sends a command returns [`Error::Command`] if the controller rejects it,
/// [`Error::Timeout`] with the recovery that followed, [`Error::Gone`], [`Error::Fatal`] or
/// [`Error::Misbehaved`] if the controller died, and [`Error::Failed`] or [`Error::Closed`] without
/// sending anything if it had failed or was shut down before. Only further errors are listed with a
/// method.
#[derive(Debug)]
pub struct Controller {
    pub(crate) port: Port,
    pub(crate) options: ControllerOptions,
    pub(crate) state: State,
    pub(crate) quirks: Quirks,
    pub(crate) info: ControllerInfo,
    pub(crate) namespaces: Namespaces,
    pub(crate) admin: Admin,
    pub(crate) host: Option<HostQueue>,
    pub(crate) host_memory: HostMemory,
    pub(crate) queues: BTreeMap<QueueId, IoQueue>,
    /// Data of commands that the controller may still execute, until the driver's own queue is
    /// deleted.
    pub(crate) quarantine: Vec<DmaSlice>,
    /// Set while the controller knows addresses of this process's memory and may use them.
    pub(crate) may_dma: bool,
    pub(crate) warnings: RateLimit,
    pub(crate) seen: Seen,
    resets: ResetCount,
}

impl Controller {
    /// Takes over the controller behind `bus`: resets and enables it, identifies it and its
    /// namespaces, and creates the queue of the blocking calls.
    ///
    /// # Errors
    /// Returns [`Error`] if the controller is absent, does not become ready in time (CAP.TO),
    /// misbehaves, or reports properties that are implausible or unsupported.
    pub fn attach(
        bus: Arc<dyn Bus>,
        clock: Arc<dyn Clock>,
        options: ControllerOptions,
    ) -> Result<Self, Error> {
        let span = tracing::info_span!("attach", ctrl = bus.id());
        let _entered = span.enter();
        let options = options.clamped();
        let port = Port::open(bus, clock)?;
        let quirks = port
            .bus
            .pci_id()
            .map_or(Quirks::empty(), |(vendor, device)| Quirks::of(vendor, Some(device)));
        let blank = IdentifyController { sqes: 0x66, cqes: 0x44, ..Default::default() };
        let info = ControllerInfo::check(&blank, &port.caps, Default::default())
            .map_err(|what| port.implausible(what))?;
        let mut controller = Self {
            admin: Admin::new(&port)?,
            host_memory: HostMemory::new(&port, &options)?,
            port,
            options,
            state: State::Disabled,
            quirks,
            info,
            namespaces: Namespaces::default(),
            host: None,
            queues: BTreeMap::new(),
            quarantine: Vec::new(),
            may_dma: false,
            warnings: RateLimit::default(),
            seen: Seen::default(),
            resets: ResetCount::default(),
        };
        match controller.bring_up(State::Enabling) {
            Ok(()) => Ok(controller),
            Err(error) => {
                controller.fail(error.cause());
                Err(error)
            }
        }
    }

    /// Returns the controller's identity and limits.
    #[must_use]
    pub fn info(&self) -> &ControllerInfo {
        &self.info
    }

    /// Returns the display name, which the bus assigns.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.port.id
    }

    /// Returns the usable namespaces, by ascending identifier.
    #[must_use]
    pub fn namespaces(&self) -> &[NamespaceInfo] {
        &self.namespaces.usable
    }

    /// Returns active namespaces that cannot be used, with the reasons.
    #[must_use]
    pub fn refused_namespaces(&self) -> &[(Nsid, NamespaceError)] {
        &self.namespaces.refused
    }

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns the bus.
    #[must_use]
    pub fn bus(&self) -> &Arc<dyn Bus> {
        &self.port.bus
    }

    /// Returns the clock that deadlines are measured with.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.port.clock
    }

    /// Returns a usable namespace.
    ///
    /// # Errors
    /// Returns [`Error::Namespace`] with the reason if the namespace is not usable.
    pub fn namespace(&self, nsid: Nsid) -> Result<&NamespaceInfo, Error> {
        let ctrl = &self.port.id;
        let found = self.namespaces.get(nsid);
        found.map_err(|source| Error::Namespace { ctrl: ctrl.clone(), nsid, source })
    }

    /// Resets the controller from any state and sets it up again. This deletes all queues from the
    /// device: the driver's own and ungranted ones are recreated right away, granted ones by
    /// [`Controller::recover`].
    ///
    /// # Errors
    /// Same as [`Controller::attach`], and [`Error::Closed`] after a shutdown.
    pub fn reset(&mut self) -> Result<(), Error> {
        if self.state == State::Shutdown {
            return Err(Error::Closed { ctrl: self.port.id.clone() });
        }
        self.reset_controller()
    }

    /// Returns the number of resets so far.
    #[must_use]
    pub fn resets(&self) -> &ResetCount {
        &self.resets
    }

    pub(crate) fn reset_controller(&mut self) -> Result<(), Error> {
        let span = tracing::info_span!("reset", ctrl = %self.port.id);
        let _entered = span.enter();
        self.resets.add();
        let done = self.bring_up(State::Resetting);
        if let Err(error) = &done {
            tracing::error!(ctrl = %self.port.id, %error, "the controller could not be reset");
            self.fail(error.cause());
        }
        done
    }

    /// Goes from any state through `state` to Ready. On an error the caller moves to Failed.
    ///
    /// A transient failure is retried once: the first attempt uses CC.EN alone, the second follows
    /// a reset of the function. The NVM subsystem is reset on request only
    /// ([`Controller::reset_subsystem`]) because that disrupts other controllers, too.
    fn bring_up(&mut self, state: State) -> Result<(), Error> {
        self.set_state(state);
        self.seen.pcie_error |= self.port.bus.pcie_error();
        // A reset of the link clears BARs and MSI-X, which a reset of the function restores.
        if !self.seen.pcie_error {
            let error = match self.set_up() {
                Err(error) if error.is_transient() => error,
                result => return result,
            };
            let ctrl = &self.port.id;
            tracing::warn!(%ctrl, %error, "the controller could not be set up; once more");
        }
        self.reset_function()?;
        self.set_state(state);
        self.set_up()
    }

    /// Resets the function, if it has a reset. Waits for a function that is absent because the
    /// platform recovers from an uncorrectable PCIe error: it resets the link meanwhile, and may
    /// refuse a reset until it is done.
    fn reset_function(&mut self) -> Result<(), Error> {
        let clock = self.port.clock.clone();
        let start = clock.now();
        let mut waiter = Waiter::new(&*clock, start + LINK_TIMEOUT);
        loop {
            self.seen.pcie_error |= self.port.bus.pcie_error();
            let error = match self.port.bus.reset() {
                Ok(()) => break,
                Err(error) => error,
            };
            let may_return = match error {
                ResetError::Gone(_) => self.seen.pcie_error || clock.now() < start + ERROR_TIMEOUT,
                ResetError::Os { .. } => self.seen.pcie_error,
                ResetError::Unsupported { .. } => false,
            };
            if may_return && waiter.wait() {
                continue;
            }
            tracing::warn!(ctrl = %self.port.id, %error, "no reset of its function");
            match error {
                ResetError::Gone(_) => return Err(Error::Gone { ctrl: self.port.id.clone() }),
                ResetError::Os { .. } | ResetError::Unsupported { .. } => break,
            }
        }
        self.seen.pcie_error = false;
        Ok(())
    }

    /// Resets the NVM subsystem behind `bus` (NSSR) and waits until its link is back. All
    /// controllers of the subsystem lose their queues, including those that other hosts use. Meant
    /// for a drive that [`Controller::attach`] cannot set up; the driver never calls it on its own.
    ///
    /// The function loses its configuration space: drop the bus and open it again.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if CAP.NSSRS is 0, and [`Error::Gone`] if the function was
    /// absent or did not come back within 10 s.
    pub fn reset_subsystem(bus: &dyn Bus, clock: &dyn Clock) -> Result<(), Error> {
        let ctrl: Arc<str> = Arc::from(bus.id());
        let gone = || Error::Gone { ctrl: ctrl.clone() };
        let is_there = || bus.read32(reg::CSTS).is_ok_and(|csts| !Csts(csts).is_gone());
        if !is_there() {
            return Err(gone());
        }
        let high = bus.read32(reg::CAP + 4).map_err(|_| gone())?;
        if Cap(u64::from(high) << 32).nssrs() == 0 {
            let (what, hint) = ("a reset of the NVM subsystem".into(), "power cycle the drive");
            return Err(Error::Unsupported { ctrl, what, hint });
        }
        tracing::warn!(%ctrl, "resetting the NVM subsystem");
        bus.write32(reg::NSSR, reg::NSSR_NVME).map_err(|_| gone())?;
        // The link takes a moment to go down.
        wait_until(clock, clock.now() + LINK_SETTLES, || false);
        if wait_until(clock, clock.now() + LINK_TIMEOUT, is_there) { Ok(()) } else { Err(gone()) }
    }

    /// Disables, enables and identifies the controller, then creates queues and requests events.
    fn set_up(&mut self) -> Result<(), Error> {
        self.disable()?;
        self.enable()?;
        self.identify_all()?;
        self.enable_retry_delays()?;
        self.look()?;
        self.set_number_of_queues()?;
        self.enable_events()?;
        self.create_host_queue()?;
        self.recreate_idle_queues()?;
        self.discover_placement()?;
        // Last: a timed-out admin command resets a controller that is Ready, and would do so
        // recursively from in here.
        self.set_state(State::Ready);
        tracing::info!(
            ctrl = %self.port.id, model = %self.info.model, firmware = %self.info.firmware,
            version = %self.info.version, namespaces = self.namespaces.usable.len(),
            io_queues = self.info.io_queues, "controller is ready"
        );
        Ok(())
    }

    /// Clears CC.EN and waits for CSTS.RDY = 0. From then on the controller does no DMA, so
    /// quarantined memory is freed.
    pub(crate) fn disable(&mut self) -> Result<(), Error> {
        self.admin.queue = None;
        self.host = None;
        let cc = Cc(self.port.read32(reg::CC)?);
        let csts = self.port.status()?;
        if cc.en() == 1 {
            if csts.rdy() == 0 && csts.cfs() == 0 {
                // Clearing CC.EN before CSTS.RDY follows it has undefined results (Base, CC.EN).
                let _ = self.port.wait_ready(1);
            }
            self.port.write32(reg::CC, cc.with_en(0).with_shn(0).0)?;
            if self.quirks.contains(Quirks::DELAY_BEFORE_READY_CHECK) {
                wait_until(&*self.port.clock, self.port.clock.now() + READY_CHECK_DELAY, || false);
            }
        }
        self.port.wait_ready(0)?;
        self.may_dma = false;
        for queue in self.queues.values_mut() {
            queue.device = OnDevice::Absent;
        }
        self.quarantine.clear();
        self.admin.all_ended();
        Ok(())
    }

    fn enable(&mut self) -> Result<(), Error> {
        let interrupt = self.port.interrupt(self.options.wait, 0)?;
        let queue = self.admin.set_up(&self.port, interrupt)?;
        let mps = (self.port.caps.page_bytes / 4096).trailing_zeros() as u8;
        let cc = Cc::default().with_mps(mps).with_iosqes(6).with_iocqes(4).with_en(1);
        self.may_dma = true;
        self.port.write32(reg::CC, cc.0)?;
        self.port.wait_ready(1)?;
        self.admin.queue = Some(queue);
        Ok(())
    }

    fn identify_all(&mut self) -> Result<(), Error> {
        let data: IdentifyController = self.identify(Cns::CONTROLLER, Nsid(0))?;
        let io_queues = self.info.io_queues;
        self.quirks |= Quirks::of(data.vid, None);
        let descriptors = match self.options.descriptors {
            DescriptorPreference::Auto if self.quirks.contains(Quirks::NO_SGL) => {
                DescriptorPreference::Prp
            }
            wanted => wanted,
        };
        self.info = ControllerInfo::check(&data, &self.port.caps, descriptors)
            .map_err(|what| self.port.implausible(what))?;
        self.info.io_queues = io_queues;
        self.identify_limits()?;
        self.rescan()
    }

    /// Reads limits of individual NVM commands, which MDTS does not cover. Added in version 2.0.
    fn identify_limits(&mut self) -> Result<(), Error> {
        if self.port.caps.version < Version::new(2, 0, 0) {
            return Ok(());
        }
        match self.identify::<IdentifyNvmController>(Cns::COMMAND_SET_CONTROLLER, Nsid(0)) {
            Ok(data) => self.info.limit(&data, &self.port.caps),
            // The page is optional.
            Err(Error::Command { status, .. }) => {
                tracing::debug!(ctrl = %self.port.id, %status, "no limits of NVM commands");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn set_number_of_queues(&mut self) -> Result<(), Error> {
        // One more than can be granted, for the driver's own queue.
        let want_z = self.options.io_queues;
        let value = NumberOfQueues { nsq_z: want_z, ncq_z: want_z }.to_dword();
        let fid = FeatureId::NUMBER_OF_QUEUES;
        let given = NumberOfQueues::from_dword(self.set_feature(fid, Nsid(0), value)?);
        // A controller may allocate more queues than requested; the rest stays unused.
        self.info.io_queues = given.nsq_z.min(given.ncq_z).min(want_z);
        Ok(())
    }

    /// Announces a shutdown (CC.SHN), waits until the controller reports it complete (RTD3E), and
    /// disables it. Completed writes are then durable without a flush.
    ///
    /// # Errors
    /// Returns [`Error::QueueState`] while queues are granted, and [`Error`] if the controller does
    /// not finish in time, which moves it to Failed.
    pub fn shutdown(&mut self) -> Result<(), Error> {
        if self.state == State::Shutdown {
            return Ok(());
        }
        self.refuse_granted("is granted; reclaim() it before the shutdown")?;
        self.delete_io_queues();
        let done = self.notify_shutdown(ShutdownNotification::NORMAL).and_then(|()| self.disable());
        match &done {
            Ok(()) => {
                self.queues.clear();
                self.set_state(State::Shutdown);
            }
            Err(error) => self.fail(error.cause()),
        }
        done
    }

    /// Deletes the I/O queues, as a host should before a shutdown (Base, "Normal Shutdown").
    fn delete_io_queues(&mut self) {
        if self.state != State::Ready {
            return;
        }
        let live = self.queues.iter().filter(|(_, queue)| queue.device == OnDevice::Live);
        let live: Vec<QueueId> = live.map(|(qid, _)| *qid).chain([HOST_QUEUE]).collect();
        self.host = None;
        for qid in live {
            // Not the admin timeout, so that dropping a dead controller takes seconds.
            if self.delete_within(qid, self.info.shutdown_timeout).is_err() {
                // The shutdown, or the reset after it, ends the commands of the queue.
                return;
            }
            if let Some(queue) = self.queues.get_mut(&qid) {
                queue.device = OnDevice::Absent;
            }
        }
    }

    fn notify_shutdown(&mut self, how: ShutdownNotification) -> Result<(), Error> {
        let cc = Cc(self.port.read32(reg::CC)?);
        if cc.en() == 0 || self.port.status()?.rdy() == 0 {
            return Ok(());
        }
        self.port.write32(reg::CC, cc.with_shn(how.0).0)?;
        let waited = self.info.shutdown_timeout;
        let clock = self.port.clock.clone();
        let mut waiter = Waiter::new(&*clock, clock.now() + waited);
        loop {
            let csts = self.port.status()?;
            if csts.shst() == ShutdownStatus::COMPLETE.0 {
                return Ok(());
            }
            if csts.cfs() != 0 {
                return Err(self.dead(Dead::Fatal(csts.0)));
            }
            if !waiter.wait() {
                return Err(Error::Shutdown { ctrl: self.port.id.clone(), waited, csts: csts.0 });
            }
        }
    }

    /// Returns an error unless commands may be sent.
    pub(crate) fn usable(&self) -> Result<(), Error> {
        let ctrl = self.port.id.clone();
        match self.state {
            State::Failed(cause) => Err(Error::Failed { ctrl, cause }),
            State::Shutdown => Err(Error::Closed { ctrl }),
            _ => Ok(()),
        }
    }

    /// Moves to Failed, unless already there: the first cause is the one to keep.
    pub(crate) fn fail(&mut self, cause: FailCause) {
        if !matches!(self.state, State::Failed(_)) {
            tracing::error!(ctrl = %self.port.id, %cause, "controller failed");
            self.set_state(State::Failed(cause));
        }
    }

    pub(crate) fn dead(&mut self, dead: Dead) -> Error {
        let ctrl = self.port.id.clone();
        match dead {
            Dead::Gone => {
                self.fail(FailCause::Gone);
                Error::Gone { ctrl }
            }
            Dead::Fatal(csts) => {
                self.fail(FailCause::Fatal);
                Error::Fatal { ctrl, csts }
            }
        }
    }

    /// Moves to Failed because of an invalid completion.
    pub(crate) fn misbehaved(&mut self, source: DeviceError) -> Error {
        self.fail(FailCause::Misbehaved(source));
        Error::Misbehaved { ctrl: self.port.id.clone(), source }
    }

    fn set_state(&mut self, state: State) {
        tracing::debug!(ctrl = %self.port.id, from = ?self.state, to = ?state, "state");
        self.state = state;
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let granted: Vec<u16> = self.grants().map(|grant| grant.qid.0).collect();
        if self.state == State::Ready && self.options.shutdown_on_drop {
            if granted.is_empty() {
                self.delete_io_queues();
            }
            let done = self.notify_shutdown(ShutdownNotification::NORMAL);
            if let Err(error) = done {
                tracing::warn!(ctrl = %self.port.id, %error, "shutdown was not acknowledged");
            }
        }
        let gone = self.state == State::Failed(FailCause::Gone);
        if self.may_dma && (gone || self.disable().is_err()) {
            tracing::error!(
                ctrl = %self.port.id,
                "the controller may still do DMA and could not be stopped; its memory is leaked"
            );
            self.admin.leak();
            std::mem::forget(self.host_memory.clone());
            std::mem::forget(std::mem::take(&mut self.quarantine));
            std::mem::forget(std::mem::take(&mut self.queues));
        }
        if !granted.is_empty() {
            // An executor may still write these entries and ring these doorbells.
            tracing::error!(
                ctrl = %self.port.id, queues = ?granted,
                "dropped while queues are granted: their memory and the bus are leaked"
            );
            std::mem::forget(std::mem::take(&mut self.queues));
            std::mem::forget((self.port.bus.clone(), self.port.doorbells.clone()));
        }
    }
}
