//! Errors of store directories.

use std::{fmt, io, path::PathBuf};

use crate::size::Size;

/// An error, whose message says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreDirError {
    /// The directory holds no store.
    #[error(
        "{}: there is no store here{found}; create one, or name another directory",
        dir.display()
    )]
    Missing {
        /// The directory.
        dir: PathBuf,
        /// The files that make it look like one.
        found: String,
    },
    /// The directory holds a store already.
    #[error(
        "{}: a store is here already; open it, or remove the directory first if nothing in it is \
         needed",
        dir.display()
    )]
    Exists {
        /// The directory.
        dir: PathBuf,
    },
    /// The process that was making the store directory ended before it was complete.
    #[error(
        "{}: the store directory is incomplete, because the process that was creating it ended; it \
         holds no data: create it again",
        dir.display()
    )]
    HalfMade {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory has foreign files.
    #[error(
        "{}: the directory holds something else ({found}), and a store is created only in an empty \
         one; name another directory",
        dir.display()
    )]
    NotEmpty {
        /// The directory.
        dir: PathBuf,
        /// The first of the files.
        found: String,
    },
    /// Another process uses the store directory.
    #[error(
        "{}: the store is in use by {holder}; it belongs to one process at a time: close it there, \
         or name another directory",
        dir.display()
    )]
    Locked {
        /// The directory.
        dir: PathBuf,
        /// The process that has it.
        holder: Holder,
    },
    /// The parameters cannot be read.
    #[error(
        "{}: it does not describe a store directory: {why}; one made by a newer version needs that \
         version, a damaged one has to be removed and created again",
        path.display()
    )]
    Damaged {
        /// The file with the parameters.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// A device is not the original.
    #[error(
        "{}: device {index} of the store {why}; restore the original, or remove the directory and \
         create it again",
        path.display()
    )]
    Device {
        /// The file or block device.
        path: PathBuf,
        /// Its index.
        index: usize,
        /// The problem.
        why: String,
    },
    /// The store directory's files differ from the requested ones.
    #[error(
        "{}: capacity or devices changed: the store has {} in {found_files} files a rank, and {} \
         in {asked_files} were asked for; a store keeps its size: ask for a capacity of \
         {}MiB, or remove the directory, and what is stored in it, to make another one",
        dir.display(), Size(*found_bytes), Size(*asked_bytes), found_bytes >> 20
    )]
    Resized {
        /// The directory of the store.
        dir: PathBuf,
        /// Files of each store directory.
        found_files: usize,
        /// Bytes of all files.
        found_bytes: u64,
        /// Files of each store directory that were requested.
        asked_files: usize,
        /// Bytes of all files that were requested.
        asked_bytes: u64,
    },
    /// The disk is too small.
    #[error(
        "{}: {} of files are asked for, and {} are free on this file system; ask for less, or \
         name a directory on a larger one",
        dir.display(), Size(*wanted), Size(*free)
    )]
    DiskFull {
        /// The directory.
        dir: PathBuf,
        /// Bytes still to be allocated.
        wanted: u64,
        /// Bytes free.
        free: u64,
    },
    /// The options are invalid.
    #[error("a store directory {why}")]
    Options {
        /// The problem, and the valid values.
        why: String,
    },
    /// The operating system refused an operation.
    #[error("{}: {action} failed: {source}; {hint}", path.display())]
    Os {
        /// The file or directory.
        path: PathBuf,
        /// The operation.
        action: &'static str,
        /// The cause.
        source: io::Error,
        /// Advice.
        hint: &'static str,
    },
    /// A medium could not be opened. The message names it and gives advice.
    #[error("{0}")]
    Media(io::Error),
}

/// The process that has a store directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// Its PID, in its own PID namespace.
    Process(u32),
    /// Unknown.
    Unknown,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(id) => write!(f, "process {id}"),
            Self::Unknown => f.write_str("another process"),
        }
    }
}
