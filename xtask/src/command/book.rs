//! `cargo xtask book`: builds the documentation as a site.

use std::process::ExitCode;

use anyhow::Result;

use crate::folder;
use crate::needs;
use crate::step::Step;

const NEEDS: &[&str] = &["mdbook"];

/// Returns the step of `cargo xtask ci`.
pub fn step() -> Step {
    Step::cargo("book", "xtask book").needs(NEEDS)
}

pub fn run() -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    let program = folder::target("book/venv/bin/mdbook");
    let root = folder::workspace();
    let words =
        [root.join("xtask/src/command/book.py"), root.into(), folder::target("book"), program];
    Step::new("book", "python3").args(words.map(|path| path.display().to_string())).run_alone()
}
