//! The lock of a store directory: one process at a time.
//!
//! The kernel releases it when its holder ends, however that happens: a crash needs no cleanup.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _, Write as _},
    path::Path,
};

use rustix::{fs::FlockOperation, io::Errno};

use super::{StoreDirError, os};
use crate::socket_file::lock_at;

/// The lock file. It stays: removing one that another process waits for would allow two holders.
pub(crate) const NAME: &str = "lock";

/// Upper bound of the digits of a PID.
const NUMBER_BYTES_MAX: u64 = 32;

/// The lock, held while this value exists.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
    /// The file system takes no writes.
    is_read_only: bool,
}

impl Lock {
    /// Locks `dir`, and writes down the PID.
    ///
    /// # Errors
    /// Returns [`StoreDirError::Locked`] or [`StoreDirError::Os`].
    pub(crate) fn take(dir: &Path) -> Result<Self, StoreDirError> {
        let path = dir.join(NAME);
        // A directory that was not made is removed with its lock, by who held it until then.
        let file = lock_at(&path, |file| locked(dir, &path, file, false))?;
        let error = io::Error::other("it is replaced again and again");
        let file = file.ok_or_else(|| os(&path, "locking it", WRITABLE, error))?;
        Ok(Self { file, is_read_only: false })
    }

    /// Same as [`Lock::take`] for a process that writes nothing: on a read-only file system, the
    /// PID is not written down.
    pub(crate) fn take_to_read(dir: &Path) -> Result<Self, StoreDirError> {
        let path = dir.join(NAME);
        match Self::take(dir) {
            Err(StoreDirError::Os { source, .. })
                if Errno::from_io_error(&source) == Some(Errno::ROFS) =>
            {
                let file = locked(dir, &path, File::open(&path), true)?;
                Ok(Self { file, is_read_only: true })
            }
            taken => taken,
        }
    }

    /// Returns true if the file system takes no writes.
    pub(crate) fn is_read_only(&self) -> bool {
        self.is_read_only
    }
}

impl Drop for Lock {
    /// Unlocks explicitly: a process that another thread is just forking has a copy of the
    /// descriptor until its `exec`, and would hold the lock as long.
    fn drop(&mut self) {
        if let Err(error) = rustix::fs::flock(&self.file, FlockOperation::Unlock) {
            tracing::warn!(%error, "unlocking the store directory");
        }
    }
}

/// Locks a lock file, and writes down the PID unless it `is_read_only`.
fn locked(
    dir: &Path,
    path: &Path,
    file: io::Result<File>,
    is_read_only: bool,
) -> Result<File, StoreDirError> {
    let mut file = file.map_err(|error| os(path, "opening the lock", WRITABLE, error))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let holder = holder(&mut file);
            return Err(StoreDirError::Locked { dir: dir.to_owned(), holder });
        }
        Err(error) => {
            let hint = "name a directory on a file system with locks";
            return Err(os(path, "locking it", hint, error));
        }
    }
    if !is_read_only {
        let named = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        named.map_err(|error| os(path, "writing the lock", WRITABLE, error))?;
    }
    Ok(file)
}

const WRITABLE: &str = "name a directory that you may write to";

/// Returns the process that wrote its PID last, which every holder does first of all.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let read =
        file.rewind().and_then(|()| (&mut *file).take(NUMBER_BYTES_MAX).read_to_string(&mut text));
    match (read, text.trim().parse::<u32>()) {
        (Ok(_), Ok(id)) => format!("process {id}"),
        _ => "another process".to_owned(),
    }
}
