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

/// Where a store is.
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
    /// The directory; none for drives.
    ///
    /// # Errors
    /// For media in memory.
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

/// The devices, attached. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Offline {
    pub(crate) fleet: Fleet,
    place: Place,
}

impl Offline {
    /// Attaches the driver to the store's devices. Writes nothing.
    ///
    /// # Errors
    /// [`Problem`] when the home is not there or in use; else whatever a layer refuses.
    pub(crate) fn open(place: &Where) -> anyhow::Result<Self> {
        match place.dir()? {
            Some(dir) => Self::of_home(Home::open(dir).map_err(|error| told(error.into()))?),
            None => Self::of_drives(place),
        }
    }

    /// As [`Offline::open`], to look for damage: a device that is gone or too short, and a home
    /// whose parameters cannot be read, are what is looked for, and no mistake of the user.
    ///
    /// # Errors
    /// As for [`Offline::open`], but for that.
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

    /// The devices of a home.
    ///
    /// # Errors
    /// As for [`Offline::open`].
    pub(crate) fn of_home(home: Home) -> anyhow::Result<Self> {
        Self::attach(home.into())
    }

    /// Any devices of a store.
    ///
    /// # Errors
    /// As for [`Offline::open`].
    pub(crate) fn attach(place: Place) -> anyhow::Result<Self> {
        let fleet = place.fleet(&clock(), &ControllerOptions::default(), None).map_err(told)?;
        Ok(Self { fleet, place })
    }

    /// Devices as drives have them, with something beside the store's region.
    #[cfg(test)]
    pub(crate) fn of_emulated(fleet: Fleet) -> Self {
        Self { fleet, place: Place::drives(&[]) }
    }

    /// The store's regions.
    ///
    /// # Errors
    /// When a device cannot hold a store.
    pub(crate) fn media(&self) -> anyhow::Result<Vec<Medium>> {
        Ok(Store::media(&self.fleet.devices)?)
    }

    /// The namespaces that the regions are in, as a whole.
    ///
    /// # Errors
    /// As for [`Offline::media`].
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

    /// Shuts the devices down. No [`Medium`] of them may be left.
    ///
    /// # Errors
    /// When one does not shut down.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        self.shut_down().map(|_| ())
    }

    /// As [`Offline::close`]. A home that was just made can be found from now on.
    ///
    /// # Errors
    /// As for [`Offline::close`], or when the home cannot say so.
    pub(crate) fn close_ready(self) -> anyhow::Result<()> {
        match self.shut_down()? {
            Place::Home(mut home) => Ok(home.set_ready()?),
            Place::Drives(_) => Ok(()),
        }
    }

    /// As [`Offline::close`]. A home that was just made, and got no store, is removed.
    ///
    /// # Errors
    /// As for [`Offline::close`], or when it cannot be removed.
    pub(crate) fn close_unused(self) -> anyhow::Result<()> {
        match self.shut_down()? {
            Place::Home(home) => Ok(home.discard()?),
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

/// The time of the devices.
pub(crate) fn clock() -> Arc<dyn Clock> {
    Arc::new(MonotonicClock::default())
}
