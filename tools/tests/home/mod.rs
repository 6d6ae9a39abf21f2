//! A home in a directory of its own, and the commands on it.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// The smallest replay that stores something and checks all of it.
pub const REPLAY: &str = "replay --keep --lba 4096 --requests 20 --verify full --quiet";
/// The store that [`REPLAY`] can use.
pub const FORMAT: &str = "format --lba 4096 --capacity 16MiB";

/// A home's directory.
pub struct Place {
    dir: TempDir,
}

impl Place {
    /// Not in the temporary directory: that may be a tmpfs without direct I/O.
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The home's directory; beside it is room for other files.
    pub fn home(&self) -> PathBuf {
        let home = self.path().join("home");
        if !home.exists() {
            fs::create_dir(&home).unwrap();
        }
        home
    }

    pub fn device(&self, at: u32) -> PathBuf {
        self.home().join(format!("device-{at}.img"))
    }

    /// Changes bytes behind everybody's back.
    pub fn poke(&self, at: u32, offset: u64, bytes: &[u8]) {
        let file = fs::File::options().write(true).open(self.device(at)).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }

    /// `ripieno` with the words of `line`, on the home; in the directory that it is in.
    pub fn command(&self, line: &str) -> Command {
        let mut command = self.bare(line);
        command.arg("--media").arg(format!("file:{}", self.home().display()));
        command
    }

    /// The same, without saying where the home is.
    pub fn bare(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
        command.args(line.split_whitespace()).env_remove("RUST_LOG").current_dir(self.path());
        command
    }

    /// Runs it and wants this exit code. Returns what it said.
    pub fn run(&self, line: &str, code: i32) -> String {
        said(line, self.command(line).output().unwrap(), code)
    }

    /// The same, and the object that it printed.
    pub fn json(&self, line: &str, code: i32) -> Value {
        let text = self.run(&format!("{line} --json"), code);
        serde_json::from_str(text.lines().find(|line| line.starts_with('{')).unwrap()).unwrap()
    }

    /// It is refused as bad input, with all of `wanted`, and says nothing on stdout.
    pub fn refused(&self, line: &str, wanted: &[&str]) {
        let output = self.command(line).output().unwrap();
        assert!(output.stdout.is_empty(), "{line}: {}", text(&output.stdout));
        let said = said(line, output, 2);
        assert!(said.starts_with("error: "), "{line}: {said}");
        for wanted in wanted {
            assert!(said.contains(wanted), "{line}: `{wanted}` is not in `{said}`");
        }
    }

    /// The home's files, but not its lock.
    pub fn files(&self) -> Vec<(String, Vec<u8>)> {
        let mut files = Vec::new();
        for entry in fs::read_dir(self.home()).unwrap() {
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

/// What a command said, if it ended with `code`.
pub fn said(line: &str, output: Output, code: i32) -> String {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{line}\n{out}\n{err}");
    out + &err
}

/// Root's rights are needed. A test that cannot run says so, and why.
pub fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped(test, "root is needed");
    }
    root
}

/// A test that cannot run here.
pub fn skipped(test: &str, why: &str) {
    // Not println: what tests that pass print is not shown, and could not be counted.
    let _ = writeln!(std::io::stdout(), "SKIPPED {test}: {why}");
}
