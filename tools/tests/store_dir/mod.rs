//! A store directory below a temporary directory, and the commands to use it.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// The smallest replay that stores blocks and verifies all of them.
pub const REPLAY: &str =
    "replay --model tiny --keep --lba 4096 --requests 20 --verify full --quiet";
/// The store that [`REPLAY`] can use.
pub const FORMAT: &str = "format --model tiny --lba 4096 --capacity 16MiB";

/// A temporary directory with a store directory.
pub struct Place {
    dir: TempDir,
}

/// Makes a directory as the store makes it; of another one it warns.
pub fn private_dir(path: &Path) {
    fs::DirBuilder::new().mode(0o700).create(path).unwrap();
}

impl Place {
    /// Makes it beside the build: the temporary directory may be a tmpfs without direct I/O.
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the store directory. Other files can be put beside it.
    pub fn store_dir(&self) -> PathBuf {
        let store_dir = self.path().join("store");
        if !store_dir.exists() {
            private_dir(&store_dir);
        }
        store_dir
    }

    pub fn device(&self, at: u32) -> PathBuf {
        self.store_dir().join(format!("device-{at}.img"))
    }

    /// Makes a device's file one of zeros.
    pub fn blank(&self, at: u32) {
        let file = fs::File::options().write(true).open(self.device(at)).unwrap();
        let bytes = file.metadata().unwrap().len();
        file.set_len(0).unwrap();
        file.set_len(bytes).unwrap();
    }

    /// Overwrites bytes of a device's file directly.
    pub fn poke(&self, at: u32, offset: u64, bytes: &[u8]) {
        let file = fs::File::options().write(true).open(self.device(at)).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }

    /// Returns `ripieno` with the arguments of `line`, on the store directory, run in its parent.
    pub fn command(&self, line: &str) -> Command {
        let mut command = self.bare(line);
        command.arg("--path").arg(self.store_dir());
        command
    }

    /// Same as `command`, without --path.
    pub fn bare(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
        command.args(line.split_whitespace()).env_remove("RUST_LOG").current_dir(self.path());
        let has_shape = ["--model", "--shape"].iter().any(|flag| line.contains(flag));
        if line.starts_with("format") && !has_shape {
            command.args(["--model", "tiny"]);
        }
        command
    }

    /// Runs it and checks the exit code. Returns stdout and stderr.
    pub fn run(&self, line: &str, code: i32) -> String {
        said(line, self.command(line).output().unwrap(), code)
    }

    /// Same as `run`, with --json. Returns the object that it printed.
    pub fn json(&self, line: &str, code: i32) -> Value {
        let text = self.run(&format!("{line} --json"), code);
        serde_json::from_str(text.lines().find(|line| line.starts_with('{')).unwrap()).unwrap()
    }

    /// Checks that it is refused as bad input, with all of `wanted`, and prints nothing on stdout.
    pub fn refused(&self, line: &str, wanted: &[&str]) {
        let output = self.command(line).output().unwrap();
        assert!(output.stdout.is_empty(), "{line}: {}", text(&output.stdout));
        let said = said(line, output, 2);
        assert!(said.starts_with("error: "), "{line}: {said}");
        for wanted in wanted {
            assert!(said.contains(wanted), "{line}: `{wanted}` is not in `{said}`");
        }
    }

    /// Returns name and contents of the store directory's files, except its lock.
    pub fn files(&self) -> Vec<(String, Vec<u8>)> {
        let mut files = Vec::new();
        for entry in fs::read_dir(self.store_dir()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name != "lock" {
                files.push((name, fs::read(&path).unwrap()));
            }
        }
        files.sort();
        files
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns stdout and stderr of a command, which must have exited with `code`.
pub fn said(line: &str, output: Output, code: i32) -> String {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{line}\n{out}\n{err}");
    out + &err
}

/// Returns true if the tests run as root; else prints that `test` is skipped.
pub fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped(test, "root is needed");
    }
    root
}

/// Prints that a test cannot run here, and why.
pub fn skipped(test: &str, why: &str) {
    // Not println: the harness captures that of tests that pass, so it could not be counted.
    let _ = writeln!(std::io::stdout(), "SKIPPED {test}: {why}");
}
