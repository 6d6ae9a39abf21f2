//! The command line: parsing, and output to stdout and stderr.

use std::cell::RefCell;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use serde_json::{Value, json};

use crate::command::{self, Host, Reply, bind, release};
use crate::doctor;
use crate::journal::Journal;
use crate::machine::Live;
use crate::pci::Root;
use crate::problem::{Problem, Result};
use crate::report::Paint;

/// Exit code when the reader of stdout closed it before the report was complete, as shells encode
/// it (128 + SIGPIPE).
const EXIT_UNREAD: u8 = 141;

const EXIT_CODES: &str = "\
Exit codes:
  0  done, or there was nothing to do
  1  the machine said no; what had been begun was put back (or: not root, or stdout is full)
  2  the command line, or a device that is not there
  3  refused: the drive, or its VFIO group, is in use
  4  refused: VFIO cannot take it (no IOMMU, or others in its group)
  5  a drive is between two drivers; `nvme-bind restore` puts it back
  6  doctor --strict: a check failed

A reader of stdout that goes away early, such as head, changes none of them, but for doctor: 141,
because the checks ended there.

Data goes to stdout, as a table or with --json as one JSON object; notes and errors go to stderr.
With --json an error is an object on stdout, too: {\"error\": {\"kind\", \"message\", \"hint\"}}.";

const EXAMPLES: &str = "\
Examples:
  What is there, and what stands in the way:
    nvme-bind list
    nvme-bind doctor
  See what would be done, then hand a drive to user alice:
    nvme-bind bind 65:00.0 --user alice --dry-run
    sudo nvme-bind bind 65:00.0 --user alice
  Two drives, for a group of users, now and after each reboot:
    sudo nvme-bind bind nvme1n1 nvme2n1 --group kvcache --persist
  Back to the kernel:
    sudo nvme-bind unbind 65:00.0
  Everything back, also after a crash in the middle:
    sudo nvme-bind restore

";

/// Hands NVMe drives to userspace drivers through VFIO, and back.
///
/// A drive that is mounted, open, swap, or part of an array, volume group or pool is never touched.
/// The former driver is remembered and put back. Every intention is written to a journal before the
/// first change, so that a crash at any point can be undone with `restore`.
#[derive(Debug, Parser)]
#[command(name = "nvme-bind", version = crate::VERSION, arg_required_else_help = true)]
#[command(after_help = format!("{EXAMPLES}{EXIT_CODES}"))]
struct Raw {
    /// Answer with one JSON object on stdout
    #[arg(long, global = true)]
    json: bool,
    /// Keep the journal in this folder [default: /run/nvme-bind; /var/lib/nvme-bind for --persist]
    #[arg(long, global = true, value_name = "DIR", value_parser = absolute)]
    state_dir: Option<String>,
    /// Look below this folder instead of / (a copy of another machine's /sys, /proc, /dev and /etc)
    #[arg(long, global = true, value_name = "DIR", default_value = "/", hide_default_value = true)]
    root: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the NVMe drives: driver, IOMMU group, NUMA node, who uses them, the nearest GPU
    List {
        /// Show serial numbers (--json always does)
        #[arg(long)]
        serials: bool,
    },
    /// Show what is bound, what was left half-done, and what is bound at boot
    ///
    /// Ends with exit code 5 if a drive was left half-done.
    Status,
    /// Check IOMMU, VFIO, groups, ACS, limits, GPU and distances, and say how to fix what is wrong
    ///
    /// It changes nothing and needs no rights; as root it sees more (ACS, open files of others).
    Doctor {
        /// End with exit code 6 if a check failed
        #[arg(long)]
        strict: bool,
    },
    /// Hand drives to vfio-pci
    ///
    /// All drives that are named are bound, or none: if a step fails, those before it are undone.
    Bind(bind::Request),
    /// Give drives back to the driver they had, also those that others bound
    Unbind(release::Request),
    /// Give back everything the journal knows of, finished or half-done
    Restore(release::Restore),
}

/// Runs the program with the arguments of this process.
#[must_use]
pub fn run() -> ExitCode {
    let is_terminal = io::stdout().is_terminal();
    let paint = Paint(is_terminal && std::env::var_os("NO_COLOR").is_none());
    let outcome = answer(std::env::args_os(), paint, &mut io::stdout());
    // A failure to write this cannot be reported anywhere.
    let _ = io::stderr().write_all(outcome.log.as_bytes());
    let mut out = io::stdout();
    match out.write_all(outcome.data.as_bytes()).and_then(|()| out.flush()) {
        // A closed reader is no error: the exit code reports the outcome.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "error: writing to stdout: {error}");
            ExitCode::from(if outcome.code == 0 { 1 } else { outcome.code })
        }
        _ => ExitCode::from(outcome.code),
    }
}

/// Returns the definition of the command line.
#[must_use]
pub fn command() -> clap::Command {
    Raw::command()
}

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) data: String,
    pub(crate) log: String,
    pub(crate) code: u8,
}

/// Runs the program with these arguments, the first of which is its name. Only output that must not
/// wait for the end is written to `out`.
pub(crate) fn answer(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    paint: Paint,
    out: &mut dyn Write,
) -> Outcome {
    let matches = command().try_get_matches_from(arguments);
    let raw = match matches.and_then(|matches| Raw::from_arg_matches(&matches)) {
        Ok(raw) => raw,
        Err(error) => {
            let text = error.render();
            let text = if paint.0 { text.ansi().to_string() } else { text.to_string() };
            let code = u8::try_from(error.exit_code()).unwrap_or(2);
            let (data, log) =
                if error.use_stderr() { (String::new(), text) } else { (text, String::new()) };
            return Outcome { data, log, code };
        }
    };
    let as_json = raw.json;
    let notes = RefCell::new(Vec::new());
    let result = dispatch(raw, paint, &notes, out);
    let mut log: String =
        notes.into_inner().iter().map(|note: &String| format!("note: {note}\n")).collect();
    match result {
        Ok(reply) => {
            let data = match reply.json {
                Value::Null => String::new(),
                json if as_json => format!("{json:#}\n"),
                _ => lines(reply.text),
            };
            Outcome { data, log, code: reply.code }
        }
        Err(problem) => {
            log.push_str(&format!("error: {problem}\n"));
            if !problem.hint.is_empty() {
                log.push_str(&format!("hint: {}\n", problem.hint));
            }
            let json = json!({ "error": problem });
            let data = if as_json { format!("{json:#}\n") } else { String::new() };
            Outcome { data, log, code: problem.kind.exit_code() }
        }
    }
}

fn lines(text: String) -> String {
    if text.is_empty() || text.ends_with('\n') { text } else { text + "\n" }
}

fn dispatch(
    raw: Raw,
    paint: Paint,
    notes: &RefCell<Vec<String>>,
    out: &mut dyn Write,
) -> Result<Reply> {
    let opened = Root::new(&raw.root).and_then(|root| match root.at("/").is_dir() {
        true => Ok(root),
        false => Err(io::ErrorKind::NotADirectory.into()),
    });
    let root = opened.map_err(|error| {
        let what = format!("--root {}: {error}", raw.root.display());
        Problem::usage(what, "name a folder with a copy of a machine's /sys, /proc, /dev and /etc")
    })?;
    let machine = Live::new(root.clone());
    let exe = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("nvme-bind"));
    let host = Host {
        root: &root,
        machine: &machine,
        journal: Journal::new(raw.state_dir.as_deref()),
        exe: exe.to_string_lossy().into_owned(),
        notes: RefCell::default(),
    };
    let reply = match raw.command {
        Command::List { serials } => Ok(command::list::run(&host, serials, paint)),
        Command::Status => Ok(command::status::run(&host, paint)),
        Command::Doctor { strict } => doctor::run(&root, strict, raw.json, paint, out)
            .or_else(|error| match error.kind() {
                io::ErrorKind::BrokenPipe => Ok(EXIT_UNREAD),
                _ => Err(Problem::io("writing to stdout", &error)),
            })
            .map(|code| Reply { code, ..Reply::new("", Value::Null) }),
        Command::Bind(args) => bind::run(&host, &args),
        Command::Unbind(args) => release::unbind(&host, &args),
        Command::Restore(args) => release::restore(&host, &args.into()),
    };
    notes.replace(host.notes.into_inner());
    reply
}

fn absolute(text: &str) -> std::result::Result<String, String> {
    if !Path::new(text).is_absolute() {
        return Err("the folder must be given as an absolute path".into());
    }
    Ok(text.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_holds_together() {
        command().debug_assert();
    }

    #[test]
    fn help_is_data_and_a_mistake_is_not() {
        let help = answer(["nvme-bind", "--help"], Paint(false), &mut Vec::new());
        assert!(help.code == 0 && help.data.contains("Examples:") && help.log.is_empty());
        let wrong = answer(["nvme-bind", "bind"], Paint(false), &mut Vec::new());
        assert!(wrong.code == 2 && wrong.data.is_empty() && wrong.log.contains("DEVICE"));
    }
}
