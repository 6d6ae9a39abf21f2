//! `cargo xtask python`: installs the Python package with pip, and runs its tests.

use std::process::ExitCode;

use anyhow::Result;

use crate::needs;
use crate::step::Step;
use crate::{folder, python};

const NEEDS: &[&str] = &["cxx", "python-tools"];

/// Returns the step of `cargo xtask ci`.
pub fn step() -> Step {
    Step::cargo("python", "xtask python").needs(NEEDS).tests_at_least(1)
}

pub fn run() -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    let (place, package) = (folder::target("python"), folder::workspace().join("python"));
    python::install(&place.join("venv"))?;
    let program = python::program()?;
    Step::new("pytest", "sh")
        .args(["-euxc", include_str!("python.sh"), "sh"])
        .args([place, package].map(|path| path.display().to_string()))
        .env(python::PROGRAM, program.display().to_string())
        .run_alone()
}
