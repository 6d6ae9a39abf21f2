//! The parameters of a home, in a file of their own: `home.json`.

use std::{
    fs::{self, File},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{HomeError, os, sync_directory};
use crate::read_file;

/// Its file.
pub(super) const NAME: &str = "home.json";
/// What is written before it ([`write_json`]).
pub(super) const NEW: &str = "home.json.new";
/// Far more than the parameters of 64 devices take.
const BYTES_MAX: u64 = 1 << 20;
/// Counted up with every change that an older version would misunderstand. What it does not know
/// it may ignore.
const VERSION: u32 = 1;

/// What a home consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    ripieno_home: u32,
    pub(super) state: State,
    /// Tells it from all others.
    pub(super) id: String,
    pub(super) lba_bytes: u32,
    pub(super) devices: Vec<Device>,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// It is being made. Nothing in it is needed.
    Making,
    Ready,
}

/// What is behind one software controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Device {
    /// Its controller's serial number.
    pub(super) serial: String,
    /// A file in the home, by its name; or a block device, by its path.
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

impl Device {
    /// Whether it is a file of the home's own.
    pub(super) fn is_file(&self) -> bool {
        self.path.is_relative()
    }
}

impl Manifest {
    pub(super) fn new(id: String, lba_bytes: u32, devices: Vec<Device>) -> Self {
        Self { ripieno_home: VERSION, state: State::Making, id, lba_bytes, devices }
    }

    /// Reads that of `dir`; `None` if it has none.
    ///
    /// # Errors
    /// [`HomeError::Damaged`], [`HomeError::Os`].
    pub(super) fn read(dir: &Path) -> Result<Option<Self>, HomeError> {
        let Some(manifest) = read_json::<Self>(dir, NAME, "ripieno_home", VERSION)? else {
            return Ok(None);
        };
        match manifest.wrong() {
            Some(why) => Err(HomeError::Damaged { path: dir.join(NAME), why }),
            None => Ok(Some(manifest)),
        }
    }

    /// What cannot be, in a file that anybody may have edited.
    fn wrong(&self) -> Option<String> {
        if self.devices.is_empty() {
            return Some("it names no devices".to_owned());
        }
        // It may be removed, so it has to be one of ours.
        let outside = |device: &&Device| {
            let name = device.path.to_str().unwrap_or_default();
            device.is_file() && super::file_number(name).is_none()
        };
        let outside = self.devices.iter().find(outside)?;
        Some(format!("{} is not the name of a device's file", outside.path.display()))
    }

    /// Puts it into `dir`, in one step and for good.
    ///
    /// # Errors
    /// [`HomeError::Os`].
    pub(super) fn write(&self, dir: &Path) -> Result<(), HomeError> {
        write_json(dir, NAME, self)
    }
}

/// Reads the file `name` of `dir`, whose `field` says `version`; `None` if there is none.
///
/// # Errors
/// [`HomeError::Damaged`], [`HomeError::Os`].
pub(crate) fn read_json<T: DeserializeOwned>(
    dir: &Path,
    name: &str,
    field: &str,
    version: u32,
) -> Result<Option<T>, HomeError> {
    let path = dir.join(name);
    let text = match read_file(&path, BYTES_MAX) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(os(&path, "reading it", "check what it is, and its permissions", error));
        }
    };
    let damaged = |why: String| HomeError::Damaged { path: path.clone(), why };
    // The version first: the rest may look otherwise in another one.
    let value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let found = value.get(field).and_then(serde_json::Value::as_u64);
    if found != Some(version.into()) {
        let found = found.map_or("no version".to_owned(), |found| format!("version {found}"));
        return Err(damaged(format!("it has {found}, and this program knows {version}")));
    }
    serde_json::from_value(value).map(Some).map_err(|error| damaged(error.to_string()))
}

/// Puts `value` into the file `name` of `dir`, in one step and for good. `name.new` is written
/// first, and then takes the name.
///
/// # Errors
/// [`HomeError::Os`].
pub(crate) fn write_json(dir: &Path, name: &str, value: &impl Serialize) -> Result<(), HomeError> {
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
