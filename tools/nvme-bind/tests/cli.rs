//! Runs the command like a script. Read-only.

use std::fs;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use clap::builder::ValueParser;

/// A command that takes longer hangs, on any machine.
const TIMEOUT: Duration = Duration::from_secs(600);

fn start(words: &[&str], stdout: Stdio) -> std::process::Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvme-bind"));
    command.args(words).stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap()
}

fn run(words: &[&str]) -> Output {
    let mut child = start(words, Stdio::piped());
    let until = Instant::now() + TIMEOUT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{words:?}: it waits");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_stdout_that_is_full_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    let [list, status] = ["list", "status"].map(|name| ["--root", root, "--json", name]);
    for words in [&list[..], &status, &["--root", root, "doctor"], &["--help"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = start(words, full.into()).wait_with_output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {error}");
        assert!(error.contains("error: writing to stdout: No space left"), "{words:?}: {error}");
    }
}

/// A stdout that nobody reads from the start: a short report would be written before a later close.
fn unread() -> Stdio {
    let (reader, writer) = UnixStream::pair().unwrap();
    reader.shutdown(Shutdown::Both).unwrap();
    OwnedFd::from(writer).into()
}

/// Closes stdout early, like `head`.
#[test]
fn a_reader_that_goes_away_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    for (words, code) in [
        (&["--root", root, "list", "--json"][..], 0),
        (&["--help"], 0),
        (&["--root", root, "doctor"], 141),
    ] {
        let output = start(words, unread()).wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", text(&output.stderr));
        let error = text(&output.stderr);
        assert!(!error.contains("error") && !error.contains("panicked"), "{words:?}: {error}");
    }
}

/// All arguments that name a file or directory, with paths that are not directories.
#[test]
fn folders_that_are_none_are_refused() {
    let known = ["--root", "--state-dir"];
    let is_path = |arg: &&clap::Arg| {
        let names = arg.get_value_names().unwrap_or_default();
        let said =
            names.iter().any(|name| ["FILE", "PATH", "DIR"].iter().any(|it| name.contains(it)));
        let of_path = arg.get_value_parser().type_id() == ValueParser::path_buf().type_id();
        arg.get_action().takes_values() && (said || of_path)
    };
    let command = nvme_bind::command();
    let inner = command.get_subcommands().flat_map(|command| command.get_arguments());
    let all = command.get_arguments().chain(inner).filter(is_path);
    let found: Vec<_> = all.filter_map(|arg| arg.get_long()).map(|it| format!("--{it}")).collect();
    assert!(found.iter().all(|flag| known.contains(&&**flag)), "not in the table: {found:?}");
    assert!(found.len() >= known.len(), "{found:?}");

    let folder = tempfile::tempdir().unwrap();
    let [fifo, line] = ["fifo", "line"].map(|name| folder.path().join(name));
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap();
    fs::File::create(&line).unwrap().set_len(1 << 30).unwrap();
    for bad in [&fifo, &line, Path::new("/dev/zero")] {
        let bad = bad.to_str().unwrap();
        let output = run(&["--root", bad, "list"]);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{bad}: {error}");
        assert!(error.contains("error: --root") && error.contains("hint: "), "{bad}: {error}");
        // A path that is not a directory holds no records.
        let root = folder.path().to_str().unwrap();
        let output = run(&["--root", root, "--state-dir", bad, "status"]);
        assert_eq!(output.status.code(), Some(0), "{bad}: {}", text(&output.stderr));
    }
}
