//! The file of a listening socket, which belongs to one process.
//!
//! A path may name the socket of another process at any time: it was removed by hand and made
//! again, or two servers start at once. So a lock beside the socket decides who has the path, and
//! only the socket that was made here is removed.

use std::{
    fs::{self, File},
    io,
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
        net::UnixListener,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, OFlags},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};

/// The file of a listening socket, and its lock; both are removed on drop, if they are still these.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    node: Option<Node>,
    lock: File,
}

/// Device and inode.
type Node = (u64, u64);

impl SocketFile {
    /// Listens on a socket, in place of one whose process has ended.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::AddrInUse`] if another process listens there, or is about to, or
    /// what the operating system says: also if there is a file that is no socket.
    pub fn bind(path: &Path) -> io::Result<(UnixListener, Self)> {
        let lock = lock(&lock_path(path))?;
        // From here on its drop removes the lock.
        let mut file = Self { path: path.to_owned(), node: None, lock };
        let found = fs::symlink_metadata(path);
        if found.is_ok_and(|found| found.file_type().is_socket()) {
            match connect(path) {
                Err(Errno::CONNREFUSED) => fs::remove_file(path)?,
                Err(Errno::NOENT) => {}
                // Somebody listens, also if he hangs, or does not let this user in.
                _ => return Err(io::ErrorKind::AddrInUse.into()),
            }
        }
        let listener = UnixListener::bind(path).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => {
                io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket")
            }
            _ => error,
        })?;
        file.node = node_at(path);
        Ok((listener, file))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let path = self.path.display();
        if self.node.is_some() {
            match node_at(&self.path) == self.node {
                true => {
                    if let Err(error) = fs::remove_file(&self.path) {
                        tracing::warn!(%error, %path, "the socket stays");
                    }
                }
                false => tracing::warn!(%path, "the socket is gone, or of another process"),
            }
        }
        let lock_path = lock_path(&self.path);
        if node_at(&lock_path) == node_of(&self.lock) {
            // The next one makes it again.
            let _ = fs::remove_file(lock_path);
        }
        // A process that another thread is just forking has a copy of the descriptor.
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }
}

/// Times that a lock is taken whose file is another one by then.
const LOCK_ATTEMPTS: u32 = 100;
/// Flag of open(2) for a lock: another user may have put a link in its place.
const NO_LINK: i32 = OFlags::NOFOLLOW.bits().cast_signed();

fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// Opens and locks the file at `path` until it is the one there: who held the lock before may have
/// removed it meanwhile. Returns `None` if it is replaced again and again.
pub(crate) fn lock_at<E>(
    path: &Path,
    mut lock: impl FnMut(io::Result<File>) -> Result<File, E>,
) -> Result<Option<File>, E> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(NO_LINK);
    for _ in 0..LOCK_ATTEMPTS {
        let file = lock(options.open(path))?;
        if node_at(path) == node_of(&file) {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// Takes the lock of a socket.
fn lock(path: &Path) -> io::Result<File> {
    let lock = lock_at(path, |file| {
        let file = file?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(io::Error::from(io::ErrorKind::AddrInUse)),
            locked => Ok(locked.map(|()| file)?),
        }
    })?;
    lock.ok_or_else(|| io::Error::other("its lock is replaced again and again"))
}

/// Returns what is at a path.
fn node_at(path: &Path) -> Option<Node> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Returns what an open file is.
fn node_of(file: &File) -> Option<Node> {
    file.metadata().ok().map(|found| (found.dev(), found.ino()))
}

/// Connects without waiting for room.
fn connect(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn in_use(path: &Path) -> bool {
        SocketFile::bind(path).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
    }

    #[test]
    fn a_socket_is_removed_by_its_own_process_only() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let (listener, file) = SocketFile::bind(&path).unwrap();
        assert!(in_use(&path));
        // Also after somebody has removed the socket: there would be two.
        fs::remove_file(&path).unwrap();
        assert!(in_use(&path));
        // And if both are gone, what another one makes is its own.
        fs::remove_file(lock_path(&path)).unwrap();
        let (other, others) = SocketFile::bind(&path).unwrap();
        drop((listener, file));
        assert!(path.exists() && lock_path(&path).exists());
        assert!(in_use(&path));
        drop((other, others));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn a_lock_that_is_replaced_each_time_is_given_up() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let lock = |replaced| {
            let mut taken = 0;
            let lock = lock_at(&path, |file| {
                taken += 1;
                if taken <= replaced {
                    fs::remove_file(&path).unwrap();
                }
                file
            });
            (lock.unwrap().is_some(), taken)
        };
        assert_eq!(lock(0), (true, 1));
        assert_eq!(lock(3), (true, 4));
        assert_eq!(lock(LOCK_ATTEMPTS), (false, LOCK_ATTEMPTS));
    }

    #[test]
    fn a_lock_that_is_a_link_is_not_followed() {
        let dir = TempDir::new().unwrap();
        let (path, target) = (dir.path().join("socket"), dir.path().join("target"));
        std::os::unix::fs::symlink(&target, lock_path(&path)).unwrap();
        SocketFile::bind(&path).unwrap_err();
        assert!(!target.exists() && !path.exists());
    }

    #[test]
    fn what_a_killed_process_left_is_replaced() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        fs::write(lock_path(&path), "").unwrap();
        let (listener, file) = SocketFile::bind(&path).unwrap();
        drop((listener, file));
        // One that hangs has room for no connection.
        let hung = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&hung, 0).unwrap();
        let _first = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert!(in_use(&path));
        drop(hung);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        let error = SocketFile::bind(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"mine");
    }
}
