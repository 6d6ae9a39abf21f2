//! Devices of a store that is not open: for `format`, `inspect`, `fsck` and `scrub`.

use nvme_driver::ControllerOptions;
use ripieno_stack::{Devices, ErrorKind, PoolMemory, StackConfig, StoreDir};

use crate::problem::user_error;
use crate::terminal::say;

/// Attaches the driver to the store's devices. Writes nothing.
pub(crate) fn open(config: &StackConfig) -> anyhow::Result<Devices> {
    attach(Devices::find(config).map_err(user_error)?)
}

/// Like [`open`], for damage checks: a device that is missing or too short, and a store directory
/// whose parameters cannot be read, are findings and not user errors. Unless it `writes`, the file
/// system may be read-only.
pub(crate) fn examine(config: &StackConfig, writes: bool) -> anyhow::Result<Devices> {
    config.check(&PoolMemory::Own { blocks: 0 }).map_err(user_error)?;
    if !config.drives().is_empty() {
        return open(config);
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
            attach(store_dir)
        }
        Err(error) if error.kind() == ErrorKind::Damaged => Err(error.into()),
        Err(error) => Err(user_error(error.into())),
    }
}

/// Attaches the devices of a store.
pub(crate) fn attach(devices: impl Into<Devices>) -> anyhow::Result<Devices> {
    let mut devices = devices.into();
    devices.attach(&ControllerOptions::default(), None).map_err(user_error)?;
    Ok(devices)
}
