//! The parameters of a store directory, in `home.json`.

use std::{
    fs::{self, File},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use nvme_driver::Nanos;
use nvme_emu::Bandwidth;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{StoreDirError, os, sync_directory};
use crate::read_file;

/// Name of the file.
pub(super) const NAME: &str = "home.json";
/// Temporary name while it is written ([`write_json`]).
pub(super) const NEW: &str = "home.json.new";
/// Limit on the file's size: far more than the parameters of 64 devices take.
const BYTES_MAX: u64 = 1 << 20;
/// Incremented with every change that an older version would misread. Unknown fields may be
/// ignored.
pub(super) const VERSION: u32 = 1;

/// Parameters of a store directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) ripieno_home: u32,
    pub(super) state: State,
    /// Its id.
    pub(super) id: String,
    pub(super) lba_bytes: u32,
    pub(super) devices: Vec<StoreDirDevice>,
    /// Speed of each software controller, to try that of a drive; edited by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) speed: Option<Speed>,
}

/// Speed of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Speed {
    /// Bytes per second.
    read: f64,
    /// Bytes per second.
    write: f64,
    latency_us: u32,
    /// [`Bandwidth::mixed`].
    mixed: f64,
}

impl Speed {
    fn is_valid(&self) -> bool {
        let is_speed = |rate: f64| rate.is_finite() && rate >= 1.0;
        is_speed(self.read) && is_speed(self.write) && (0.01..=2.0).contains(&self.mixed)
    }

    /// Returns the speed as a medium takes it.
    pub(super) fn bandwidth(&self) -> Bandwidth {
        let Self { read, write, latency_us, mixed } = *self;
        let latency = Nanos(u64::from(latency_us) * 1000);
        Bandwidth { read, write, latency, mixed, from: 0 }
    }
}

/// State of a store directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// Being made. Nothing in it is needed.
    Making,
    Ready,
}

/// A device of a store directory: the medium of a software controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreDirDevice {
    /// Its controller's serial number.
    pub serial: String,
    /// The file or block device; in the parameters, a file's name in the store directory.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
}

impl StoreDirDevice {
    /// Returns true when it is a file of the store directory.
    pub(super) fn is_file(&self) -> bool {
        self.path.is_relative()
    }
}

impl Manifest {
    /// Reads the manifest of `dir`; `None` if it has none.
    ///
    /// # Errors
    /// Returns an error if it cannot be read, or makes no sense.
    pub(super) fn read(dir: &Path) -> Result<Option<Self>, StoreDirError> {
        let Some(manifest) = read_json::<Self>(dir, NAME, "ripieno_home", VERSION)? else {
            return Ok(None);
        };
        match manifest.wrong() {
            Some(why) => Err(StoreDirError::damaged(&dir.join(NAME), &why)),
            None => Ok(Some(manifest)),
        }
    }

    /// Returns the first inconsistency, because users may have edited the file.
    fn wrong(&self) -> Option<String> {
        if self.devices.is_empty() {
            return Some("it names no devices".to_owned());
        }
        if self.speed.is_some_and(|speed| !speed.is_valid()) {
            return Some(
                "speed: give bytes per second from 1 on, and mixed from 0.01 to 2".to_owned(),
            );
        }
        // It may be removed, so it must be one of ours.
        let outside = |device: &&StoreDirDevice| {
            let name = device.path.to_str().unwrap_or_default();
            device.is_file() && super::file_number(name).is_none()
        };
        let outside = self.devices.iter().find(outside)?;
        Some(format!("{} is not the name of a device's file", outside.path.display()))
    }
}

/// Reads the file `name` of `dir`, whose `field` is `version`; `None` if there is none.
///
/// # Errors
/// Returns an error if it cannot be read, or has another form.
pub(crate) fn read_json<T: DeserializeOwned>(
    dir: &Path,
    name: &str,
    field: &str,
    version: u32,
) -> Result<Option<T>, StoreDirError> {
    let path = dir.join(name);
    let text = match read_file(&path, BYTES_MAX) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {
            return Err(os(dir, "looking into it", "it is a file: give a directory", error));
        }
        Err(error) => {
            return Err(os(&path, "reading it", "check what it is, and its permissions", error));
        }
    };
    let damaged = |why: String| StoreDirError::damaged(&path, &why);
    // Checks the version first: other versions may have other fields.
    let value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let found = value.get(field).and_then(serde_json::Value::as_u64);
    if found != Some(version.into()) {
        let found = found.map_or("no version".to_owned(), |found| format!("version {found}"));
        return Err(damaged(format!("it has {found}, and this program knows {version}")));
    }
    serde_json::from_value(value).map(Some).map_err(|error| damaged(error.to_string()))
}

/// Writes `value` to the file `name` of `dir`, atomically and durably: writes `name.new` first, and
/// then renames it.
///
/// # Errors
/// Returns [`StoreDirError::Os`] if that fails.
pub(crate) fn write_json(
    dir: &Path,
    name: &str,
    value: &impl Serialize,
) -> Result<(), StoreDirError> {
    let (new, path) = (dir.join(format!("{name}.new")), dir.join(name));
    let write = || {
        let mut options = File::options();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        serde_json::to_writer_pretty(&mut file, value)?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        fs::rename(&new, &path)
    };
    let hint = "name a directory that you may write to, on a disk with room";
    write().map_err(|error| os(&path, "writing it", hint, error))?;
    sync_directory(dir)
}
