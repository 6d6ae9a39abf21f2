//! Devices of a store, or of one of its ranks.

use std::sync::Arc;

use kv_catalog::{OnDevice, Superblock};
use nvme_driver::{Clock, ControllerOptions, platform::vfio::PciAddress};
use objstore::{Format, Overwrite, Store, StoreDevice, StoreId};

use crate::{
    chosen::MemoryPlace,
    controllers::Controllers,
    drives::{self, DriveIdentity, Drives, Holds},
    error::StackError,
    gpu::Gpu,
    store_dir::StoreDir,
};

/// Location of the devices.
#[derive(Debug)]
pub enum Place {
    /// Files, or block devices, behind software controllers.
    StoreDir(StoreDir),
    /// Drives that are bound to vfio-pci, in the store's order. A drive belongs to one process at a
    /// time.
    Drives(Vec<Drive>),
}

/// A drive and its expected identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drive {
    /// Its PCI address.
    pub address: PciAddress,
    /// The expected drive; with `None`, only the store's own check applies.
    pub identity: Option<DriveIdentity>,
}

impl From<StoreDir> for Place {
    fn from(dir: StoreDir) -> Self {
        Self::StoreDir(dir)
    }
}

impl Place {
    /// Returns a place of drives at these addresses.
    #[must_use]
    pub fn drives(addresses: &[PciAddress]) -> Self {
        let drive = |address: &PciAddress| Drive { address: *address, identity: None };
        Self::Drives(addresses.iter().map(drive).collect())
    }

    /// Attaches the driver to the controllers. Writes nothing.
    ///
    /// # Errors
    /// Returns [`StackError::StoreDir`], [`StackError::Drive`] if a drive is not the expected one,
    /// or an error of [`Controllers::emulated`] or [`Drives::open`].
    pub fn controllers(
        &self,
        clock: &Arc<dyn Clock>,
        options: &ControllerOptions,
        gpu: Option<&Gpu>,
    ) -> Result<Controllers, StackError> {
        match self {
            Self::StoreDir(dir) => {
                Controllers::emulated(dir.controllers()?, dir.dir(), clock, options, gpu)
            }
            Self::Drives(expected) => {
                let addresses: Vec<PciAddress> =
                    expected.iter().map(|drive| drive.address).collect();
                let drives = Drives::open(&addresses, MemoryPlace::Host, clock, options)?;
                for (drive, found) in expected.iter().zip(drives.identities()) {
                    drive.check(&found)?;
                }
                Ok(Controllers::of_drives(drives))
            }
        }
    }

    /// Returns true when the devices are files, which keep their space.
    pub(crate) fn is_on_files(&self) -> bool {
        match self {
            Self::StoreDir(dir) => dir.devices().any(|device| device.path.starts_with(dir.dir())),
            Self::Drives(_) => false,
        }
    }

    /// Formats a store on the devices. A drive must be blank, or have only remains of a replay or a
    /// part of this store, unless `format` allows more. A directory was made for the store.
    ///
    /// # Errors
    /// Returns [`StackError::NotEmpty`], with nothing written, or an error of [`Store::format`].
    pub(crate) fn format(
        &self,
        devices: &[StoreDevice],
        format: &Format,
    ) -> Result<(), StackError> {
        match self {
            Self::StoreDir(_) => Store::format(devices, format).map_err(StackError::of_format),
            Self::Drives(_) => {
                check_vacant(devices, format.overwrite, format.store)?;
                let overwrite = Overwrite::Anything;
                let format = Format { overwrite, ..format.clone() };
                Store::format(devices, &format).map_err(StackError::of_format)?;
                // Comes last: the mark at the edge allows the contents to be overwritten.
                for device in devices {
                    drives::clear_edges(&mut device.controller.lock())?;
                }
                Ok(())
            }
        }
    }

    /// Marks the devices as formatted.
    ///
    /// # Errors
    /// Returns [`StackError::StoreDir`] if the mark cannot be written.
    pub(crate) fn set_ready(&mut self) -> Result<(), StackError> {
        match self {
            Self::StoreDir(dir) => Ok(dir.set_ready()?),
            // The superblocks on the drives record it.
            Self::Drives(_) => Ok(()),
        }
    }
}

impl Drive {
    fn check(&self, found: &DriveIdentity) -> Result<(), StackError> {
        match &self.identity {
            Some(expected) if expected != found => Err(StackError::Drive {
                drive: self.address.to_string(),
                why: format!(
                    "namespace {} of drive {} is there, and namespace {} of drive {} was expected",
                    found.nsid, found.serial, expected.nsid, expected.serial
                ),
                hint: "name the drives where they are now, in the same order",
            }),
            _ => Ok(()),
        }
    }
}

/// Refuses to overwrite data on drives.
fn check_vacant(
    devices: &[StoreDevice],
    allowed: Overwrite,
    ours: StoreId,
) -> Result<(), StackError> {
    for (device, mut medium) in devices.iter().zip(Store::media(devices)?) {
        let (drive, held) = {
            let controller = &mut *device.controller.lock();
            (controller.id().to_owned(), drives::holds(controller)?)
        };
        let found = match (held, allowed) {
            (Holds::Nothing | Holds::Scratch, _) | (_, Overwrite::Anything) => continue,
            (Holds::Store, Overwrite::Store) => continue,
            (Holds::Data, _) => held.to_string(),
            (Holds::Store, Overwrite::Nothing) => match Superblock::read(&mut *medium.io) {
                Ok(OnDevice::Ours(superblock)) if superblock.store == ours => continue,
                Ok(OnDevice::Ours(superblock)) => format!("store {} is on it", superblock.store),
                _ => held.to_string(),
            },
        };
        return Err(StackError::NotEmpty { drive, found });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use nvme_driver::MonotonicClock;
    use nvme_emu::{EmuConfig, MemoryMedia};
    use nvme_spec::ids::Lba;
    use objstore::KvShape;

    use super::*;

    const MIB: u64 = 1 << 20;
    const BYTES: u64 = 16 * MIB;
    const SHAPE: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 1024, block_tokens: 16 };

    /// Makes a drive whose store leaves its first and last MiB free, and its medium.
    fn drive() -> (MemoryMedia, Controllers) {
        let media = MemoryMedia::new(BYTES).unwrap();
        let config = EmuConfig::new("drive").namespace(media.clone(), 512);
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let options = ControllerOptions::default();
        let mut controllers =
            Controllers::emulated([config], Path::new("drive"), &clock, &options, None).unwrap();
        controllers.devices[0].region = Some((Lba(MIB >> 9), (BYTES - 2 * MIB) >> 9));
        (media, controllers)
    }

    fn format(on: &Controllers, store: u8, overwrite: Overwrite) -> Result<(), StackError> {
        let format = Format { overwrite, ..Format::new(StoreId([store; 16]), SHAPE) };
        Place::drives(&[]).format(&on.devices, &format)
    }

    fn holds(controllers: &Controllers) -> Holds {
        drives::holds(&mut controllers.devices[0].controller.lock()).unwrap()
    }

    #[test]
    fn a_drive_is_formatted_only_where_nothing_is_lost() {
        let (_, controllers) = drive();
        format(&controllers, 1, Overwrite::Nothing).unwrap();
        // Like after a crash while the store was made.
        format(&controllers, 1, Overwrite::Nothing).unwrap();
        let error = format(&controllers, 2, Overwrite::Nothing).unwrap_err();
        assert!(error.to_string().contains("not empty (store 0101"), "{error}");
        assert_eq!(error.kind(), crate::ErrorKind::Occupied);
        format(&controllers, 2, Overwrite::Store).unwrap();
        format(&controllers, 2, Overwrite::Nothing).unwrap();
        assert_eq!(holds(&controllers), Holds::Store);
    }

    #[test]
    fn what_is_beside_a_store_is_guarded_and_then_cleared() {
        let (media, controllers) = drive();
        media.poke(BYTES - 512, b"EFI PART").unwrap();
        for allowed in [Overwrite::Nothing, Overwrite::Store] {
            let error = format(&controllers, 1, allowed).unwrap_err();
            assert!(matches!(error, StackError::NotEmpty { .. }), "{error}");
            assert_eq!(holds(&controllers), Holds::Data);
        }
        format(&controllers, 1, Overwrite::Anything).unwrap();
        assert_eq!(holds(&controllers), Holds::Store);
    }

    #[test]
    fn what_a_replay_left_may_be_lost() {
        let (media, controllers) = drive();
        media.poke(0, drives::MARK).unwrap();
        media.poke(MIB, b"a store that was not kept").unwrap();
        format(&controllers, 1, Overwrite::Nothing).unwrap();
        assert_eq!(holds(&controllers), Holds::Store);
    }

    #[test]
    fn another_drive_than_expected_is_named() {
        let (_, controllers) = drive();
        let found = drives::identity(&controllers.devices[0].controller.lock());
        let address = "0000:65:00.0".parse().unwrap();
        let drive = |identity| Drive { address, identity };
        drive(None).check(&found).unwrap();
        drive(Some(found.clone())).check(&found).unwrap();
        let other = DriveIdentity { serial: "S2".to_owned(), ..found.clone() };
        let error = drive(Some(other)).check(&found).unwrap_err().to_string();
        assert!(error.contains("namespace 1 of drive S2 was expected"), "{error}");
    }
}
