//! `cargo xtask book`: builds the documentation as a site.

use std::process::ExitCode;

use anyhow::Result;

use crate::folder;
use crate::needs;
use crate::step::Step;

pub const NEEDS: &[&str] = &["mdbook"];

pub fn run() -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    let program = folder::target("book/venv/bin/mdbook");
    let root = folder::workspace();
    let words =
        [root.join("xtask/src/command/book.py"), root.into(), folder::target("book"), program];
    Step::new("book", "python3").args(words.map(|path| path.display().to_string())).run_alone()
}
