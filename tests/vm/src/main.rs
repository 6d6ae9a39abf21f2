//! The tests that run inside the virtual machine of `cargo xtask vm`: the real VFIO, the real
//! IOMMU code of Linux, and a third party's model of an NVMe controller, with no hardware.
//!
//! # Architecture
//!
//! A suite is a list of plain functions; [`runner`] runs them one after the other and tells the
//! console. [`hardware`] names what the machine consists of, [`pci`] reads and changes which driver
//! has what, [`kmsg`] reads the kernel's log, [`host`] asks the computer outside: QEMU's monitor,
//! and hashes of the bytes that really are on a drive. [`program`] runs other programs.
//!
//! # Invariants
//!
//! - Nothing here runs outside the virtual machine: it binds drivers and writes to whole drives.
//! - A suite leaves nothing to the next one; each has a machine of its own. Tests of one suite
//!   share it and leave it as they found it, or say that they do not.
//! - A test that does not end is ended, and named.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the console is what the host reads the results from"
)]

mod bind;
mod drive;
mod exit;
mod faults;
mod hardware;
mod host;
mod kmsg;
mod pci;
mod peer;
mod program;
mod python;
mod queue;
mod replay;
mod runner;
mod smoke;
mod stray;
mod vfio;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::runner::Suite;

const SUITES: &[Suite] = &[
    smoke::SUITE,
    bind::SUITE,
    vfio::SUITE,
    peer::SUITE,
    faults::SUITE,
    replay::SUITE,
    python::SUITE,
];

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<ExitCode> {
    let arguments = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let argument = |name: &str| {
        let mut words = arguments.split_whitespace();
        words.find_map(|word| word.strip_prefix(name)).map(str::to_owned)
    };
    if argument("ripieno.suite=").is_none() {
        bail!("this program is for the virtual machine of `cargo xtask vm` and for nothing else");
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [program::ROLE, ref part @ ..] => program::play(part),
        [runner::TEST, name, test] => {
            let suite = suite(name)?;
            let found = suite.tests.iter().find(|found| found.name == test);
            Ok(runner::run_one(suite, found.with_context(|| format!("no test `{test}`"))?))
        }
        [name] => {
            let failed = runner::run(suite(name)?, argument("ripieno.test=").as_deref())?;
            let code = u8::from(failed > 0);
            exit::machine(code)?;
            Ok(ExitCode::from(code))
        }
        _ => bail!("usage: vm-tests SUITE | vm-tests test SUITE TEST"),
    }
}

fn suite(name: &str) -> Result<&'static Suite> {
    let known: Vec<&str> = SUITES.iter().map(|suite| suite.name).collect();
    let found = SUITES.iter().find(|suite| suite.name == name);
    found.with_context(|| format!("no suite `{name}` in the guest; there are {}", known.join(", ")))
}
