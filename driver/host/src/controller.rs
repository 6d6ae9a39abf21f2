//! The controller's state machine: attach, enable, identify, reset, shut down.

use std::{collections::BTreeMap, sync::Arc};

use nvme_spec::{
    admin::{Cns, FeatureId, NumberOfQueues},
    identify::{ActiveNamespaces, IdentifyController, IdentifyNvmController},
    ids::{Nsid, QueueId},
    reg::{self, Aqa, Cap, Cc, Crto, Csts, ShutdownNotification, ShutdownStatus, Version},
};

use crate::{
    admin::{ADMIN_DEPTH, AdminMemory, AdminQueue},
    bus::{Bus, DoorbellPage, Interrupt},
    clock::{Clock, Nanos, Waiter, wait_until},
    dma::DmaSlice,
    error::{Error, FailCause},
    grants::{HOST_QUEUE, IoQueue, OnDevice},
    health::Seen,
    info::{Capabilities, ControllerInfo},
    io::{HostMemory, HostQueue},
    namespace::{NamespaceError, NamespaceInfo},
    options::{ControllerOptions, DescriptorPreference, WaitMode},
    quirks::{Quirks, READY_CHECK_DELAY},
    rate::RateLimit,
    resets::ResetCount,
    wait::Dead,
};

/// Most namespaces identified; further ones are ignored.
const NAMESPACES_MAX: usize = 4096;

/// Time that a link takes to go down after a reset.
const LINK_SETTLES: Nanos = Nanos::from_millis(100);
/// Time limit for the link to come back.
const LINK_TIMEOUT: Nanos = Nanos::from_millis(10_000);

/// The state of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// CC.EN is 0 or not known yet.
    Disabled,
    /// Initial set-up is in progress.
    Enabling,
    /// The controller accepts commands.
    Ready,
    /// A reset and the set-up after it are in progress.
    Resetting,
    /// The controller is no longer used.
    Failed(FailCause),
    /// The controller was shut down in an orderly way.
    Shutdown,
}

/// A controller owned by this process.
///
/// Blocking calls take `&mut self`: one owner, no locks. Executors drive granted queues meanwhile.
#[derive(Debug)]
pub struct Controller {
    pub(crate) bus: Arc<dyn Bus>,
    /// Mapping that contains all granted doorbells.
    pub(crate) doorbells: DoorbellPage,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) id: Arc<str>,
    pub(crate) options: ControllerOptions,
    pub(crate) state: State,
    pub(crate) caps: Capabilities,
    pub(crate) quirks: Quirks,
    pub(crate) info: ControllerInfo,
    pub(crate) namespaces: Vec<NamespaceInfo>,
    pub(crate) refused: Vec<(Nsid, NamespaceError)>,
    pub(crate) admin: Option<AdminQueue>,
    pub(crate) admin_memory: Option<AdminMemory>,
    pub(crate) host: Option<HostQueue>,
    pub(crate) host_memory: Option<HostMemory>,
    pub(crate) queues: BTreeMap<QueueId, IoQueue>,
    /// Data of commands that the controller may still execute: `quarantine` until the driver's own
    /// queue is deleted, `abandoned` (admin commands) until the next reset.
    pub(crate) quarantine: Vec<DmaSlice>,
    pub(crate) abandoned: Vec<DmaSlice>,
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
        let id: Arc<str> = Arc::from(bus.id());
        let span = tracing::info_span!("attach", ctrl = %id);
        let _entered = span.enter();
        let options = options.clamped();
        let caps = read_capabilities(&*bus, &id)?;
        let quirks = bus
            .pci_id()
            .map_or(Quirks::empty(), |(vendor, device)| Quirks::of(vendor, Some(device)));
        let blank = IdentifyController { sqes: 0x66, cqes: 0x44, ..Default::default() };
        let info = ControllerInfo::check(&blank, &caps, Default::default())
            .map_err(|what| Error::Implausible { ctrl: id.clone(), what })?;
        let admin_memory = AdminMemory::alloc(&*bus, caps.page_bytes)
            .map_err(|source| Error::Dma { ctrl: id.clone(), source })?;
        let mut controller = Self {
            doorbells: bus.doorbells(),
            bus,
            clock,
            id,
            options,
            state: State::Disabled,
            caps,
            quirks,
            info,
            namespaces: Vec::new(),
            refused: Vec::new(),
            admin: None,
            admin_memory: Some(admin_memory),
            host: None,
            host_memory: None,
            queues: BTreeMap::new(),
            quarantine: Vec::new(),
            abandoned: Vec::new(),
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
        &self.id
    }

    /// Returns the usable namespaces, by ascending identifier.
    #[must_use]
    pub fn namespaces(&self) -> &[NamespaceInfo] {
        &self.namespaces
    }

    /// Returns active namespaces that cannot be used, with the reasons.
    #[must_use]
    pub fn refused_namespaces(&self) -> &[(Nsid, NamespaceError)] {
        &self.refused
    }

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns the bus.
    #[must_use]
    pub fn bus(&self) -> &Arc<dyn Bus> {
        &self.bus
    }

    /// Returns the clock that deadlines are measured with.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Returns a usable namespace.
    ///
    /// # Errors
    /// Returns [`Error::Namespace`] with the reason if the namespace is not usable.
    pub fn namespace(&self, nsid: Nsid) -> Result<&NamespaceInfo, Error> {
        if let Some(found) = self.namespaces.iter().find(|n| n.nsid == nsid) {
            return Ok(found);
        }
        let refused = self.refused.iter().find(|(id, _)| *id == nsid).map(|(_, why)| *why);
        let source = refused.unwrap_or(NamespaceError::Unknown);
        Err(Error::Namespace { ctrl: self.id.clone(), nsid, source })
    }

    /// Resets the controller from any state and sets it up again. This deletes all queues from the
    /// device: the driver's own and ungranted ones are recreated right away, granted ones by
    /// [`Controller::recover`].
    ///
    /// # Errors
    /// Same as [`Controller::attach`], and [`Error::Closed`] after a shutdown.
    pub fn reset(&mut self) -> Result<(), Error> {
        if self.state == State::Shutdown {
            return Err(Error::Closed { ctrl: self.id.clone() });
        }
        self.reset_controller()
    }

    /// Returns the number of resets so far.
    #[must_use]
    pub fn resets(&self) -> &ResetCount {
        &self.resets
    }

    pub(crate) fn reset_controller(&mut self) -> Result<(), Error> {
        let span = tracing::info_span!("reset", ctrl = %self.id);
        let _entered = span.enter();
        self.resets.add();
        let done = self.bring_up(State::Resetting);
        if let Err(error) = &done {
            tracing::error!(ctrl = %self.id, %error, "the controller could not be reset");
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
        let error = match self.set_up() {
            Err(error) if error.is_transient() => error,
            result => return result,
        };
        tracing::warn!(ctrl = %self.id, %error, "the controller could not be set up; once more");
        if let Err(error) = self.bus.reset() {
            tracing::warn!(ctrl = %self.id, %error, "no reset of its function");
        }
        self.set_state(state);
        self.set_up()
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
        self.set_number_of_queues()?;
        self.enable_events()?;
        self.create_host_queue()?;
        self.recreate_idle_queues()?;
        self.discover_placement()?;
        // Last: a timed-out admin command resets a controller that is Ready, and would do so
        // recursively from in here.
        self.set_state(State::Ready);
        tracing::info!(
            ctrl = %self.id, model = %self.info.model, firmware = %self.info.firmware,
            version = %self.info.version, namespaces = self.namespaces.len(),
            io_queues = self.info.io_queues, "controller is ready"
        );
        Ok(())
    }

    /// Clears CC.EN and waits for CSTS.RDY = 0. From then on the controller does no DMA, so
    /// quarantined memory is freed.
    pub(crate) fn disable(&mut self) -> Result<(), Error> {
        self.admin = None;
        self.host = None;
        let cc = Cc(self.read32(reg::CC)?);
        let csts = self.status()?;
        if cc.en() == 1 {
            if csts.rdy() == 0 && csts.cfs() == 0 {
                // Clearing CC.EN before CSTS.RDY follows it has undefined results (Base, CC.EN).
                let _ = self.wait_ready(1);
            }
            self.write32(reg::CC, cc.with_en(0).with_shn(0).0)?;
            if self.quirks.contains(Quirks::DELAY_BEFORE_READY_CHECK) {
                wait_until(&*self.clock, self.clock.now() + READY_CHECK_DELAY, || false);
            }
        }
        self.wait_ready(0)?;
        self.may_dma = false;
        for queue in self.queues.values_mut() {
            queue.device = OnDevice::Absent;
        }
        self.quarantine.clear();
        self.abandoned.clear();
        Ok(())
    }

    fn enable(&mut self) -> Result<(), Error> {
        let interrupt = self.interrupt(0)?;
        let Some(memory) = self.admin_memory.as_mut() else {
            return Err(Error::Closed { ctrl: self.id.clone() });
        };
        memory.zero();
        let (sq, cq) = (memory.sq.iova().0, memory.cq.iova().0);
        let admin = AdminQueue::new(&self.bus, memory, interrupt)
            .map_err(|source| Error::Queue { ctrl: self.id.clone(), source })?;
        let size_z = (ADMIN_DEPTH - 1) as u16;
        let aqa = Aqa::default().with_asqs_z(size_z).with_acqs_z(size_z);
        self.write32(reg::AQA, aqa.0)?;
        // 64-bit registers are written as two halves, which every controller must accept.
        for (register, value) in [(reg::ASQ, sq), (reg::ACQ, cq)] {
            self.write32(register, value as u32)?;
            self.write32(register + 4, (value >> 32) as u32)?;
        }
        let mps = (self.caps.page_bytes / 4096).trailing_zeros() as u8;
        let cc = Cc::default().with_mps(mps).with_iosqes(6).with_iocqes(4).with_en(1);
        self.may_dma = true;
        self.write32(reg::CC, cc.0)?;
        self.wait_ready(1)?;
        self.admin = Some(admin);
        Ok(())
    }

    fn wait_ready(&self, ready: u8) -> Result<(), Error> {
        let waited = self.caps.ready_timeout;
        let mut waiter = Waiter::new(&*self.clock, self.clock.now() + waited);
        loop {
            let csts = self.status()?;
            if csts.rdy() == ready {
                return Ok(());
            }
            if ready == 1 && csts.cfs() != 0 {
                return Err(Error::Fatal { ctrl: self.id.clone(), csts: csts.0 });
            }
            if !waiter.wait() {
                let ctrl = self.id.clone();
                return Err(Error::NotReady { ctrl, ready, waited, csts: csts.0 });
            }
        }
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
        self.info = ControllerInfo::check(&data, &self.caps, descriptors)
            .map_err(|what| Error::Implausible { ctrl: self.id.clone(), what })?;
        self.info.io_queues = io_queues;
        self.identify_limits()?;
        self.rescan()
    }

    /// Reads limits of individual NVM commands, which MDTS does not cover. Added in version 2.0.
    fn identify_limits(&mut self) -> Result<(), Error> {
        if self.caps.version < Version::new(2, 0, 0) {
            return Ok(());
        }
        match self.identify::<IdentifyNvmController>(Cns::COMMAND_SET_CONTROLLER, Nsid(0)) {
            Ok(data) => self.info.limit(&data, &self.caps),
            // The page is optional.
            Err(Error::Command { status, .. }) => {
                tracing::debug!(ctrl = %self.id, %status, "no limits of NVM commands");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Identifies the namespaces again. [`Controller::poll_events`] calls this when the controller
    /// reports a change.
    ///
    /// # Errors
    /// Same as any admin command.
    pub fn rescan(&mut self) -> Result<(), Error> {
        self.usable()?;
        let nsids = self.active_namespaces()?;
        let (mut good, mut refused) = (Vec::new(), Vec::new());
        for nsid in nsids {
            let checked = match self.identify_namespace(nsid) {
                Ok(data) => NamespaceInfo::check(nsid, &data),
                Err(Error::Command { status, .. }) => Err(NamespaceError::Identify { status }),
                Err(error) => return Err(error),
            };
            match checked {
                Ok(info) => good.push(info),
                Err(why) => {
                    tracing::warn!(ctrl = %self.id, nsid = nsid.0, %why, "namespace not usable");
                    refused.push((nsid, why));
                }
            }
        }
        (self.namespaces, self.refused) = (good, refused);
        // During set-up the queue that this needs does not exist yet.
        if self.host.is_some() { self.discover_placement() } else { Ok(()) }
    }

    fn active_namespaces(&mut self) -> Result<Vec<Nsid>, Error> {
        if self.caps.version < Version::new(1, 1, 0) {
            // Version 1.0 has no list; all identifiers up to NN are valid.
            return Ok((1..=self.info.nn.min(NAMESPACES_MAX as u32)).map(Nsid).collect());
        }
        let mut found: Vec<Nsid> = Vec::new();
        loop {
            let (before, after) = (found.len(), found.last().copied().unwrap_or(Nsid(0)));
            let list: ActiveNamespaces = self.identify(Cns::ACTIVE_NAMESPACES, after)?;
            for &nsid in list.nsids.iter().take_while(|n| **n != 0) {
                let last = found.last().copied().unwrap_or(Nsid(0));
                if nsid <= last.0 || nsid >= 0xFFFF_FFFE {
                    let what = format!("namespace {nsid} follows {last} in its ascending list");
                    return Err(Error::Implausible { ctrl: self.id.clone(), what });
                }
                found.push(Nsid(nsid));
                if found.len() == NAMESPACES_MAX {
                    return Ok(found);
                }
            }
            // Count, not last entry: a malformed page may have a last entry but no first one.
            if found.len() - before < list.nsids.len() {
                return Ok(found);
            }
        }
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
        if let Some((&qid, _)) = self.queues.iter().find(|(_, q)| q.granted.is_some()) {
            let what = "is granted; reclaim() it before the shutdown".into();
            return Err(Error::QueueState { ctrl: self.id.clone(), qid, what });
        }
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
        let cc = Cc(self.read32(reg::CC)?);
        if cc.en() == 0 || self.status()?.rdy() == 0 {
            return Ok(());
        }
        self.write32(reg::CC, cc.with_shn(how.0).0)?;
        let waited = self.info.shutdown_timeout;
        let clock = self.clock.clone();
        let mut waiter = Waiter::new(&*clock, clock.now() + waited);
        loop {
            let csts = self.status()?;
            if csts.shst() == ShutdownStatus::COMPLETE.0 {
                return Ok(());
            }
            if csts.cfs() != 0 {
                return Err(self.dead(Dead::Fatal(csts.0)));
            }
            if !waiter.wait() {
                return Err(Error::Shutdown { ctrl: self.id.clone(), waited, csts: csts.0 });
            }
        }
    }

    /// Returns an error unless commands may be sent.
    pub(crate) fn usable(&self) -> Result<(), Error> {
        let ctrl = self.id.clone();
        match self.state {
            State::Failed(cause) => Err(Error::Failed { ctrl, cause }),
            State::Shutdown => Err(Error::Closed { ctrl }),
            _ => Ok(()),
        }
    }

    /// Moves to Failed, unless already there: the first cause is the one to keep.
    pub(crate) fn fail(&mut self, cause: FailCause) {
        if !matches!(self.state, State::Failed(_)) {
            tracing::error!(ctrl = %self.id, %cause, "controller failed");
            self.set_state(State::Failed(cause));
        }
    }

    pub(crate) fn dead(&mut self, dead: Dead) -> Error {
        let ctrl = self.id.clone();
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

    fn set_state(&mut self, state: State) {
        tracing::debug!(ctrl = %self.id, from = ?self.state, to = ?state, "state");
        self.state = state;
    }

    /// Returns interrupt `vector` if the blocking calls wait for interrupts.
    pub(crate) fn interrupt(&self, vector: u16) -> Result<Option<Interrupt>, Error> {
        if self.options.wait == WaitMode::Poll {
            return Ok(None);
        }
        let ctrl = self.id.clone();
        self.bus.interrupt(vector).map(Some).map_err(|source| Error::Interrupt { ctrl, source })
    }

    fn read32(&self, offset: u32) -> Result<u32, Error> {
        self.bus.read32(offset).map_err(|_| Error::Gone { ctrl: self.id.clone() })
    }

    fn write32(&self, offset: u32, value: u32) -> Result<(), Error> {
        self.bus.write32(offset, value).map_err(|_| Error::Gone { ctrl: self.id.clone() })
    }

    fn status(&self) -> Result<Csts, Error> {
        let csts = Csts(self.read32(reg::CSTS)?);
        if csts.is_gone() { Err(Error::Gone { ctrl: self.id.clone() }) } else { Ok(csts) }
    }
}

fn read_capabilities(bus: &dyn Bus, id: &Arc<str>) -> Result<Capabilities, Error> {
    let gone = || Error::Gone { ctrl: id.clone() };
    let read = |offset| bus.read32(offset).map_err(|_| gone());
    let (low, high) = (read(reg::CAP)?, read(reg::CAP + 4)?);
    if (low, high) == (reg::ALL_ONES, reg::ALL_ONES) {
        return Err(gone());
    }
    let cap = Cap(u64::from(low) | u64::from(high) << 32);
    let version = Version(read(reg::VS)?);
    let crto = if cap.crms() == 0 { Crto::default() } else { Crto(read(reg::CRTO)?) };
    Capabilities::check(cap, crto, version, bus.doorbells().stride())
        .map_err(|what| Error::Implausible { ctrl: id.clone(), what })
}

impl Drop for Controller {
    fn drop(&mut self) {
        let granted: Vec<u16> =
            self.queues.iter().filter(|(_, q)| q.granted.is_some()).map(|(qid, _)| qid.0).collect();
        if self.state == State::Ready && self.options.shutdown_on_drop {
            if granted.is_empty() {
                self.delete_io_queues();
            }
            let done = self.notify_shutdown(ShutdownNotification::NORMAL);
            if let Err(error) = done {
                tracing::warn!(ctrl = %self.id, %error, "shutdown was not acknowledged");
            }
        }
        let gone = self.state == State::Failed(FailCause::Gone);
        if self.may_dma && (gone || self.disable().is_err()) {
            tracing::error!(
                ctrl = %self.id,
                "the controller may still do DMA and could not be stopped; its memory is leaked"
            );
            std::mem::forget(self.admin_memory.take());
            std::mem::forget(self.host_memory.take());
            std::mem::forget(std::mem::take(&mut self.quarantine));
            std::mem::forget(std::mem::take(&mut self.abandoned));
            std::mem::forget(std::mem::take(&mut self.queues));
        }
        if !granted.is_empty() {
            // An executor may still write these entries and ring these doorbells.
            tracing::error!(
                ctrl = %self.id, queues = ?granted,
                "dropped while queues are granted: their memory and the bus are leaked"
            );
            std::mem::forget(std::mem::take(&mut self.queues));
            std::mem::forget((self.bus.clone(), self.doorbells.clone()));
        }
    }
}
