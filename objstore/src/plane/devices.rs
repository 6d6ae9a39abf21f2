//! The devices of a plane: their queues, events and slow commands.

use std::collections::{BTreeMap, VecDeque};

use gio_uring::{IoStatus, Outstanding};
use kv_catalog::{DeviceIndex, Region};
use nvme_driver::{
    ControllerEvent, Nanos, QueueGrant, QueueMemory, Quiesced, RateLimit, retry_delay,
};
use nvme_spec::{
    ids::{Nsid, QueueId},
    log::CriticalWarning,
    status::Status,
};

use crate::{config::StoreOptions, device::SharedController, error::StoreError};

/// Interval at which calls that plan work poll the devices.
const POLL_INTERVAL: Nanos = Nanos::from_millis(100);
/// Events kept until the engine takes them; older ones are dropped.
const EVENTS_MAX: usize = 64;

/// A device of a plane.
#[derive(Debug)]
pub struct PlaneDevice {
    /// The controller, in the ready state.
    pub controller: SharedController,
    /// The namespace.
    pub nsid: Nsid,
    /// Region of the files' objects.
    pub data: Region,
    /// At least 16 KiB that the proof of the path may overwrite.
    pub scratch: Region,
    /// Memory of the device's queues, one entry for each; memory of the controller's address space
    /// if empty.
    pub queue_memory: Vec<QueueMemory>,
}

/// An event that a device of a store reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreEvent {
    /// The device.
    pub device: DeviceIndex,
    /// The event.
    pub event: ControllerEvent,
}

/// A device and the plane's resources on it.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) controller: SharedController,
    pub(super) nsid: Nsid,
    /// Region of the files' objects.
    pub(super) region: Region,
    /// The queue pairs that are granted to the I/O kernel.
    queues: Vec<QueueId>,
    /// Set if it has a volatile write cache.
    pub(super) is_volatile: bool,
    /// Command Retry Delay Times of its controller.
    crdt: [u16; 3],
    /// Set when the media has become read-only.
    read_only: bool,
    /// Set if the namespace is write protected.
    is_protected: bool,
    /// Since when it processes no commands, because it activates firmware, and for how long it may.
    paused: Option<Nanos>,
    pause_max: Nanos,
    /// Set when the device's owner wants it back.
    requested: bool,
    /// Set when new queues alone are not enough: it is reset before anything else is done.
    must_reset: bool,
}

/// A reason why the plane cannot simply go on.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The controllers must be recovered.
    Fault(String),
    /// The plane has failed.
    Fatal(String),
}

/// All devices of a plane.
#[derive(Debug)]
pub(super) struct Devices {
    pub(super) all: Vec<Device>,
    /// Events that the engine has not taken.
    events: VecDeque<StoreEvent>,
    /// Time of the next poll.
    next_poll: Nanos,
    /// Commands that were outstanding at the last check, and the time of the next one.
    outstanding: BTreeMap<Outstanding, Slow>,
    next_check: Nanos,
    /// Of messages about slow commands.
    warnings: RateLimit,
}

/// A command that takes long.
#[derive(Debug, Clone, Copy)]
struct Slow {
    /// First check that saw it outstanding; the kernel's clock may differ from ours.
    since: Nanos,
    is_aborted: bool,
}

impl Device {
    /// Creates the queues of device number `at`.
    fn new(at: u32, device: PlaneDevice, options: &StoreOptions) -> Result<Self, StoreError> {
        let PlaneDevice { controller, nsid, data, queue_memory, .. } = device;
        if !queue_memory.is_empty() && queue_memory.len() != usize::from(options.queues) {
            let (given, queues) = (queue_memory.len(), options.queues);
            let problem =
                format!("memory was given for {given} queues, but {queues} are to be made");
            return Err(StoreError::Config { field: "queue_memory", problem });
        }
        let mut queues: Vec<QueueId> = Vec::new();
        {
            let mut controller = controller.lock();
            let depth = options.depth.min(1 << controller.info().entries_max.ilog2());
            for queue in 0..usize::from(options.queues) {
                let made = match queue_memory.get(queue) {
                    Some(memory) => controller.create_queue_pair_in(memory.clone()),
                    None => controller.create_queue_pair(depth),
                };
                queues.push(made.map_err(driver(at))?);
            }
        }
        let mut device = Self {
            controller,
            nsid,
            region: data,
            queues,
            is_volatile: false,
            crdt: [0; 3],
            read_only: false,
            is_protected: false,
            paused: None,
            pause_max: Nanos(0),
            requested: false,
            must_reset: false,
        };
        device.look();
        Ok(device)
    }

    /// Looks at the drive, which is another one after its firmware was replaced.
    fn look(&mut self) {
        let controller = self.controller.lock();
        let info = controller.info();
        (self.is_volatile, self.crdt, self.pause_max) = (info.vwc, info.crdt, info.pause_max);
        let namespace = controller.namespace(self.nsid);
        self.is_protected = namespace.is_ok_and(|namespace| namespace.is_write_protected);
    }

    fn holds_region(&self) -> bool {
        let Self { controller, nsid, region, .. } = self;
        controller.lock().namespace(*nsid).is_ok_and(|space| {
            space.lba_shift == region.lba_shift && region.first.0 + region.lbas <= space.lbas
        })
    }
}

fn driver(at: u32) -> impl Fn(nvme_driver::Error) -> StoreError {
    move |source| StoreError::Driver { device: DeviceIndex(at), source }
}

impl Devices {
    /// Creates the queues of the devices.
    pub(super) fn new(
        devices: Vec<PlaneDevice>,
        options: &StoreOptions,
        now: Nanos,
    ) -> Result<Self, StoreError> {
        let all = (0..).zip(devices).map(|(at, device)| Device::new(at, device, options));
        Ok(Self {
            all: all.collect::<Result<_, _>>()?,
            events: VecDeque::new(),
            next_poll: now,
            outstanding: BTreeMap::new(),
            next_check: now,
            warnings: RateLimit::default(),
        })
    }

    pub(super) fn regions(&self) -> Vec<Region> {
        self.all.iter().map(|device| device.region).collect()
    }

    /// Returns the number of resets of all controllers.
    pub(super) fn resets(&self) -> u64 {
        self.all.iter().map(|device| device.controller.resets()).sum()
    }

    /// Grants every queue of every device.
    pub(super) fn grant(&self) -> Result<Vec<(u32, QueueGrant)>, StoreError> {
        let mut grants = Vec::new();
        for (at, device) in (0..).zip(&self.all) {
            for qid in &device.queues {
                let grant = device.controller.lock().grant(*qid, device.nsid);
                grants.push((at, grant.map_err(driver(at))?));
            }
        }
        Ok(grants)
    }

    /// Returns the proof that no kernel has the grants.
    #[allow(unsafe_code, reason = "only the grantor knows that no executor was started")]
    pub(super) fn never_started(&self) -> Quiesced {
        let mut epochs = Vec::new();
        for device in &self.all {
            epochs.extend(device.controller.lock().grants().map(|grant| grant.epoch));
        }
        // SAFETY: the ring was not set up. It starts its executor last, and an executor whose start
        // fails runs nothing (`IoExecutor::start`).
        unsafe { Quiesced::assert(epochs) }
    }

    /// Takes the queues back. With `recover`, recovers a controller that refuses; without, goes on
    /// with the next queue, and leaks the ones that are not deleted.
    ///
    /// # Errors
    /// Returns the first error.
    pub(super) fn take_back(
        &mut self,
        quiesced: &Quiesced,
        recover: bool,
    ) -> Result<(), nvme_driver::Error> {
        let mut result = Ok(());
        for device in &mut self.all {
            while let Some(qid) = device.queues.last().copied() {
                let mut controller = device.controller.lock();
                let mut taken = controller.reclaim(qid, quiesced);
                if recover {
                    // If deleting the queue fails, a reset is worth it.
                    taken = taken.or_else(|_| {
                        controller.recover(quiesced)?;
                        controller.reclaim(qid, quiesced)
                    });
                    taken?;
                } else if let Err(error) = taken {
                    tracing::warn!(%error, "giving up on a plane that could not be opened");
                    result = result.and(Err(error));
                }
                device.queues.pop();
            }
        }
        result
    }

    /// Recovers the controllers after the I/O kernel has stopped.
    pub(super) fn recover(&mut self, quiesced: &Quiesced, cause: &str) -> Result<(), String> {
        for at in 0..self.all.len() {
            let device = &mut self.all[at];
            let must_reset = std::mem::take(&mut device.must_reset);
            let mut controller = device.controller.lock();
            let reset = if must_reset { controller.reset() } else { Ok(()) };
            let recovered = reset.and_then(|()| controller.recover(quiesced));
            drop(controller);
            recovered.map_err(|error| format!("{cause}; then {error}"))?;
            self.all[at].look();
            self.check_region(at, cause)?;
        }
        Ok(())
    }

    /// Refuses to go on if a namespace no longer holds its data region.
    fn check_region(&self, at: usize, cause: &str) -> Result<(), String> {
        if self.all[at].holds_region() {
            return Ok(());
        }
        Err(format!("{cause}: it no longer holds the store's data region"))
    }

    /// Returns the delay before retry number `attempt` (from 0) of what ended with `status`, or
    /// `None` if it must not be retried.
    pub(super) fn retry_delay(&self, status: IoStatus, attempt: u32) -> Option<Nanos> {
        let again = Status::COMMAND_INTERRUPTED;
        let status = match status {
            // By the plane, because it was slow ([`Devices::abort_slow`]).
            IoStatus::Nvme(status) if status.was_aborted() && !status.dnr() => again,
            IoStatus::Nvme(status) => status,
            // The queue was recovered since.
            IoStatus::Timeout | IoStatus::Fault | IoStatus::Cancelled => again,
            // Data can be damaged on its way.
            IoStatus::Checksum if attempt == 0 => again,
            _ => return None,
        };
        let delays = self.all.iter().map(|device| retry_delay(status, device.crdt, attempt));
        delays.max().flatten()
    }

    /// Refuses to write if media has become read-only.
    pub(super) fn check_writable(&self) -> Result<(), StoreError> {
        match (0..)
            .map(DeviceIndex)
            .zip(&self.all)
            .find(|(_, device)| device.read_only || device.is_protected)
        {
            Some((device, _)) => Err(StoreError::ReadOnly { device }),
            None => Ok(()),
        }
    }

    /// Returns the devices that their owner wants back (unbind, hot removal).
    pub(super) fn requested(&self) -> Vec<DeviceIndex> {
        let devices = (0..).map(DeviceIndex).zip(&self.all);
        devices.filter(|(_, device)| device.requested).map(|(index, _)| index).collect()
    }

    /// Returns the events since the last call.
    pub(super) fn take_events(&mut self) -> Vec<StoreEvent> {
        self.events.drain(..).collect()
    }

    /// Returns true if a poll is due.
    pub(super) fn is_due(&self, now: Nanos) -> bool {
        now >= self.next_poll
    }

    /// Polls every device.
    pub(super) fn poll(&mut self, now: Nanos) -> Result<(), Trouble> {
        self.next_poll = now + POLL_INTERVAL;
        let mut fault = Ok(());
        for at in 0..self.all.len() {
            // A waiter for a layer must not wait for a journal or a deallocation.
            let Some(mut controller) = self.all[at].controller.try_lock() else { continue };
            let polled = controller.poll_events();
            drop(controller);
            match polled {
                Ok(events) => {
                    for event in events {
                        match self.take_event(at, event, now) {
                            Err(Trouble::Fatal(cause)) => return Err(Trouble::Fatal(cause)),
                            other => fault = fault.and(other),
                        }
                    }
                }
                // It was removed, or a recovery resets it.
                Err(error) => {
                    fault = fault.and(Err(Trouble::Fault(format!("device {at}: {error}"))));
                }
            }
        }
        fault
    }

    fn take_event(&mut self, at: usize, event: ControllerEvent, now: Nanos) -> Result<(), Trouble> {
        let device = &mut self.all[at];
        let mut fault = Ok(());
        match &event {
            ControllerEvent::Health { warnings, .. } => {
                device.read_only = warnings.contains(CriticalWarning::READ_ONLY);
            }
            ControllerEvent::Requested => device.requested = true,
            ControllerEvent::NamespacesChanged { stale, .. } if !stale.is_empty() => {
                let cause = format!("namespace {} of device {at} changed", device.nsid);
                self.check_region(at, &cause).map_err(Trouble::Fatal)?;
                fault = Err(Trouble::Fault(cause));
            }
            // The fate of commands in flight and of data on the link is unknown.
            ControllerEvent::PcieError => {
                device.must_reset = true;
                fault = Err(Trouble::Fault(format!("device {at} had a PCIe error")));
            }
            ControllerEvent::Error { .. }
            | ControllerEvent::NamespacesChanged { .. }
            | ControllerEvent::FirmwareActivating
            | ControllerEvent::Other(_) => {}
            ControllerEvent::Paused => device.paused = Some(now),
            ControllerEvent::Resumed => device.paused = None,
            other => tracing::warn!(device = at, event = other.name(), "an event of a new kind"),
        }
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(StoreEvent { device: DeviceIndex(at as u32), event });
        fault
    }

    /// Asks controllers to abort commands outstanding for two thirds of the command timeout, one by
    /// one, before their queue is abandoned with everything outstanding on it. Their completions
    /// report the result. Checks eight times per timeout, and never waits. Commands of a paused
    /// controller are late for a good reason, up to its limit.
    pub(super) fn abort_slow(
        &mut self,
        now: Nanos,
        timeout: Nanos,
        outstanding: impl FnOnce() -> Vec<Outstanding>,
    ) {
        if now < self.next_check {
            return;
        }
        self.next_check = now + Nanos(timeout.0 / 8);
        let before = std::mem::take(&mut self.outstanding);
        for command in outstanding() {
            let mut slow =
                before.get(&command).copied().unwrap_or(Slow { since: now, is_aborted: false });
            let Outstanding { device, qid, cid, .. } = command;
            let drive = &self.all[device as usize];
            if drive.paused.is_some_and(|since| now < since + drive.pause_max) {
                // Its time counts from the end of the pause (Base 2.1, CSTS.PP and MTFA).
                slow.since = now;
            }
            // A waiter for a layer must not wait for a journal.
            if !slow.is_aborted
                && now - slow.since >= Nanos(timeout.0 / 3 * 2)
                && let Some(mut controller) = drive.controller.try_lock()
            {
                slow.is_aborted = controller.begin_abort(qid, cid);
                if let Some(suppressed) = self.warnings.allow(now) {
                    tracing::warn!(
                        ctrl = controller.id(),
                        qid = qid.0,
                        cid = cid.0,
                        asked = slow.is_aborted,
                        suppressed,
                        "a command takes long; aborting it"
                    );
                }
            }
            self.outstanding.insert(command, slow);
        }
    }

    /// Gives the controllers up. Their queues were taken back.
    pub(super) fn take_controllers(&mut self) -> Vec<SharedController> {
        self.all.drain(..).map(|device| device.controller).collect()
    }
}
