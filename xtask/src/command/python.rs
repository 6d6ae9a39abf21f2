//! `cargo xtask python`: installs the Python package with pip, and runs its tests.

use std::env;
use std::process::ExitCode;

use anyhow::Result;

use crate::needs::{self, Need};
use crate::step::Step;
use crate::{folder, python, unpacked};

const NEEDS: &[Need] = &[Need::Cxx, Need::PythonTools];

/// Returns the step of `cargo xtask ci`.
pub fn step() -> Step {
    with_etcd(Step::cargo("python", "xtask python").needs(NEEDS).tests_at_least(1))
}

/// A run of tests, of which some start etcd where it can be had.
pub fn with_etcd(tests: Step) -> Step {
    let step = tests.part_needs(Need::Etcd, "RIPIENO_SKIP_ETCD");
    match unpacked::ETCD.unpacked().filter(|_| env::var_os("RIPIENO_ETCD").is_none()) {
        Some(path) => step.env("RIPIENO_ETCD", path.to_string_lossy()),
        None => step,
    }
}

pub fn run() -> Result<ExitCode> {
    needs::satisfy(NEEDS.iter().copied())?;
    let (place, package) = (folder::target("python"), folder::workspace().join("python"));
    python::install(&place.join("venv"))?;
    let program = python::program()?;
    Step::new("pytest", "sh")
        .args(["-euxc", include_str!("python.sh"), "sh"])
        .args([place, package].map(|path| path.display().to_string()))
        .env(python::PROGRAM, program.display().to_string())
        .run_alone()
}
