//! Devices of a store that is not open: for `format`, `inspect` and `fsck`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use nvme_driver::{Clock, ControllerOptions, MonotonicClock};
use nvme_emu::EmuDomain;
use objstore::{Medium, Store, StoreDevice};
use ripieno_stack::Home;

use crate::devices::{self, MediaChoice, MemoryChoice};
use crate::drives::Drives;
use crate::problem::Problem;
use crate::stack::{Emulation, emulate, in_home};

/// Where a store is.
#[derive(Debug, Clone, Args)]
pub(crate) struct Where {
    /// The store's home: file:DIR
    #[arg(long, value_name = "file:DIR", value_parser = devices::media,
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
    pub(crate) devices: Vec<StoreDevice>,
    _emulation: Option<Emulation>,
    _home: Option<Home>,
}

impl Offline {
    /// Attaches the driver to the store's devices. Writes nothing.
    ///
    /// # Errors
    /// [`Problem`] when the home is not there or in use; else whatever a layer refuses.
    pub(crate) fn open(place: &Where) -> anyhow::Result<Self> {
        match place.dir()? {
            Some(dir) => {
                let home = Home::open(dir).map_err(|error| Problem::new(error.to_string(), ""))?;
                Self::of_home(home)
            }
            None => {
                let addresses = devices::drives(&place.device)?;
                if addresses.is_empty() {
                    let message = "--device emu: a software controller's store is in its home";
                    bail!(Problem::new(message, "say --media file:DIR, or --device vfio:..."));
                }
                let options = ControllerOptions::default();
                let drives = Drives::open(&addresses, MemoryChoice::Host, &clock(), &options)?;
                let (devices, ..) = drives.into_parts();
                Ok(Self { devices, _emulation: None, _home: None })
            }
        }
    }

    /// The devices of a home.
    ///
    /// # Errors
    /// As for [`Offline::open`].
    pub(crate) fn of_home(home: Home) -> anyhow::Result<Self> {
        let (domain, options) = (EmuDomain::new("offline"), ControllerOptions::default());
        let (devices, emulation) = emulate(in_home(&home)?, &options, &domain, &clock())?;
        Ok(Self { devices, _emulation: Some(emulation), _home: Some(home) })
    }

    /// The store's regions.
    ///
    /// # Errors
    /// When a device cannot hold a store.
    pub(crate) fn media(&self) -> anyhow::Result<Vec<Medium>> {
        Ok(Store::media(&self.devices)?)
    }

    /// Shuts the devices down. No [`Medium`] of them may be left.
    ///
    /// # Errors
    /// When one does not shut down.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        for device in self.devices {
            device.controller.lock().shutdown().context("shutting a device down")?;
        }
        Ok(())
    }
}

fn clock() -> Arc<dyn Clock> {
    Arc::new(MonotonicClock::default())
}
