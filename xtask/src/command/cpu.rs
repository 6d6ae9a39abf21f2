//! `cargo xtask cpu`: runs our programs on an emulation of their minimum CPU.

use std::process::ExitCode;

use anyhow::Result;

use crate::step::Step;
use crate::{folder, needs};

/// Minimum CPU of our programs as a QEMU model: exactly x86-64-v2. It has SSE4.2 and POPCNT, and no
/// AVX.
pub const LEAST_CPU: &str = "Nehalem";

pub const NEEDS: &[&str] = &["cxx", "qemu-user"];

pub fn run() -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    Step::cargo("build", "build --release --bin ripieno").demand()?;
    let ripieno = std::path::absolute(folder::target("release/ripieno"))?;
    Step::new("cpu", "bash")
        .args(["-c", include_str!("cpu.sh"), "bash"])
        .args([needs::program("qemu-x86_64")?, ripieno].map(|path| path.display().to_string()))
        .args([LEAST_CPU.into(), folder::target("cpu").to_string_lossy()])
        .run_alone()
}
