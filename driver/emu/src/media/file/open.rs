//! Opening the file or block device of a medium: its size and its direct I/O limits.

use std::{io, os::fd::OwnedFd, path::Path};

use nvme_driver::{Use, remedy, users_of_disk};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, StatxFlags},
    io::Errno,
};

use super::{FileOptions, transfer::Limits};

pub(super) fn explain(
    path: &Path,
    what: &str,
    error: impl Into<io::Error>,
    hint: &str,
) -> io::Error {
    let error = error.into();
    let hint = remedy(&error).unwrap_or(hint);
    io::Error::new(error.kind(), format!("{}: {what} failed: {error}; {hint}", path.display()))
}

/// Opens `path`; creates a missing file if `make` is set.
pub(super) fn open(path: &Path, make: bool, options: FileOptions) -> io::Result<OwnedFd> {
    let FileOptions { direct, read_only, .. } = options;
    let mut flags = if read_only { OFlags::RDONLY } else { OFlags::RDWR } | OFlags::CLOEXEC;
    flags.set(OFlags::DIRECT, direct);
    let block_device = rustix::fs::stat(path).is_ok_and(|found| is_block_device(&found));
    // For a block device, O_EXCL means: not mounted or otherwise claimed.
    flags.set(OFlags::EXCL, block_device);
    flags.set(OFlags::CREATE, make && !block_device && !read_only);
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|error| {
        // A mount does not end by waiting, as the I/O of a process that was killed does.
        let user = (error == Errno::BUSY).then(|| user(path)).flatten();
        if let Some(user) = user {
            let why = format!("{}: it is in use: {user}; end that use", path.display());
            return io::Error::other(why);
        }
        let hint = match error {
            Errno::INVAL if direct => {
                "its filesystem has no direct I/O (O_DIRECT): use another one, or say direct: false"
            }
            Errno::BUSY => "something uses it that is not visible from here: see lsblk",
            _ => "check the path and its permissions",
        };
        explain(path, "opening it", error, hint)
    })
}

/// Returns a visible user of a block device.
fn user(path: &Path) -> Option<String> {
    let real = std::fs::canonicalize(path).ok()?;
    let name = real.file_name()?.to_str()?;
    users_of_disk(name, "").first().map(Use::sentence)
}

fn is_block_device(found: &rustix::fs::Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice
}

/// Returns `bytes`, to which a shorter file is extended, or the file's size if `bytes` is 0.
pub(super) fn capacity(file: &OwnedFd, path: &Path, bytes: u64) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)
        .map_err(|error| explain(path, "reading its size", error, "check the path"))?;
    let block_device = is_block_device(&stat);
    let found = if block_device {
        // The size in its inode is 0.
        rustix::fs::seek(file, SeekFrom::End(0))
            .map_err(|error| explain(path, "finding its size", error, "check the device"))?
    } else {
        u64::try_from(stat.st_size).unwrap_or(0)
    };
    if found < bytes && block_device {
        let error = io::Error::from(io::ErrorKind::StorageFull);
        let what = format!("using {bytes} bytes of a block device that has {found}");
        return Err(explain(path, &what, error, "use a larger one, or ask for less"));
    }
    if found < bytes {
        rustix::fs::ftruncate(file, bytes)
            .map_err(|error| explain(path, "extending it", error, "use a smaller medium"))?;
    }
    Ok(if bytes == 0 { found } else { bytes })
}

/// Returns the alignment that direct I/O on this file requires.
pub(super) fn limits(file: &OwnedFd, path: &Path, direct: bool) -> io::Result<Limits> {
    if !direct {
        return Ok(Limits { memory_align: 1, offset_align: 1 });
    }
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .map_err(|error| explain(path, "asking for its alignment", error, "say direct: false"))?;
    let known = found.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    if known && found.stx_dio_offset_align == 0 {
        let error = io::Error::from(io::ErrorKind::Unsupported);
        let hint = "its filesystem has no direct I/O (O_DIRECT): use another one, or say \
                    direct: false";
        return Err(explain(path, "direct I/O", error, hint));
    }
    // Kernels before 6.1 and some filesystems do not report it; a page satisfies all of them.
    let or_page = |align: u32| if known { align.max(1) as usize } else { 4096 };
    Ok(Limits {
        memory_align: or_page(found.stx_dio_mem_align),
        offset_align: or_page(found.stx_dio_offset_align),
    })
}
