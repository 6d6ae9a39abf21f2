//! Tests that run inside the virtual machine of `cargo xtask vm`: the real VFIO, the real IOMMU
//! code of Linux, and a third party's model of an NVMe controller, without hardware.
//!
//! # Architecture
//!
//! A suite is a list of plain functions; [`runner`] runs them one after the other and reports on
//! the console. [`hardware`] names the machine's devices, [`pci`] reads and changes their drivers,
//! [`kmsg`] reads the kernel's log, [`host`] sends requests to the host: to QEMU's monitor, and for
//! hashes of the bytes on a drive. [`program`] runs other programs.
//!
//! # Invariants
//!
//! - Nothing here runs outside the virtual machine: it binds drivers and writes to whole drives.
//! - Suites are independent; each has its own machine. Tests of a suite share it and leave it as
//!   they found it, or document that they do not.
//! - A test that hangs is killed, and reported by name.

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
mod ng;
mod odd;
mod pci;
mod peer;
mod program;
mod python;
mod queue;
mod replay;
mod runner;
mod serve;
mod smoke;
mod stray;
mod vfio;
mod vllm;

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
    odd::SUITE,
    ng::SUITE,
    python::SUITE,
    vllm::SUITE,
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
