//! The controller's state machine: attach, enable, identify, reset, shut down.

use std::{collections::BTreeMap, sync::Arc};

use nvme_spec::{
    admin::{AdminOpcode, Cns, FeatureId, Identify, NumberOfQueues, SetFeatures},
    identify::{ActiveNamespaces, IdentifyController},
    ids::{Cid, Nsid, QueueId},
    reg::{self, Aqa, Cap, Cc, Csts, ShutdownNotification, ShutdownStatus, Version},
    sqe::Sqe,
};
use zerocopy::FromBytes;

use crate::{
    admin::{ADMIN_DEPTH, AdminFault, AdminMemory, AdminQueue, DATA_BYTES},
    bus::{Bus, DoorbellPage, Interrupt},
    clock::{Clock, Nanos, Waiter},
    dma::DmaSlice,
    error::{CommandId, Error, FailCause, TimeoutOutcome},
    grants::{IoQueue, OnDevice},
    health::Seen,
    info::{Capabilities, ControllerInfo},
    io::{HostMemory, HostQueue},
    namespace::{NamespaceError, NamespaceInfo},
    options::{ControllerOptions, WaitMode},
    queue::Completion,
    rate::RateLimit,
    wait::{Dead, Env},
};

/// Namespaces looked at; a controller with more is taken at its word for the first ones.
const NAMESPACES_MAX: usize = 4096;

/// Where a controller is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// CC.EN is 0 or not yet known.
    Disabled,
    /// Being set up for the first time.
    Enabling,
    /// Commands may be sent.
    Ready,
    /// Being reset and set up again.
    Resetting,
    /// Not to be used any more.
    Failed(FailCause),
    /// Shut down in an orderly way.
    Shutdown,
}

/// A controller, set up and owned by this process.
///
/// Blocking calls take `&mut self`: one owner, no locks. Executors drive granted queues beside it.
#[derive(Debug)]
pub struct Controller {
    pub(crate) bus: Arc<dyn Bus>,
    /// What granted doorbells are part of.
    pub(crate) doorbells: DoorbellPage,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) id: Arc<str>,
    pub(crate) options: ControllerOptions,
    pub(crate) state: State,
    pub(crate) caps: Capabilities,
    pub(crate) info: ControllerInfo,
    pub(crate) namespaces: Vec<NamespaceInfo>,
    pub(crate) refused: Vec<(Nsid, NamespaceError)>,
    pub(crate) admin: Option<AdminQueue>,
    pub(crate) admin_memory: Option<AdminMemory>,
    pub(crate) host: Option<HostQueue>,
    pub(crate) host_memory: Option<HostMemory>,
    pub(crate) queues: BTreeMap<QueueId, IoQueue>,
    /// Data of commands that the controller may still carry out.
    pub(crate) quarantine: Vec<DmaSlice>,
    /// The controller knows addresses of this process's memory and may be using them.
    pub(crate) told: bool,
    pub(crate) warnings: RateLimit,
    pub(crate) seen: Seen,
}

impl Controller {
    /// Takes over the controller behind `bus`: resets and enables it, identifies it and its
    /// namespaces, and creates the queue of the blocking calls.
    ///
    /// # Errors
    /// [`Error`] when it is not there, does not become ready in time (CAP.TO), misbehaves, or says
    /// things about itself that cannot be or cannot be worked with.
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
            info,
            namespaces: Vec::new(),
            refused: Vec::new(),
            admin: None,
            admin_memory: Some(admin_memory),
            host: None,
            host_memory: None,
            queues: BTreeMap::new(),
            quarantine: Vec::new(),
            told: false,
            warnings: RateLimit::default(),
            seen: Seen::default(),
        };
        controller.set_state(State::Enabling);
        match controller.bring_up() {
            Ok(()) => Ok(controller),
            Err(error) => {
                controller.fail(error.cause());
                Err(error)
            }
        }
    }

    /// What the controller is.
    #[must_use]
    pub fn info(&self) -> &ControllerInfo {
        &self.info
    }

    /// What a person calls it: the bus's name for it.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The namespaces that can be used, by ascending identifier.
    #[must_use]
    pub fn namespaces(&self) -> &[NamespaceInfo] {
        &self.namespaces
    }

    /// Active namespaces that cannot be used, and why.
    #[must_use]
    pub fn refused_namespaces(&self) -> &[(Nsid, NamespaceError)] {
        &self.refused
    }

    /// Where the controller is in its life.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// The bus it lives on.
    #[must_use]
    pub fn bus(&self) -> &Arc<dyn Bus> {
        &self.bus
    }

    /// The clock its deadlines are measured with.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// A namespace that can be used.
    ///
    /// # Errors
    /// [`Error::Namespace`] with the reason when it cannot.
    pub fn namespace(&self, nsid: Nsid) -> Result<&NamespaceInfo, Error> {
        if let Some(found) = self.namespaces.iter().find(|n| n.nsid == nsid) {
            return Ok(found);
        }
        let refused = self.refused.iter().find(|(id, _)| *id == nsid).map(|(_, why)| *why);
        let source = refused.unwrap_or(NamespaceError::Unknown);
        Err(Error::Namespace { ctrl: self.id.clone(), nsid, source })
    }

    /// Resets the controller and sets it up again, whatever state it is in. All queues are gone
    /// from the device then: the driver's own and those not granted are created anew at once,
    /// granted ones by [`Controller::recover`].
    ///
    /// # Errors
    /// As [`Controller::attach`]; [`Error::Closed`] after a shutdown.
    pub fn reset(&mut self) -> Result<(), Error> {
        if self.state == State::Shutdown {
            return Err(Error::Closed { ctrl: self.id.clone() });
        }
        self.reset_controller()
    }

    pub(crate) fn reset_controller(&mut self) -> Result<(), Error> {
        let span = tracing::info_span!("reset", ctrl = %self.id);
        let _entered = span.enter();
        self.set_state(State::Resetting);
        let done = self.bring_up();
        if let Err(error) = &done {
            tracing::error!(ctrl = %self.id, %error, "the controller could not be reset");
            self.fail(error.cause());
        }
        done
    }

    /// Disable, enable, identify, queues, events. From any state to Ready, or an error that the
    /// caller turns into Failed.
    fn bring_up(&mut self) -> Result<(), Error> {
        self.disable()?;
        self.enable()?;
        self.identify_all()?;
        self.set_number_of_queues()?;
        self.enable_events()?;
        self.create_host_queue()?;
        self.recreate_idle_queues()?;
        // Last: an admin command that is not answered resets a controller that is ready, and would
        // do so again and again from in here.
        self.set_state(State::Ready);
        tracing::info!(
            ctrl = %self.id, model = %self.info.model, firmware = %self.info.firmware,
            version = %self.info.version, namespaces = self.namespaces.len(),
            io_queues = self.info.io_queues, "controller is ready"
        );
        Ok(())
    }

    /// Clears CC.EN and waits for CSTS.RDY = 0. From then on the controller does no DMA: what was
    /// kept only because of it is let go.
    pub(crate) fn disable(&mut self) -> Result<(), Error> {
        self.admin = None;
        self.host = None;
        let cc = Cc(self.read32(reg::CC)?);
        let csts = self.status()?;
        if cc.en() == 1 {
            if csts.rdy() == 0 && csts.cfs() == 0 {
                // Clearing CC.EN before CSTS.RDY followed it has undefined results (Base, CC.EN).
                let _ = self.wait_ready(1);
            }
            self.write32(reg::CC, cc.with_en(0).with_shn(0).0)?;
        }
        self.wait_ready(0)?;
        self.told = false;
        for queue in self.queues.values_mut() {
            queue.device = OnDevice::Absent;
        }
        self.quarantine.clear();
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
        self.told = true;
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
        self.info = ControllerInfo::check(&data, &self.caps, self.options.descriptors)
            .map_err(|what| Error::Implausible { ctrl: self.id.clone(), what })?;
        self.info.io_queues = io_queues;
        self.rescan()
    }

    /// Identifies the namespaces anew. [`Controller::poll_events`] does so by itself when the
    /// controller reports that they changed.
    ///
    /// # Errors
    /// As any admin command.
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
        Ok(())
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
            // Not the last entry: a page of nonsense may have one without having a first.
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
        // A controller may allocate more than was asked for; those are not used.
        self.info.io_queues = given.nsq_z.min(given.ncq_z).min(want_z);
        Ok(())
    }

    /// An Identify structure as it is on the wire.
    ///
    /// # Errors
    /// As any admin command.
    pub(crate) fn identify<T: FromBytes>(&mut self, cns: Cns, nsid: Nsid) -> Result<T, Error> {
        let mut sqe = Sqe::new(AdminOpcode::IDENTIFY.0, Cid(0), nsid);
        Identify { cns, cntid: 0 }.write_to(&mut sqe);
        self.admin_read("identify", sqe)
    }

    /// An admin command that returns at most one page of data.
    pub(crate) fn admin_read<T: FromBytes>(
        &mut self,
        what: &'static str,
        sqe: Sqe,
    ) -> Result<T, Error> {
        let mut bytes = [0u8; DATA_BYTES];
        let len = size_of::<T>().min(DATA_BYTES);
        self.admin_read_bytes(what, sqe, &mut bytes[..len])?;
        T::read_from_bytes(&bytes[..len]).map_err(|_| Error::Implausible {
            ctrl: self.id.clone(),
            what: format!("{what} returned data of a wrong size"),
        })
    }

    pub(crate) fn admin_read_bytes(
        &mut self,
        what: &'static str,
        sqe: Sqe,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let ctrl = self.id.clone();
        let Some(memory) = self.admin_memory.as_mut() else { return Err(Error::Closed { ctrl }) };
        memory.data.zero();
        let prp1 = memory.data.iova().0;
        self.admin_command(what, sqe.with_prps(prp1, 0), self.options.admin_timeout)?;
        let Some(memory) = self.admin_memory.as_ref() else { return Err(Error::Closed { ctrl }) };
        memory.data.read(0, into).map_err(|source| Error::Dma { ctrl, source })
    }

    /// Sends an admin command and waits. What the controller does wrong moves it to Failed; one
    /// that does not answer is reset.
    pub(crate) fn admin_command(
        &mut self,
        what: &'static str,
        sqe: Sqe,
        timeout: Nanos,
    ) -> Result<Completion, Error> {
        self.usable()?;
        let completion = match self.admin_raw(&sqe, timeout) {
            Ok(completion) => completion,
            Err(fault) => return Err(self.admin_fault(what, &sqe, timeout, fault)),
        };
        if completion.status.is_success() {
            return Ok(completion);
        }
        let command = self.admin_id(what, &sqe, completion.cid);
        Err(Error::Command { command, status: completion.status })
    }

    /// The same without any consequences, for the recovery ladder.
    pub(crate) fn admin_raw(
        &mut self,
        sqe: &Sqe,
        timeout: Nanos,
    ) -> Result<Completion, AdminFault> {
        let Some(admin) = self.admin.as_mut() else { return Err(AdminFault::Full) };
        let (clock, bus) = (&*self.clock, &*self.bus);
        admin.execute(Env { clock, bus, pause_max: self.info.pause_max }, sqe, timeout)
    }

    fn admin_fault(
        &mut self,
        what: &'static str,
        sqe: &Sqe,
        waited: Nanos,
        fault: AdminFault,
    ) -> Error {
        let ctrl = self.id.clone();
        let cid = match fault {
            AdminFault::Dead(dead) => return self.dead(dead),
            AdminFault::Device(source) => {
                self.fail(FailCause::Misbehaved(source));
                return Error::Misbehaved { ctrl, source };
            }
            AdminFault::Timeout(cid) => cid,
            AdminFault::Full => Cid(0xFFFF),
        };
        let command = self.admin_id(what, sqe, cid);
        tracing::error!(ctrl = %self.id, what, cid = cid.0, "admin command was not answered");
        // While it is being set up, whoever set it up decides; in use, a reset is what is left.
        let outcome = if self.state == State::Ready && self.reset_controller().is_ok() {
            TimeoutOutcome::ControllerReset
        } else {
            self.fail(FailCause::AdminTimeout { what });
            TimeoutOutcome::ControllerFailed
        };
        Error::Timeout { command, waited, outcome }
    }

    fn admin_id(&self, what: &'static str, sqe: &Sqe, cid: Cid) -> Box<CommandId> {
        let (ctrl, qid) = (self.id.clone(), QueueId::ADMIN);
        Box::new(CommandId { ctrl, what, nsid: sqe.nsid(), qid, cid, range: None })
    }

    /// Sets a feature and returns completion dword 0.
    ///
    /// # Errors
    /// As any admin command.
    pub fn set_feature(&mut self, fid: FeatureId, nsid: Nsid, value: u32) -> Result<u32, Error> {
        let mut sqe = Sqe::new(AdminOpcode::SET_FEATURES.0, Cid(0), nsid);
        SetFeatures { fid, save: false, value }.write_to(&mut sqe);
        Ok(self.admin_command("set features", sqe, self.options.admin_timeout)?.result)
    }

    /// Tells the controller that it will be powered off or left alone (CC.SHN), waits until it
    /// says that it is done (RTD3E), and disables it. Its data is safe without a flush then.
    ///
    /// # Errors
    /// [`Error::QueueState`] while queues are granted; [`Error`] when the controller does not
    /// finish in time, in which case it is failed.
    pub fn shutdown(&mut self) -> Result<(), Error> {
        if self.state == State::Shutdown {
            return Ok(());
        }
        if let Some((&qid, _)) = self.queues.iter().find(|(_, q)| q.granted.is_some()) {
            let what = "is granted; reclaim() it before the shutdown".into();
            return Err(Error::QueueState { ctrl: self.id.clone(), qid, what });
        }
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
                let ctrl = self.id.clone();
                return Err(Error::NotReady { ctrl, ready: csts.rdy(), waited, csts: csts.0 });
            }
        }
    }

    /// Whether commands may be sent.
    pub(crate) fn usable(&self) -> Result<(), Error> {
        let ctrl = self.id.clone();
        match self.state {
            State::Failed(cause) => Err(Error::Failed { ctrl, cause }),
            State::Shutdown => Err(Error::Closed { ctrl }),
            _ => Ok(()),
        }
    }

    /// Moves to Failed, unless it already is: the first cause is the one worth knowing.
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

    /// Interrupt `vector`, if the blocking calls wait for interrupts.
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
    Capabilities::check(cap, version, bus.doorbells().stride())
        .map_err(|what| Error::Implausible { ctrl: id.clone(), what })
}

impl Drop for Controller {
    fn drop(&mut self) {
        let granted: Vec<u16> =
            self.queues.iter().filter(|(_, q)| q.granted.is_some()).map(|(qid, _)| qid.0).collect();
        if self.state == State::Ready && self.options.shutdown_on_drop {
            let done = self.notify_shutdown(ShutdownNotification::NORMAL);
            if let Err(error) = done {
                tracing::warn!(ctrl = %self.id, %error, "shutdown was not acknowledged");
            }
        }
        let gone = self.state == State::Failed(FailCause::Gone);
        if self.told && (gone || self.disable().is_err()) {
            tracing::error!(
                ctrl = %self.id,
                "the controller may still do DMA and could not be stopped; its memory is leaked"
            );
            std::mem::forget(self.admin_memory.take());
            std::mem::forget(self.host_memory.take());
            std::mem::forget(std::mem::take(&mut self.quarantine));
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
