//! Reading of untrusted files: regular files only, up to a limit.

use std::{
    borrow::Cow,
    env,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::OFlags;

use crate::Size;

/// Returns a path as a shell does that has a `~` at its beginning: a shell expands none behind
/// `file:`, and there is none behind a configuration file.
#[must_use]
pub fn expand_home(path: &Path) -> Cow<'_, Path> {
    match (path.strip_prefix("~"), env::var_os("HOME").filter(|home| !home.is_empty())) {
        (Ok(rest), Some(home)) if rest.as_os_str().is_empty() => PathBuf::from(home).into(),
        (Ok(rest), Some(home)) => Path::new(&home).join(rest).into(),
        _ => path.into(),
    }
}

/// Opens a regular file for reading. Never blocks, as opening a FIFO would.
///
/// # Errors
/// Returns an error if it cannot be opened, or names its type if it is no regular file.
pub fn open_file(path: &Path) -> io::Result<File> {
    let found = fs::metadata(path)?.file_type();
    if !found.is_file() {
        let what = match () {
            () if found.is_dir() => "a directory",
            () if found.is_fifo() => "a FIFO",
            () if found.is_socket() => "a socket",
            () => "a device",
        };
        return Err(io::Error::other(format!("it is {what}, and not a regular file")));
    }
    // Must not block on a file that has replaced it since, either.
    let no_wait = OFlags::NONBLOCK.bits().cast_signed();
    File::options().read(true).custom_flags(no_wait).open(path)
}

/// Reads a regular file of at most `bytes_max` bytes.
///
/// # Errors
/// Same as [`open_file`]; also for a larger file, of which no more than the limit is read.
pub fn read_file(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open_file(path)?;
    let too_large = || {
        let what = format!("it has more than the {} that are read at most", Size(bytes_max));
        Err(io::Error::new(io::ErrorKind::FileTooLarge, what))
    };
    if file.metadata()?.len() > bytes_max {
        return too_large();
    }
    // Files in /proc report a size of 0, and other files may grow.
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max { too_large() } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;

    #[test]
    fn a_tilde_is_the_home_of_the_user_and_only_at_the_beginning() {
        let home = env::var_os("HOME").map_or_else(|| "~".into(), PathBuf::from);
        for (given, wanted) in [
            ("~", home.clone()),
            ("~/kv/a", home.join("kv/a")),
            ("./~/kv", "./~/kv".into()),
            ("/a/~", "/a/~".into()),
            ("~other/kv", "~other/kv".into()),
            ("", "".into()),
        ] {
            assert_eq!(expand_home(Path::new(given)), wanted, "{given}");
        }
    }

    #[test]
    fn only_files_are_read_and_only_up_to_the_limit() {
        let place = tempfile::tempdir().unwrap();
        let [file, fifo] = ["file", "fifo"].map(|name| place.path().join(name));
        fs::write(&file, "12345").unwrap();
        mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
        assert_eq!(read_file(&file, 5).unwrap(), b"12345");
        for (path, limit, wanted) in [
            (&*file, 4, "more than the 4 B"),
            (&fifo, 9, "it is a FIFO"),
            (place.path(), 9, "it is a directory"),
            (Path::new("/dev/zero"), 9, "it is a device"),
            (Path::new("/no/such/file"), 9, "No such file"),
            // A regular file whose reported size is 0.
            (Path::new("/proc/self/status"), 9, "more than the 9 B"),
        ] {
            let error = read_file(path, limit).unwrap_err().to_string();
            assert!(error.contains(wanted), "{}: {error}", path.display());
        }
    }
}
