//! Commands on a terminal: no line is wider than it, unless it is a single word.

use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tempfile::TempDir;

/// Runs a command on a terminal of so many columns. Returns its lines, without escape sequences.
fn lines(words: &[&str], columns: u16) -> Vec<String> {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap();
    let size = Winsize { ws_row: 50, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&terminal, size).unwrap();
    let stdout: OwnedFd =
        rustix::fs::open(&*name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_ripieno"))
        .args(words)
        .env_remove("RUST_LOG")
        .env_remove("COLUMNS")
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(OpenOptions::new().write(true).open("/dev/null").unwrap())
        .spawn()
        .unwrap();
    let mut bytes = Vec::new();
    // Ends with an error when the last writer has closed the terminal.
    let _ = File::from(terminal).read_to_end(&mut bytes);
    let status = child.wait().unwrap();
    assert!(status.success(), "{words:?}: {status}");
    let text = String::from_utf8(bytes).unwrap().replace("\r\n", "\n");
    // A progress bar is on stderr, and a title's escape sequences have no width.
    text.lines().map(without_escapes).collect()
}

fn without_escapes(line: &str) -> String {
    let mut parts = line.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    let rest = parts.map(|part| part.trim_start_matches(|c: char| !c.is_ascii_alphabetic()));
    first + &rest.map(|part| &part[1..]).collect::<String>()
}

#[test]
fn tables_fit_the_terminal() {
    let place = TempDir::new_in("/var/tmp").unwrap();
    let store = place.path().join("store").display().to_string();
    let other = place.path().join("other").display().to_string();
    let format = ["format", "--path", &store, "--capacity", "16MiB", "--model", "tiny"];
    lines(&format, 80);
    let served = TempDir::new_in(place.path()).unwrap();
    let _server = crate::serve::serve(&crate::serve::config(served.path()));
    let socket = served.path().join("socket").display().to_string();
    let commands: &[&[&str]] = &[
        &["replay", "--model", "tiny", "--requests", "30"],
        &["replay", "--model", "tiny", "--requests", "30", "--keep", "--path", &store],
        &["inspect", "--path", &store],
        &["scrub", "--path", &store],
        &["format", "--path", &other, "--capacity", "16MiB", "--model", "tiny", "--dry-run"],
        &["identify"],
        &["pace", "--model", "tiny", "--requests", "30"],
        &[
            "bench",
            "raw",
            "--runtime",
            "0.05",
            "--ramp",
            "0.01",
            "--bs",
            "4k",
            "--iodepth",
            "1",
            "--size",
            "16MiB",
            "--rw",
            "randread",
        ],
        &["sim", "chat", "--requests", "40"],
        &["sim", "plan", "chat", "--rate", "0.5", "--requests", "40"],
        &["sim", "cluster", "chat", "--rate", "1", "--requests", "40", "--engines", "2"],
        &["sim", "tutti-13"],
        &["options"],
        &["doctor"],
        &["ctl", "status", "--socket", &socket],
        &["top", &socket, "--once"],
        &["replay", "--help"],
    ];
    for words in commands {
        for columns in [60, 80, 200] {
            let lines = lines(words, columns);
            assert!(lines.iter().any(|line| !line.is_empty()), "{words:?}: no output");
            let most = usize::from(columns);
            // A digest is longer than 60 columns, and stays whole.
            let is_wide =
                |line: &&String| line.chars().count() > most && line.split_whitespace().count() > 1;
            let wide: Vec<_> = lines.iter().filter(is_wide).collect();
            assert!(wide.is_empty(), "{words:?} at {columns} columns: {wide:#?}");
        }
    }
}

/// Returns the names of a command and of all below it.
fn names(command: &clap::Command, path: &[String]) -> Vec<Vec<String>> {
    let below = command
        .get_subcommands()
        .flat_map(|it| names(it, &[path, &[it.get_name().to_owned()]].concat()));
    below.chain([path.to_vec()]).collect()
}

#[test]
fn short_help_fits_a_small_terminal() {
    for name in names(&ripieno::command(), &[]) {
        let words: Vec<&str> = name.iter().map(String::as_str).chain(["-h"]).collect();
        let help = lines(&words, 80);
        assert!(help.len() <= 24, "{words:?}: {} lines: {help:#?}", help.len());
        assert!(help.iter().any(|line| line.contains("Usage: ripieno")), "{help:#?}");
    }
}
