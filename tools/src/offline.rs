//! Devices of a store that is not open: for `format`, `inspect`, `fsck` and `scrub`.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use nvme_driver::{Clock, ControllerOptions, MonotonicClock};
use objstore::{Medium, Owner, Store, StoreDevice, StoreError};
use ripieno_stack::{Controllers, Place, PoolMemory, StackConfig, StoreDir, StoreDirError};

use crate::problem::{Problem, user_error};
use crate::terminal::say;

/// The attached devices. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Offline {
    pub(crate) controllers: Controllers,
    place: Place,
}

impl Offline {
    /// Attaches the driver to the store's devices. Writes nothing.
    pub(crate) fn open(config: &StackConfig) -> anyhow::Result<Self> {
        match config.drives() {
            [] => {
                let dir = StoreDir::open(config.dir().map_err(user_error)?);
                let dir = dir.map_err(|error| user_error(error.into()))?;
                config.check_dir(&dir).map_err(user_error)?;
                Self::attach(dir)
            }
            drives => Self::attach(Place::drives(drives)),
        }
    }

    /// Like [`Offline::open`], for damage checks: a device that is missing or too short, and a
    /// store directory whose parameters cannot be read, are findings and not user errors. Unless
    /// it `writes`, the file system may be read-only.
    pub(crate) fn examine(config: &StackConfig, writes: bool) -> anyhow::Result<Self> {
        config.check(&PoolMemory::Own { blocks: 0 }).map_err(user_error)?;
        if !config.drives().is_empty() {
            return Self::open(config);
        }
        let dir = config.dir().map_err(user_error)?;
        let opened = if writes { StoreDir::open(dir) } else { StoreDir::open_to_read(dir) };
        match opened {
            Ok(store_dir) => {
                config.check_dir(&store_dir).map_err(user_error)?;
                if store_dir.is_read_only() {
                    let dir = dir.display();
                    say(format_args!("note: {dir} is on a read-only file system: it is only read"));
                }
                Self::attach(store_dir)
            }
            Err(error @ (StoreDirError::Device { .. } | StoreDirError::Damaged { .. })) => {
                Err(error.into())
            }
            Err(error) => Err(user_error(error.into())),
        }
    }

    /// Attaches the devices of a store.
    pub(crate) fn attach(place: impl Into<Place>) -> anyhow::Result<Self> {
        let place = place.into();
        let controllers =
            place.controllers(&clock(), &ControllerOptions::default(), None).map_err(user_error)?;
        Ok(Self { controllers, place })
    }

    /// Returns true if nothing can be written to the devices.
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(&self.place, Place::StoreDir(dir) if dir.is_read_only())
    }

    /// Wraps emulated drives with data outside the store's region.
    #[cfg(test)]
    pub(crate) fn of_emulated(controllers: Controllers) -> Self {
        Self { controllers, place: Place::drives(&[]) }
    }

    /// Returns the store's regions.
    pub(crate) fn media(&self) -> anyhow::Result<Vec<Medium>> {
        Ok(Store::media(&self.controllers.devices)?)
    }

    /// Returns the process that has the store open through another controller, and the device.
    /// Waits a few seconds if a process that has not closed the store may be alive.
    pub(crate) fn living_owner(&self) -> anyhow::Result<Option<(String, Owner)>> {
        Ok(Store::living_owner(&self.controllers.devices)?)
    }

    /// Refuses to write to devices that another process has open.
    pub(crate) fn demand_alone(&self) -> anyhow::Result<()> {
        match self.living_owner()? {
            Some((device, owner)) => {
                bail!(Problem::new(StoreError::Owned { device, owner }.to_string(), ""))
            }
            None => Ok(()),
        }
    }

    /// Returns the whole namespaces that contain the regions.
    pub(crate) fn namespaces(&self) -> anyhow::Result<Vec<Medium>> {
        let whole = |device: &StoreDevice| StoreDevice {
            controller: device.controller.clone(),
            nsid: device.nsid,
            region: None,
            queue_memory: Vec::new(),
        };
        let devices: Vec<StoreDevice> = self.controllers.devices.iter().map(whole).collect();
        Ok(Store::media(&devices)?)
    }

    /// Shuts the devices down, and removes a new store directory that got no store. All their
    /// [`Medium`] values must have been dropped.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        self.shut_down().map(|_| ())
    }

    /// Like [`Offline::close`], and marks a new store directory as ready.
    pub(crate) fn close_ready(self) -> anyhow::Result<()> {
        match self.shut_down()? {
            Place::StoreDir(mut store_dir) => Ok(store_dir.set_ready()?),
            Place::Drives(_) => Ok(()),
        }
    }

    fn shut_down(self) -> anyhow::Result<Place> {
        for device in &self.controllers.devices {
            device.controller.lock().shutdown().context("shutting a device down")?;
        }
        Ok(self.place)
    }
}

/// Returns the clock of the devices.
pub(crate) fn clock() -> Arc<dyn Clock> {
    Arc::new(MonotonicClock::default())
}
