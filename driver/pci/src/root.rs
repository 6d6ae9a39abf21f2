//! Access to files below one folder: `/`, or a copy of another machine's files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, StatxFlags};

/// Maximum that is read of a text file; files in /proc and /sys report wrong sizes.
const TEXT_BYTES_MAX: u64 = 4 << 20;

/// Result of an attempt to open a disk exclusively.
#[derive(Debug)]
pub enum Claim {
    /// It is claimed for as long as the file is open.
    Held(File),
    /// It is in use (`EBUSY`): mounted, swap, or part of another device.
    Busy,
    /// It could not be opened; the reason.
    Unknown(String),
}

/// A folder that stands for `/`. Paths passed to it are absolute, without the folder's own path.
#[derive(Debug, Clone)]
pub struct Root {
    base: PathBuf,
}

impl Root {
    /// Uses `base` instead of `/`.
    ///
    /// # Errors
    /// Returns an error if there is no such folder.
    pub fn new(base: &Path) -> io::Result<Self> {
        Ok(Self { base: fs::canonicalize(base)? })
    }

    /// Uses `/`: the machine we run on.
    #[must_use]
    pub fn machine() -> Self {
        Self { base: PathBuf::from("/") }
    }

    /// Returns true if this is `/`.
    pub fn is_real(&self) -> bool {
        self.base == Path::new("/")
    }

    /// Returns the path below the folder for `path`.
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.base.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the trimmed contents; None if the file cannot be read.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        self.try_text(path).ok()
    }

    /// Returns the trimmed contents.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened or read.
    pub fn try_text(&self, path: impl AsRef<Path>) -> io::Result<String> {
        let mut bytes = Vec::new();
        File::open(self.at(path))?.take(TEXT_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// Returns the number that a file contains; None if it cannot be read or parsed.
    pub fn number<T: std::str::FromStr>(&self, path: impl AsRef<Path>) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    /// Returns `len` bytes from `offset` on, or fewer at the end of the file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened or read.
    pub fn bytes(&self, path: impl AsRef<Path>, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let file = File::open(self.at(path))?;
        let mut bytes = vec![0; len];
        let mut filled = 0;
        while filled < len {
            match file.read_at(&mut bytes[filled..], offset + filled as u64)? {
                0 => break,
                read => filled += read,
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    /// Returns true if there is such a file or folder.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.at(path).exists()
    }

    /// Returns the sorted names in a folder; none if it cannot be read.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        self.try_names(path).unwrap_or_default()
    }

    /// Returns the sorted names in a folder.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub fn try_names(&self, path: impl AsRef<Path>) -> io::Result<Vec<String>> {
        let mut names: Vec<String> = fs::read_dir(self.at(path))?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        Ok(names)
    }

    /// Returns the target of a symbolic link.
    pub fn link(&self, path: impl AsRef<Path>) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.to_string_lossy().into_owned())
    }

    /// Returns the last part of a link's target. Sysfs names drivers, groups and modules so.
    pub fn link_name(&self, path: impl AsRef<Path>) -> Option<String> {
        let target = self.link(path)?;
        target.rsplit('/').next().map(str::to_owned)
    }

    /// Returns `path` with all links resolved; None if that leads out of the folder.
    pub fn resolve(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        let full = fs::canonicalize(self.at(path)).ok()?;
        let inside = full.strip_prefix(&self.base).ok()?;
        Some(Path::new("/").join(inside))
    }

    /// Returns the number of the device node at `path` as udev writes it: `b259:0` of a block
    /// device, `c244:0` of a character device; None if it is neither.
    pub fn device_number(&self, path: impl AsRef<Path>) -> Option<String> {
        // Without asking the file system again: a server on the network may not answer.
        let (flags, mask) = (AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
        let found = rustix::fs::statx(CWD, self.at(path), flags, mask).ok()?;
        let letter = match FileType::from_raw_mode(u32::from(found.stx_mode)) {
            FileType::BlockDevice => 'b',
            FileType::CharacterDevice => 'c',
            _ => return None,
        };
        Some(format!("{letter}{}:{}", found.stx_rdev_major, found.stx_rdev_minor))
    }

    /// Returns owner, group and permissions of a node.
    pub fn owner(&self, path: impl AsRef<Path>) -> Option<(u32, u32, u32)> {
        let found = fs::metadata(self.at(path)).ok()?;
        Some((found.uid(), found.gid(), found.mode() & 0o7777))
    }

    /// Tries to open a disk exclusively, as mounting it would.
    pub fn claim(&self, path: &str) -> Claim {
        // In a copy of a machine, disks are plain files; a lock stands for the claim.
        if !self.is_real() {
            let lock = FlockOperation::NonBlockingLockExclusive;
            return match File::open(self.at(path)) {
                Ok(file) if rustix::fs::flock(&file, lock).is_ok() => Claim::Held(file),
                Ok(_) => Claim::Busy,
                Err(error) => Claim::Unknown(format!("{path}: {error}")),
            };
        }
        if !self.device_number(path).is_some_and(|number| number.starts_with('b')) {
            return Claim::Unknown(format!("{path} is not a block device"));
        }
        let exclusive = i32::try_from(rustix::fs::OFlags::EXCL.bits()).unwrap_or(0);
        // O_EXCL without O_CREAT claims a block device (open(2), O_EXCL).
        match OpenOptions::new().read(true).custom_flags(exclusive).open(self.at(path)) {
            Ok(file) => Claim::Held(file),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Claim::Busy,
            Err(error) => Claim::Unknown(format!("{path}: {error}")),
        }
    }
}
