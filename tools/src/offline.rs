//! Devices of a store that is not open: for `format`, `inspect`, `fsck` and `scrub`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use nvme_driver::{Clock, ControllerOptions, MonotonicClock};
use objstore::{Medium, Store, StoreDevice};
use ripieno_stack::{Fleet, Home, HomeError, Place};

use crate::devices::{self, MediaChoice};
use crate::problem::{Problem, told};

/// Location of a store.
#[derive(Debug, Clone, Args)]
pub(crate) struct Where {
    /// The store's home: file:DIR
    #[arg(long, value_name = "file:DIR", value_parser = devices::media_to_be,
        required_unless_present = "device", conflicts_with = "device")]
    pub(crate) media: Option<MediaChoice>,

    /// The store's drives, in their order: vfio:0000:65:00.0[,vfio:...]. May be repeated
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Vec<String>,
}

impl Where {
    /// Returns the directory; `None` for drives.
    ///
    /// # Errors
    /// Returns a [`Problem`] for media in memory.
    pub(crate) fn dir(&self) -> Result<Option<&PathBuf>, Problem> {
        match &self.media {
            Some(MediaChoice::File(dir)) => Ok(Some(dir)),
            None => Ok(None),
            Some(MediaChoice::Memory) => Err(Problem::new(
                "--media memory: media in memory go with the process that has them",
                "say --media file:DIR, or --device vfio:...",
            )),
        }
    }
}

/// The attached devices. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Offline {
    pub(crate) fleet: Fleet,
    place: Place,
}

impl Offline {
    /// Attaches the driver to the store's devices. Writes nothing.
    ///
    /// # Errors
    /// Returns a [`Problem`] if the home is missing or in use, and any error of the layers below.
    pub(crate) fn open(place: &Where) -> anyhow::Result<Self> {
        match place.dir()? {
            Some(dir) => Self::of_home(Home::open(dir).map_err(|error| told(error.into()))?),
            None => Self::of_drives(place),
        }
    }

    /// Like [`Offline::open`], for damage checks: a device that is missing or too short, and a home
    /// whose parameters cannot be read, are findings and not user errors.
    pub(crate) fn examine(place: &Where) -> anyhow::Result<Self> {
        let Some(dir) = place.dir()? else { return Self::of_drives(place) };
        match Home::open(dir) {
            Ok(home) => Self::of_home(home),
            Err(error @ (HomeError::Device { .. } | HomeError::Damaged { .. })) => {
                Err(error.into())
            }
            Err(error) => Err(told(error.into())),
        }
    }

    fn of_drives(place: &Where) -> anyhow::Result<Self> {
        let addresses = devices::drives(&place.device)?;
        if addresses.is_empty() {
            let message = "--device emu: a software controller's store is in its home";
            bail!(Problem::new(message, "say --media file:DIR, or --device vfio:..."));
        }
        Self::attach(Place::drives(&addresses))
    }

    /// Attaches the devices of a home.
    pub(crate) fn of_home(home: Home) -> anyhow::Result<Self> {
        Self::attach(home.into())
    }

    /// Attaches the devices of a store.
    pub(crate) fn attach(place: Place) -> anyhow::Result<Self> {
        let fleet = place.fleet(&clock(), &ControllerOptions::default(), None).map_err(told)?;
        Ok(Self { fleet, place })
    }

    /// Wraps emulated drives with data outside the store's region.
    #[cfg(test)]
    pub(crate) fn of_emulated(fleet: Fleet) -> Self {
        Self { fleet, place: Place::drives(&[]) }
    }

    /// Returns the store's regions.
    ///
    /// # Errors
    /// Returns an error if a device cannot hold a store.
    pub(crate) fn media(&self) -> anyhow::Result<Vec<Medium>> {
        Ok(Store::media(&self.fleet.devices)?)
    }

    /// Returns the whole namespaces that contain the regions.
    pub(crate) fn namespaces(&self) -> anyhow::Result<Vec<Medium>> {
        let whole = |device: &StoreDevice| StoreDevice {
            controller: device.controller.clone(),
            nsid: device.nsid,
            region: None,
            queue_memory: Vec::new(),
        };
        let devices: Vec<StoreDevice> = self.fleet.devices.iter().map(whole).collect();
        Ok(Store::media(&devices)?)
    }

    /// Shuts the devices down, and removes a new home that got no store. All their [`Medium`]
    /// values must have been dropped.
    ///
    /// # Errors
    /// Returns an error if a device does not shut down.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        self.shut_down().map(|_| ())
    }

    /// Like [`Offline::close`], and marks a new home as ready.
    pub(crate) fn close_ready(self) -> anyhow::Result<()> {
        match self.shut_down()? {
            Place::Home(mut home) => Ok(home.set_ready()?),
            Place::Drives(_) => Ok(()),
        }
    }

    fn shut_down(self) -> anyhow::Result<Place> {
        for device in &self.fleet.devices {
            device.controller.lock().shutdown().context("shutting a device down")?;
        }
        Ok(self.place)
    }
}

/// Returns the clock of the devices.
pub(crate) fn clock() -> Arc<dyn Clock> {
    Arc::new(MonotonicClock::default())
}
