//! Files named by flags: read up to a size limit, written atomically.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nvme_driver::remedy;
use ripieno_stack::read_file;
use tempfile::{Builder, NamedTempFile};

use crate::problem::Problem;

/// Reads the text of a regular file of at most `bytes_max` bytes.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let text = String::from_utf8(read_file(path, bytes_max)?);
    text.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not text (UTF-8)"))
}

/// Rejects a path that [`write`] could not write to, before there is anything to write.
pub(crate) fn check_output(flag: &str, path: &Path) -> Result<(), Problem> {
    beside(path).map(drop).map_err(|error| unwritable(flag, path, &error))
}

/// Writes a file completely or not at all.
pub(crate) fn write(flag: &str, path: &Path, text: &str) -> Result<(), Problem> {
    let write = || {
        let (mut file, path) = beside(path)?;
        file.write_all(text.as_bytes())?;
        file.persist(path).map(drop).map_err(|error| error.error)
    };
    write().map_err(|error| unwritable(flag, path, &error))
}

fn unwritable(flag: &str, path: &Path, error: &io::Error) -> Problem {
    Problem::new(
        format!("{flag} {}: it cannot be written: {error}", path.display()),
        remedy(error)
            .unwrap_or("name a file in a directory that is there and that you may write to"),
    )
}

/// Returns a temporary file and the path to rename it to: the link's target if `path` is a link.
fn beside(path: &Path) -> io::Result<(NamedTempFile, PathBuf)> {
    let path = match fs::metadata(path) {
        Ok(found) if !found.is_file() => return Err(io::Error::other("it is not a regular file")),
        Ok(_) => path.canonicalize()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
        Err(error) => return Err(error),
    };
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let mut new = Builder::new();
    // The umask is applied, as for any new file.
    let new = new.permissions(Permissions::from_mode(0o666));
    let new = new.tempfile_in(directory.unwrap_or(Path::new(".")));
    // The error has the name of the temporary file, which nobody asked for.
    Ok((new.map_err(|error| io::Error::from(error.kind()))?, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_is_checked_without_a_trace_and_written_through_a_link() {
        let place = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| place.path().join(name));
        check_output("--out", &file).unwrap();
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        write("--out", &file, "first").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        write("--out", &link, "second").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "second");
        assert!(link.is_symlink());
        let inside = file.join("x");
        for bad in [place.path(), Path::new("/dev/zero"), Path::new("/no/such/x"), &inside] {
            for problem in [check_output("--out", bad), write("--out", bad, "text")] {
                let problem = problem.unwrap_err().to_string();
                let wanted = format!("--out {}: it cannot be written: ", bad.display());
                assert!(problem.starts_with(&wanted), "{problem}");
                assert!(!problem[wanted.len()..].contains(".tmp"), "{problem}");
            }
        }
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2);
    }
}
