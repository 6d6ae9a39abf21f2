//! The directory of a store on this machine.
//!
//! ```text
//!   DIR/lock           locked by the process that writes; contains its PID
//!   DIR/home.json      parameters: state, LBA size, and serial number and size of each device
//!   DIR/device-0.img   medium of the first software controller
//!   DIR/device-1.img   ...
//! ```
//!
//! **Space.** Files are allocated when the directory is made, and stay allocated. A full disk is
//! detected immediately and by name, not hours later by a failed write; other programs that fill
//! the disk do not harm the store; and the store does not grow into their space. The price is that
//! the space counts as used from the beginning.
//!
//! **Creation** is atomic: `home.json` has the state `making` until [`StoreDir::set_ready`], which
//! is called once the devices were formatted. A directory dropped before that is removed with its
//! files. The remains of a crash are refused when opened, and removed when it is created again.
//!
//! **Identity.** Each device has a serial number, which its software controller reports. A store's
//! superblock records the serial numbers in order: files that were swapped, or that come from
//! another store directory, are refused when the store is opened.
//!
//! **A killed process** leaves writes that the kernel still carries out. The lock is free then,
//! but each of the files stays locked until the last write has ended: the next process to write
//! waits. One that reads beside it ([`StoreDir::open_beside`]) does not, and reads only what the
//! catalog has, to which there are no such writes.

mod lock;
mod manifest;

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{
        DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _,
        PermissionsExt as _,
    },
    path::{Path, PathBuf},
};

use gio_kernels::FileTarget;
use nvme_driver::{Clock as _, MonotonicClock, Nanos, remedy, wait_until};
use nvme_emu::{BandwidthDial, BandwidthMedia, EmuConfig, FileMedia, FileOptions, Media as _};
use rustix::{
    fs::{Access, FallocateFlags},
    io::Errno,
};

pub(crate) use lock::Lock;
use manifest::Manifest;
pub use manifest::StoreDirDevice;
pub(crate) use manifest::{State, read_json, write_json};

use crate::{
    error::{ErrorKind, StoreDirError},
    expand_home,
    size::Size,
};

/// Maximum bytes of a command on files. A read of 1 MiB takes half the CPU time of four of 256
/// KiB, and unlike a drive, a file needs no more commands to work on in parallel.
pub(crate) const COMMAND_BYTES: u32 = 1 << 20;
/// Unit to which sizes are rounded down.
const UNIT: u64 = 1 << 20;
/// Maximum number of devices of a store directory.
const DEVICES_MAX: usize = 64;

/// Media of a new store directory's software controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreDirMedia {
    /// Files in the store directory.
    Files {
        /// Number of files, 1 to 64.
        count: u32,
        /// Maximum bytes of all files together; each is rounded down to a MiB.
        bytes: u64,
    },
    /// Whole block devices; their contents are lost. Paths below `/dev/disk/by-id` stay the same
    /// when the order of devices changes.
    BlockDevices(Vec<PathBuf>),
}

/// Parameters of a new store directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreDirOptions {
    /// Random id of the store directory.
    pub id: u64,
    /// Media of the software controllers.
    pub media: StoreDirMedia,
    /// Bytes of an LBA: 512 or 4096.
    pub lba_bytes: u32,
}

/// A directory, locked while this exists unless it was opened beside its writer. Dropping a new one
/// before `set_ready` removes it.
#[derive(Debug)]
pub struct StoreDir {
    dir: PathBuf,
    manifest: Manifest,
    /// True when the directory was created for it.
    is_new: bool,
    /// `None` if another process has it ([`StoreDir::open_beside`]).
    lock: Option<Lock>,
}

impl StoreDir {
    /// Makes the store directory `dir`, which is created if it does not exist. No other process can
    /// open it before [`StoreDir::set_ready`]. Remains of an earlier attempt are removed.
    ///
    /// # Errors
    /// Returns [`StoreDirError`]; only the lock is then left in `dir`.
    pub fn create(dir: &Path, options: &StoreDirOptions) -> Result<Self, StoreDirError> {
        let dir = &*expand_home(dir);
        let devices = new_devices(options)?;
        if !dir.exists() {
            // A full disk takes a directory, and nothing in it.
            check_place(dir, &devices)?;
        }
        let made = match private().create(dir) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => {
                return Err(os(dir, "making the directory", PARENT, error));
            }
        };
        let id = format!("{:016x}", options.id);
        let (ripieno_home, state, lba_bytes) =
            (manifest::VERSION, State::Making, options.lba_bytes);
        let manifest = Manifest { ripieno_home, state, id, lba_bytes, devices, speed: None };
        let store_dir = Self::fill(dir, manifest, made).inspect_err(|error| {
            if made && !matches!(error, StoreDirError::Locked { .. }) {
                // It is not empty if another process is making it.
                let _ = fs::remove_dir(dir);
            }
        })?;
        if let (true, Some(parent)) =
            (made, dir.canonicalize().ok().as_deref().and_then(Path::parent))
        {
            sync_directory(parent)?;
        }
        Ok(store_dir)
    }

    /// Refuses a directory with anything but remains of an earlier attempt.
    fn check_unused(dir: &Path) -> Result<(), StoreDirError> {
        check_empty(dir, |name| {
            // Another process may be making it: the parameters are there before the files.
            let device = file_number(name).is_some() && dir.join(manifest::NAME).exists();
            device || [manifest::NAME, manifest::NEW].contains(&name)
        })
    }

    fn fill(dir: &Path, manifest: Manifest, is_new: bool) -> Result<Self, StoreDirError> {
        Self::check_unused(dir)?;
        let lock = Lock::take(dir)?;
        let filled = Self::fill_locked(dir, &manifest);
        if filled.is_err() && is_new {
            // While the lock is held: nobody else's is removed.
            let _ = fs::remove_file(dir.join(lock::NAME));
        }
        filled?;
        Ok(Self { dir: dir.to_owned(), manifest, is_new, lock: Some(lock) })
    }

    fn fill_locked(dir: &Path, manifest: &Manifest) -> Result<(), StoreDirError> {
        match Manifest::read(dir)? {
            Some(found) if found.state == State::Ready => {
                let why = "a store is here already; open it, or remove the directory first if \
                           nothing in it is needed";
                return Err(StoreDirError::occupied(dir, why));
            }
            Some(found) => {
                tracing::warn!(dir = %dir.display(), "removing an incomplete store directory");
                remove(dir, &found)?;
            }
            None => {}
        }
        check_room(dir, room(&manifest.devices))?;
        write_json(dir, manifest::NAME, manifest)?;
        let mut files = manifest.devices.iter().filter(|device| device.is_file());
        let made = files.try_for_each(|device| make(dir, device));
        let made = made.and_then(|()| sync_directory(dir));
        if let Err(error) = made {
            // Reports the first failure; files that cannot be removed are recognised later.
            let _ = remove(dir, manifest);
            return Err(error);
        }
        Ok(())
    }

    /// Marks the store directory as usable: its devices were formatted.
    ///
    /// # Errors
    /// Returns [`StoreDirError::Os`] if the mark cannot be written.
    pub fn set_ready(&mut self) -> Result<(), StoreDirError> {
        if self.is_ready() {
            // A full disk would have no room to write the mark again.
            return Ok(());
        }
        let mut ready = self.manifest.clone();
        ready.state = State::Ready;
        write_json(&self.dir, manifest::NAME, &ready)?;
        self.manifest = ready;
        Ok(())
    }

    /// Removes the files if it is not ready: only the lock stays, if the directory existed before.
    fn remove_unused(&self) -> Result<(), StoreDirError> {
        if self.is_ready() {
            return Ok(());
        }
        remove(&self.dir, &self.manifest)?;
        if self.is_new {
            // Another program may have put a file there.
            let lock = fs::remove_file(self.dir.join(lock::NAME));
            let _ = lock.and_then(|()| fs::remove_dir(&self.dir));
        }
        Ok(())
    }

    /// Returns true when `dir` is complete or unreadable, which [`StoreDir::create`] refuses.
    #[must_use]
    pub fn exists(dir: &Path) -> bool {
        let dir = &*expand_home(dir);
        !matches!(Manifest::read(dir), Ok(None | Some(Manifest { state: State::Making, .. })))
    }

    /// Opens `dir`, or makes it like [`StoreDir::create`] if it is not complete. Files stay.
    ///
    /// # Errors
    /// Returns an error if other files are requested than it has, or one of [`StoreDir::open`] or
    /// [`StoreDir::create`].
    pub fn open_or_create(dir: &Path, options: &StoreDirOptions) -> Result<Self, StoreDirError> {
        let dir = &*expand_home(dir);
        if !Self::exists(dir) {
            match Self::create(dir, options) {
                // Another process was faster.
                Err(_) if Self::exists(dir) => {}
                created => return created,
            }
        }
        check_files(dir, 1, dir, &options.media)?;
        Self::open(dir)
    }

    /// Checks that [`StoreDir::open_or_create`] would take what is in `dir`, which another process
    /// may have open: the files that are asked for, or nothing, and room for them.
    pub(crate) fn check(dir: &Path, options: &StoreDirOptions) -> Result<(), StoreDirError> {
        let dir = &*expand_home(dir);
        let devices = new_devices(options)?;
        if Self::exists(dir) {
            return check_files(dir, 1, dir, &options.media);
        }
        if dir.exists() {
            Self::check_unused(dir)?;
        }
        check_place(dir, &devices)
    }

    /// Opens the store directory `dir`.
    ///
    /// # Errors
    /// Returns [`StoreDirError`] if `dir` holds no store, is in use or incomplete, or a device is
    /// missing, shorter than before, or not the original.
    pub fn open(dir: &Path) -> Result<Self, StoreDirError> {
        Self::open_with(dir, |dir| Lock::take(dir).map(Some))
    }

    /// Like [`StoreDir::open`] for a process that only reads: the file system may be read-only, as
    /// after an error of its disk.
    ///
    /// # Errors
    /// Same as [`StoreDir::open`].
    pub fn open_to_read(dir: &Path) -> Result<Self, StoreDirError> {
        Self::open_with(dir, |dir| Lock::take_to_read(dir).map(Some))
    }

    /// Like [`StoreDir::open`] for a process that reads beside the one that writes, and has the
    /// lock. A catalog tells it what to read: files that are whole, and not written to meanwhile.
    ///
    /// # Errors
    /// Same as [`StoreDir::open`], but for a directory in use.
    pub fn open_beside(dir: &Path) -> Result<Self, StoreDirError> {
        Self::open_with(dir, |_| Ok(None))
    }

    fn open_with(
        dir: &Path,
        lock: impl Fn(&Path) -> Result<Option<Lock>, StoreDirError>,
    ) -> Result<Self, StoreDirError> {
        let dir = &*expand_home(dir);
        let read = || Manifest::read(dir)?.ok_or_else(|| no_manifest(dir));
        // Makes no lock file where there is no store.
        read()?;
        warn_of_others(dir);
        let lock = lock(dir)?;
        let manifest = read()?;
        if manifest.state == State::Making {
            return Err(StoreDirError::half_made(dir));
        }
        let opened = Self { dir: dir.to_owned(), manifest, is_new: false, lock };
        for (index, device) in opened.manifest.devices.iter().enumerate() {
            check(dir, index, device, opened.is_read_only())?;
        }
        Ok(opened)
    }

    /// Returns true when its devices were formatted; if not, [`StoreDir::create`] has just made it.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.manifest.state == State::Ready
    }

    /// Returns true when nothing is written: the file system takes no writes
    /// ([`StoreDir::open_to_read`]), or another process does that ([`StoreDir::open_beside`]).
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.lock.as_ref().is_none_or(Lock::is_read_only)
    }

    /// Returns true if its media are slower than their files.
    pub(crate) fn is_slowed(&self) -> bool {
        self.manifest.speed.is_some()
    }

    /// Returns its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the bytes of an LBA.
    #[must_use]
    pub fn lba_bytes(&self) -> u32 {
        self.manifest.lba_bytes
    }

    /// Returns the devices, in order.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = StoreDirDevice> + '_ {
        let inside = |device: &StoreDirDevice| self.dir.join(&device.path);
        let devices = self.manifest.devices.iter();
        devices.map(move |device| StoreDirDevice { path: inside(device), ..device.clone() })
    }

    /// Opens the media, bypassing the page cache: a software controller for each device, named by
    /// its path, and its file.
    ///
    /// # Errors
    /// Returns [`StoreDirError::Media`] if the operating system refuses one: it is in use, the file
    /// system has no direct I/O, or a file system is mounted on the block device.
    pub fn controllers(&self) -> Result<(Vec<EmuConfig>, Vec<FileTarget>), StoreDirError> {
        let controller = |device: StoreDirDevice| {
            let read_only = self.is_read_only() && device.path.starts_with(&self.dir);
            let media = open_media(&device.path, device.bytes, read_only)?;
            let config = EmuConfig {
                id: device.path.display().to_string(),
                serial: device.serial,
                mdts_bytes: Some(COMMAND_BYTES),
                ..EmuConfig::default()
            };
            let target = file_target(&media);
            let config = match self.manifest.speed {
                None => config.namespace(media, self.lba_bytes()),
                Some(speed) => {
                    let dial = BandwidthDial::default();
                    dial.set(Some(speed.bandwidth()));
                    config.namespace(BandwidthMedia::new(media, dial), self.lba_bytes())
                }
            };
            Ok((config, target))
        };
        let made: Result<Vec<_>, StoreDirError> = self.devices().map(controller).collect();
        Ok(made?.into_iter().unzip())
    }
}

/// Refuses other files than those in `dir`, one of `dirs` equal directories in `store`.
pub(crate) fn check_files(
    store: &Path,
    dirs: u32,
    dir: &Path,
    media: &StoreDirMedia,
) -> Result<(), StoreDirError> {
    let StoreDirMedia::Files { count, bytes } = media else { return Ok(()) };
    let found = Manifest::read(dir)?.ok_or_else(|| no_manifest(dir))?;
    let sizes: Vec<u64> = found.devices.iter().map(|device| device.bytes).collect();
    let each = file_bytes(*count, *bytes);
    if sizes.len() == *count as usize && sizes.iter().all(|size| *size == each) {
        return Ok(());
    }
    let dirs = u64::from(dirs);
    // Whoever edited the parameters may have written anything.
    let all = sizes.iter().fold(0, |sum: u64, size| sum.saturating_add(*size));
    let all = all.saturating_mul(dirs);
    let message = format!(
        "{}: capacity or devices changed: the store has {} in {} files a rank, and {} in {count} \
         were asked for; a store keeps its size: ask for a capacity of {}MiB, or remove the \
         directory, and what is stored in it, to make another one",
        store.display(),
        Size(all),
        sizes.len(),
        Size(dirs * u64::from(*count) * each),
        all >> 20
    );
    Err(StoreDirError::Wrong { kind: ErrorKind::Invalid, message })
}

/// Returns the bytes of each of `count` files that take at most `bytes` together.
fn file_bytes(count: u32, bytes: u64) -> u64 {
    bytes / u64::from(count.max(1)) / UNIT * UNIT
}

impl Drop for StoreDir {
    fn drop(&mut self) {
        // Files that cannot be removed are recognised later.
        if let Err(error) = self.remove_unused() {
            tracing::warn!(%error, "an incomplete store directory stays");
        }
    }
}

/// Returns the devices of a new store directory.
pub(crate) fn new_devices(options: &StoreDirOptions) -> Result<Vec<StoreDirDevice>, StoreDirError> {
    let wrong = |why: String| StoreDirError::options(&why);
    if ![512, 4096].contains(&options.lba_bytes) {
        let found = options.lba_bytes;
        return Err(wrong(format!("has logical blocks of 512 or 4096 bytes, and not of {found}")));
    }
    let serial = |index: usize| format!("{:016x}-{index}", options.id);
    let found = match &options.media {
        StoreDirMedia::Files { count, .. } => *count as usize,
        StoreDirMedia::BlockDevices(paths) => paths.len(),
    };
    if found == 0 || found > DEVICES_MAX {
        return Err(wrong(format!("has 1 to {DEVICES_MAX} devices, and not {found}")));
    }
    match &options.media {
        StoreDirMedia::Files { count, bytes } => {
            let each = file_bytes(*count, *bytes);
            if each == 0 {
                let why = format!("needs at least a MiB a device: {} are too few", Size(*bytes));
                return Err(wrong(why));
            }
            let file = |index| StoreDirDevice {
                serial: serial(index),
                path: format!("{FILE}{index}{FILE_END}").into(),
                bytes: each,
            };
            Ok((0..found).map(file).collect())
        }
        StoreDirMedia::BlockDevices(paths) => paths
            .iter()
            .enumerate()
            .map(|(index, path)| {
                if !path.is_absolute() || paths[..index].contains(path) {
                    let path = path.display();
                    return Err(wrong(format!("names each block device once, from / on: {path}")));
                }
                let bytes = block_bytes(path)?;
                let (at, lba_bytes) = (path.display(), options.lba_bytes);
                if bytes < UNIT {
                    return Err(wrong(format!("on {at}: it has only {bytes} bytes")));
                }
                // All of the device belongs to the store: what other formats keep at its very end
                // is looked at before it is made, and cleared.
                if bytes % u64::from(lba_bytes) != 0 {
                    return Err(wrong(format!(
                        "on {at}: its {bytes} bytes are no multiple of {lba_bytes}; use logical \
                         blocks of 512 bytes (--lba 512), or end the partition at a multiple"
                    )));
                }
                Ok(StoreDirDevice { serial: serial(index), path: path.clone(), bytes })
            })
            .collect(),
    }
}

/// Time limit for the I/O of a killed process to end.
const RELEASE_TIMEOUT: Nanos = Nanos::from_millis(5_000);
/// Advice for a disk error.
const CHECK: &str = "check the disk";
/// Advice for one that cannot be made.
const PARENT: &str = "name a directory whose parent exists and that you may write to";
/// Names of the devices' files: `device-0.img`.
const FILE: &str = "device-";
const FILE_END: &str = ".img";

/// Returns the number in the name of a device's file; `None` if it is no such name.
fn file_number(name: &str) -> Option<u32> {
    name.strip_prefix(FILE)?.strip_suffix(FILE_END)?.parse().ok()
}

/// Returns the size of a block device.
fn block_bytes(path: &Path) -> Result<u64, StoreDirError> {
    let at = path.display();
    let wrong = |why: String| StoreDirError::options(&format!("on {at}: {why}"));
    let found = fs::metadata(path).map_err(|error| wrong(error.to_string()))?;
    if !found.file_type().is_block_device() {
        return Err(wrong("it is not a block device; use files instead".to_owned()));
    }
    // Opened as it is later: exclusively, and bypassing the page cache.
    Ok(open_media(path, 0, false)?.capacity_bytes())
}

/// Opens a device's medium of a locked directory. The kernel ends the I/O of a killed process
/// only after its death, and the file stays locked until then: waits for that.
fn open_media(path: &Path, bytes: u64, read_only: bool) -> Result<FileMedia, StoreDirError> {
    let options = FileOptions { keep_space: true, read_only, ..FileOptions::default() };
    let in_use = |error: &io::Error| {
        matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy)
    };
    until_released(|| FileMedia::open(path, bytes, options), in_use).map_err(StoreDirError::Media)
}

/// Opens what a process that was killed may have for a moment yet: then `in_use` is true.
pub(crate) fn until_released<T, E>(
    open: impl Fn() -> Result<T, E>,
    in_use: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let clock = MonotonicClock::default();
    let mut opened = open();
    wait_until(&clock, clock.now() + RELEASE_TIMEOUT, || {
        let is_final = !opened.as_ref().is_err_and(&in_use);
        if !is_final {
            opened = open();
        }
        is_final
    });
    opened
}

/// Returns the file of a medium, for the file executor.
#[must_use]
pub fn file_target(media: &FileMedia) -> FileTarget {
    let (file, [memory_align, offset_align]) = media.file();
    FileTarget { file, memory_align, offset_align, drive: media.drive().cloned() }
}

/// Refuses a directory with other files than ours, before a lock is put beside them.
pub(crate) fn check_empty(dir: &Path, is_ours: impl Fn(&str) -> bool) -> Result<(), StoreDirError> {
    let hint = "name a directory that you may read and write";
    let unread = |error| os(dir, "reading it", hint, error);
    for entry in fs::read_dir(dir).map_err(unread)? {
        let found = entry.map_err(unread)?.file_name().to_string_lossy().into_owned();
        if ![lock::NAME, "lost+found"].contains(&&*found) && !is_ours(&found) {
            let why = format!(
                "the directory holds something else ({found}), and a store is created only in an \
                 empty one; name another directory"
            );
            return Err(StoreDirError::occupied(dir, &why));
        }
    }
    Ok(())
}

/// Returns the error of a directory without a manifest.
fn no_manifest(dir: &Path) -> StoreDirError {
    let mut files = fs::read_dir(dir).into_iter().flatten().flatten();
    let name = |entry: fs::DirEntry| entry.file_name().into_string().ok();
    let device = files.find_map(|entry| name(entry).filter(|name| file_number(name).is_some()));
    let found =
        device.map_or(String::new(), |device| format!(": {device} is, and no {}", manifest::NAME));
    StoreDirError::missing(dir, &found)
}

/// Makes the file of a device.
fn make(dir: &Path, device: &StoreDirDevice) -> Result<(), StoreDirError> {
    let path = dir.join(&device.path);
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(&path);
    let hint = "name a directory that you may write to";
    let file = file.map_err(|error| os(&path, "making a device's file", hint, error))?;
    allocate(dir, &path, &file, device.bytes)
}

/// Returns the bytes that the files of devices need, and the parameters, which are written again
/// when the directory is ready.
fn room(devices: &[StoreDirDevice]) -> u64 {
    let files = devices.iter().filter(|device| device.is_file());
    files.fold(UNIT, |sum, device| sum.saturating_add(device.bytes))
}

/// Refuses a directory, or the one that it is to be made in, without access or room for devices.
fn check_place(dir: &Path, devices: &[StoreDirDevice]) -> Result<(), StoreDirError> {
    let parent = dir.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let at = if dir.exists() { dir } else { parent };
    let access = rustix::fs::access(at, Access::WRITE_OK | Access::EXEC_OK);
    access.map_err(|error| os(at, "making files in it", PARENT, error))?;
    // The remains of an earlier attempt are removed first.
    if Manifest::read(dir)?.is_some() { Ok(()) } else { check_room(at, room(devices)) }
}

/// Refuses an allocation for which the file system has too little space.
fn check_room(dir: &Path, wanted: u64) -> Result<(), StoreDirError> {
    let space = rustix::fs::statvfs(dir);
    let space = space.map_err(|error| os(dir, "measuring the disk", CHECK, error))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free < wanted {
        return Err(StoreDirError::disk_full(dir, wanted, free));
    }
    Ok(())
}

/// Allocates all space of a file.
fn allocate(dir: &Path, path: &Path, file: &File, bytes: u64) -> Result<(), StoreDirError> {
    let found = file.metadata().map_err(|error| os(path, "measuring it", CHECK, error))?;
    let missing = bytes.saturating_sub(found.blocks() * 512);
    if missing == 0 {
        return Ok(());
    }
    check_room(dir, missing)?;
    let (hint, error) = match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => return file.sync_all().map_err(|error| os(path, "flushing it", CHECK, error)),
        Err(error @ (Errno::NOSPC | Errno::DQUOT)) => ("make room there, or ask for less", error),
        Err(error) => ("name a directory on a local file system that allocates space", error),
    };
    Err(os(path, "allocating its space", hint, error))
}

/// Checks that a device exists and still has its size.
fn check(
    dir: &Path,
    index: usize,
    device: &StoreDirDevice,
    is_read_only: bool,
) -> Result<(), StoreDirError> {
    let path = dir.join(&device.path);
    let wrong = |why: String| Err(StoreDirError::device(&path, index, &why));
    let writes = !is_read_only || !device.is_file();
    let file = match File::options().read(true).write(writes).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return wrong("is gone".to_owned());
        }
        Err(error) => return wrong(format!("cannot be opened ({error})")),
    };
    if !device.is_file() {
        let bytes = block_bytes(&path)?;
        let wanted = device.bytes;
        if bytes < wanted {
            return wrong(format!("has {bytes} bytes and had {wanted}"));
        }
        return Ok(());
    }
    let found = file.metadata().map_err(|error| os(&path, "measuring it", CHECK, error))?;
    if !found.is_file() || found.len() != device.bytes {
        return wrong(format!("has {} bytes and had {}", found.len(), device.bytes));
    }
    if is_read_only {
        return Ok(());
    }
    // A copied file may be sparse where it has zeroes.
    allocate(dir, &path, &file, device.bytes)
}

/// Removes the files that [`StoreDir::create`] makes, the parameters last.
fn remove(dir: &Path, manifest: &Manifest) -> Result<(), StoreDirError> {
    let files = manifest.devices.iter().filter(|device| device.is_file());
    let files = files.map(|device| device.path.as_path());
    for name in files.chain([Path::new(manifest::NEW), Path::new(manifest::NAME)]) {
        let path = dir.join(name);
        removed(&path, fs::remove_file(&path))?;
    }
    sync_directory(dir)
}

/// Returns the error of a removal, unless there was nothing to remove.
pub(crate) fn removed(path: &Path, result: io::Result<()>) -> Result<(), StoreDirError> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(os(path, "removing it", "remove it by hand", error))
        }
        _ => Ok(()),
    }
}

/// Makes directories that only their owner can enter, whatever the umask: who may write to one may
/// put other files into the place of its devices.
pub(crate) fn private() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    builder
}

/// Warns if others than the owner of a store have access to its directory.
pub(crate) fn warn_of_others(dir: &Path) {
    if let Some(mode) = mode_for_others(dir) {
        let dir = dir.display();
        tracing::warn!(
            %dir,
            mode = format!("{mode:o}"),
            "others have access to the directory of the store: use chmod 700"
        );
    }
}

/// Returns the mode of a directory that others than its owner have access to.
fn mode_for_others(dir: &Path) -> Option<u32> {
    let mode = dir.metadata().ok()?.permissions().mode() & 0o777;
    (mode & 0o077 != 0).then_some(mode)
}

/// Makes directory entries durable.
pub(crate) fn sync_directory(dir: &Path) -> Result<(), StoreDirError> {
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(|error| os(dir, "flushing it", CHECK, error))
}

pub(crate) fn os(
    path: &Path,
    action: &'static str,
    hint: &'static str,
    source: impl Into<io::Error>,
) -> StoreDirError {
    let source = source.into();
    let hint = remedy(&source).unwrap_or(hint);
    StoreDirError::Os { path: path.to_owned(), action, source, hint }
}

#[cfg(test)]
mod tests;
