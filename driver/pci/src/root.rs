//! All reading of the file system, below one folder: `/`, or a copy of another machine's files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Files that are read whole are never larger than this; /proc and /sys have no honest sizes.
const TEXT_BYTES_MAX: u64 = 4 << 20;

/// What an attempt to be the only user of a disk says.
#[derive(Debug)]
pub enum Claim {
    /// Nobody else has claimed it, and nobody can while the file is open.
    Held(File),
    /// The kernel says that it is claimed: mounted, swap, or part of something.
    Busy,
    /// It could not be asked, and why.
    Unknown(String),
}

/// A folder that is taken for `/`. Paths given to it are absolute and without its own path.
#[derive(Debug, Clone)]
pub struct Root {
    base: PathBuf,
}

impl Root {
    /// `base` instead of `/`.
    ///
    /// # Errors
    /// When there is no such folder.
    pub fn new(base: &Path) -> io::Result<Self> {
        Ok(Self { base: fs::canonicalize(base)? })
    }

    /// The machine we run on.
    #[must_use]
    pub fn machine() -> Self {
        Self { base: PathBuf::from("/") }
    }

    /// Whether this is the machine we run on.
    pub fn is_real(&self) -> bool {
        self.base == Path::new("/")
    }

    /// Where `path` really is.
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.base.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The trimmed contents; None if there are none to be had.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        self.try_text(path).ok()
    }

    /// The trimmed contents.
    ///
    /// # Errors
    /// As reading the file.
    pub fn try_text(&self, path: impl AsRef<Path>) -> io::Result<String> {
        let mut bytes = Vec::new();
        File::open(self.at(path))?.take(TEXT_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// A file with one number.
    pub fn number<T: std::str::FromStr>(&self, path: impl AsRef<Path>) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    /// `len` bytes from `offset`, or fewer at the end of the file.
    ///
    /// # Errors
    /// As reading the file.
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

    /// Whether there is such a file or folder.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.at(path).exists()
    }

    /// The sorted names in a folder; none if it cannot be read.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        self.try_names(path).unwrap_or_default()
    }

    /// The sorted names in a folder.
    ///
    /// # Errors
    /// As reading the folder.
    pub fn try_names(&self, path: impl AsRef<Path>) -> io::Result<Vec<String>> {
        let mut names: Vec<String> = fs::read_dir(self.at(path))?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        Ok(names)
    }

    /// What a symbolic link says.
    pub fn link(&self, path: impl AsRef<Path>) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.to_string_lossy().into_owned())
    }

    /// The last part of what a link says: how sysfs names drivers, groups and modules.
    pub fn link_name(&self, path: impl AsRef<Path>) -> Option<String> {
        let target = self.link(path)?;
        target.rsplit('/').next().map(str::to_owned)
    }

    /// `path` with all links followed.
    pub fn resolve(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        let full = fs::canonicalize(self.at(path)).ok()?;
        let inside = full.strip_prefix(&self.base).ok()?;
        Some(Path::new("/").join(inside))
    }

    /// `major:minor` of the block device that `path` leads to.
    pub fn block_device(&self, path: impl AsRef<Path>) -> Option<String> {
        let found = fs::metadata(self.at(path)).ok()?;
        let number = found.rdev();
        let text = || format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        found.file_type().is_block_device().then(text)
    }

    /// Owner, group and permissions of a node.
    pub fn owner(&self, path: impl AsRef<Path>) -> Option<(u32, u32, u32)> {
        let found = fs::metadata(self.at(path)).ok()?;
        Some((found.uid(), found.gid(), found.mode() & 0o7777))
    }

    /// Tries to become the only user of a disk, as mounting it would.
    pub fn claim(&self, path: &str) -> Claim {
        // In a copy of a machine, disks are files that nobody mounts.
        if !self.is_real() {
            return match File::open(self.at(path)) {
                Ok(file) => Claim::Held(file),
                Err(error) => Claim::Unknown(format!("{path}: {error}")),
            };
        }
        if self.block_device(path).is_none() {
            return Claim::Unknown(format!("{path} is not a block device"));
        }
        let exclusive = i32::try_from(rustix::fs::OFlags::EXCL.bits()).unwrap_or(0);
        // Exclusive without create is what the kernel takes for a claim (open(2), O_EXCL).
        match OpenOptions::new().read(true).custom_flags(exclusive).open(self.at(path)) {
            Ok(file) => Claim::Held(file),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Claim::Busy,
            Err(error) => Claim::Unknown(format!("{path}: {error}")),
        }
    }
}
