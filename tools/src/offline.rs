//! Devices of a store that is not open: for `format`, `inspect`, `fsck` and `scrub`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use nvme_driver::{Clock, ControllerOptions, DmaSpace, MonotonicClock};
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
    /// The memory that they reach.
    pub(crate) space: Arc<dyn DmaSpace>,
    _emulation: Option<Emulation>,
    home: Option<Home>,
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
                let (devices, _, space) = drives.into_parts();
                Ok(Self { devices, space, _emulation: None, home: None })
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
        Ok(Self { devices, space: domain, _emulation: Some(emulation), home: Some(home) })
    }

    /// Devices as drives have them, with something beside the store's region.
    #[cfg(test)]
    pub(crate) fn of_emulated(
        devices: Vec<StoreDevice>,
        space: Arc<dyn DmaSpace>,
        emulation: Emulation,
    ) -> Self {
        Self { devices, space, _emulation: Some(emulation), home: None }
    }

    /// The store's regions.
    ///
    /// # Errors
    /// When a device cannot hold a store.
    pub(crate) fn media(&self) -> anyhow::Result<Vec<Medium>> {
        Ok(Store::media(&self.devices)?)
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
        let devices: Vec<StoreDevice> = self.devices.iter().map(whole).collect();
        Ok(Store::media(&devices)?)
    }

    /// Shuts the devices down. No [`Medium`] of them may be left.
    ///
    /// # Errors
    /// When one does not shut down.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        shut_down(self.devices)
    }

    /// As [`Offline::close`]. A home that was just made can be found from now on.
    ///
    /// # Errors
    /// As for [`Offline::close`], or when the home cannot say so.
    pub(crate) fn close_ready(self) -> anyhow::Result<()> {
        shut_down(self.devices)?;
        self.home.map_or(Ok(()), |mut home| Ok(home.set_ready()?))
    }

    /// As [`Offline::close`]. A home that was just made, and got no store, is removed.
    ///
    /// # Errors
    /// As for [`Offline::close`], or when it cannot be removed.
    pub(crate) fn close_unused(self) -> anyhow::Result<()> {
        shut_down(self.devices)?;
        drop(self._emulation);
        self.home.map_or(Ok(()), |home| Ok(home.discard()?))
    }
}

fn shut_down(devices: Vec<StoreDevice>) -> anyhow::Result<()> {
    for device in devices {
        device.controller.lock().shutdown().context("shutting a device down")?;
    }
    Ok(())
}

/// The time of the devices.
pub(crate) fn clock() -> Arc<dyn Clock> {
    Arc::new(MonotonicClock::default())
}
