//! Events that the devices report.

use nvme_driver::{ControllerEvent, Nanos};
use nvme_spec::log::CriticalWarning;

use super::{Device, Plane};
use kv_catalog::DeviceIndex;

use crate::error::StoreError;

/// Interval at which calls that plan work poll the devices.
const POLL_INTERVAL: Nanos = Nanos::from_millis(100);
/// Events kept until the engine takes them; older ones are dropped.
const EVENTS_MAX: usize = 64;

/// An event that a device of a store reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreEvent {
    /// The device.
    pub device: DeviceIndex,
    /// The event.
    pub event: ControllerEvent,
}

impl Plane {
    /// Polls every device and returns the events since the last call. Without any, it costs one
    /// register read per device. `lookup`, `allocate` and other calls that plan work poll at most
    /// every 100 ms, and so does waiting for a layer; starting one does not. So an idle engine
    /// should call this periodically, for example once a second.
    ///
    /// The store reacts by itself where it can: a controller with a fatal status is recovered, one
    /// with a PCIe error is reset, media that became read-only refuses [`crate::Store::allocate`],
    /// and a namespace that changed but still holds the data region gets new grants. After
    /// [`ControllerEvent::Requested`] the store must be closed: the unbind of the device waits
    /// for that.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if a device was removed, cannot be recovered, or its
    /// namespace no longer holds the data region.
    pub fn poll_events(&mut self) -> Result<Vec<StoreEvent>, StoreError> {
        self.check()?;
        self.poll_devices()?;
        Ok(self.events.drain(..).collect())
    }

    /// Returns the devices that their owner wants back (unbind, hot removal): close the store soon.
    pub fn requested_devices(&self) -> impl Iterator<Item = DeviceIndex> + '_ {
        let devices = (0..).map(DeviceIndex).zip(&self.devices);
        devices.filter(|(_, device)| device.requested).map(|(index, _)| index)
    }

    /// Refuses to write if media has become read-only.
    pub(super) fn check_writable(&self) -> Result<(), StoreError> {
        match (0..).map(DeviceIndex).zip(&self.devices).find(|(_, device)| device.read_only) {
            Some((device, _)) => Err(StoreError::ReadOnly { device }),
            None => Ok(()),
        }
    }

    /// Does the periodic work that is due.
    pub(super) fn attend(&mut self) -> Result<(), StoreError> {
        self.abort_late();
        if self.clock.now() >= self.next_poll { self.poll_devices() } else { Ok(()) }
    }

    fn poll_devices(&mut self) -> Result<(), StoreError> {
        self.next_poll = self.clock.now() + POLL_INTERVAL;
        for at in 0..self.devices.len() {
            // A waiter for a layer must not wait for a journal or a deallocation.
            let Some(mut controller) = self.devices[at].controller.try_lock() else { continue };
            let polled = controller.poll_events();
            drop(controller);
            match polled {
                Ok(events) => {
                    for event in events {
                        self.take_event(at, event)?;
                    }
                }
                // It was removed, or a recovery resets it.
                Err(error) => {
                    self.fault.get_or_insert_with(|| format!("device {at}: {error}"));
                }
            }
        }
        self.after_completions()
    }

    fn take_event(&mut self, at: usize, event: ControllerEvent) -> Result<(), StoreError> {
        let device = &mut self.devices[at];
        match &event {
            ControllerEvent::Health { warnings, .. } => {
                device.read_only = warnings.contains(CriticalWarning::READ_ONLY);
            }
            ControllerEvent::Requested => device.requested = true,
            ControllerEvent::NamespacesChanged { stale, .. } if !stale.is_empty() => {
                let cause = format!("namespace {} of device {at} changed", device.nsid);
                self.check_region(at, &cause)?;
                self.fault.get_or_insert(cause);
            }
            // The fate of commands in flight and of data on the link is unknown.
            ControllerEvent::PcieError => {
                device.must_reset = true;
                self.fault.get_or_insert_with(|| format!("device {at} had a PCIe error"));
            }
            ControllerEvent::Error { .. }
            | ControllerEvent::NamespacesChanged { .. }
            | ControllerEvent::FirmwareActivating
            | ControllerEvent::Paused
            | ControllerEvent::Resumed
            | ControllerEvent::Other(_) => {}
            other => tracing::warn!(device = at, event = other.name(), "an event of a new kind"),
        }
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(StoreEvent { device: DeviceIndex(at as u32), event });
        Ok(())
    }

    /// Fails the store if a device's namespace no longer holds the data region.
    pub(super) fn check_region(&mut self, at: usize, cause: &str) -> Result<(), StoreError> {
        let Device { controller, nsid, region, .. } = &self.devices[at];
        let holds = controller.lock().namespace(*nsid).is_ok_and(|space| {
            space.lba_shift == region.lba_shift && region.first.0 + region.lbas <= space.lbas
        });
        if holds {
            return Ok(());
        }
        Err(self.fail(format!("{cause}: it no longer holds the store's data region")))
    }
}
