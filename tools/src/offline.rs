//! Devices of a store that is not open: for `format`, `inspect`, `fsck` and `scrub`.

use std::sync::Arc;

use anyhow::Context as _;
use nvme_driver::{ControllerOptions, DmaSpace};
use objstore::{Medium, Owner, Store, StoreDevice};
use ripieno_stack::{Devices, PoolMemory, StackConfig, StoreDir, StoreDirError};

use crate::drives;
use crate::problem::user_error;
use crate::terminal::say;

/// The attached devices. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Offline {
    pub(crate) attached: Vec<StoreDevice>,
    pub(crate) space: Arc<dyn DmaSpace>,
    pub(crate) devices: Devices,
}

impl Offline {
    /// Attaches the driver to the store's devices. Writes nothing.
    pub(crate) fn open(config: &StackConfig) -> anyhow::Result<Self> {
        Self::attach(Devices::find(config).map_err(user_error)?)
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
    pub(crate) fn attach(devices: impl Into<Devices>) -> anyhow::Result<Self> {
        let mut devices = devices.into();
        devices.attach(&ControllerOptions::default(), None).map_err(user_error)?;
        let (attached, space) = devices.take_attached();
        Ok(Self { attached, space, devices })
    }

    /// Returns the store's regions.
    pub(crate) fn media(&self) -> anyhow::Result<Vec<Medium>> {
        Ok(Store::media(&self.attached)?)
    }

    /// Returns the process that has the store open through another controller, and the device.
    /// Waits a few seconds if a process that has not closed the store may be alive.
    pub(crate) fn living_owner(&self) -> anyhow::Result<Option<(String, Owner)>> {
        Ok(Store::living_owner(&self.attached)?)
    }

    /// Refuses to write to devices that another process has open.
    pub(crate) fn demand_alone(&self) -> anyhow::Result<()> {
        drives::check_unowned(&self.attached)
    }

    /// Shuts the devices down, and removes a new store directory that got no store. All their
    /// [`Medium`] values must have been dropped.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        self.shut_down().map(|_| ())
    }

    /// Like [`Offline::close`], and marks a new store directory as ready.
    pub(crate) fn close_ready(self) -> anyhow::Result<()> {
        Ok(self.shut_down()?.set_ready()?)
    }

    fn shut_down(self) -> anyhow::Result<Devices> {
        for device in &self.attached {
            device.controller.lock().shutdown().context("shutting a device down")?;
        }
        Ok(self.devices)
    }
}
