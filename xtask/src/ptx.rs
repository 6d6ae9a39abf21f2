//! The kernels as PTX and as SASS, without a GPU.
//!
//! ```text
//!   compile   source -> PTX -> SASS and its resources, for one GPU each
//!   sources   the sources of the committed PTX
//!   sass      instructions, as the disassembler prints them
//!   checks    required properties of the SASS
//!   report    the checks of all GPUs as a table
//! ```
//!
//! PTX states the intent of the source; only SASS shows what a GPU executes. The assembler may
//! widen, narrow, merge, copy or move an access. The checks cover those that must survive.

mod checks;
mod compile;
mod report;
mod sass;
mod sources;

use anyhow::Result;

pub use report::{Checked, Report, Target};

use checks::Check;
use compile::{Kernel, Source};

use crate::{folder, needs};

/// Compute capability of the committed PTX.
const COMMITTED: u32 = 90;
/// GPUs to assemble for, with the compute capability of the PTX: the committed PTX for its own
/// architecture and for later ones.
const NEWER: &[(u32, u32)] = &[(COMMITTED, 90), (COMMITTED, 100), (COMMITTED, 120)];
/// The same, and an older GPU that needs its own PTX.
const ALL: &[(u32, u32)] = &[(COMMITTED, 90), (COMMITTED, 100), (COMMITTED, 120), (80, 80)];

/// Kernels that are compiled together: `FOLDER/ptx/NAME.cu`, with the committed files beside it.
#[derive(Debug)]
struct Module {
    name: &'static str,
    /// Folder in the repository. The compiler runs in it, and paths of sources are relative to it.
    folder: &'static str,
    /// Include path.
    include: &'static str,
    targets: &'static [(u32, u32)],
    /// Required properties of each kernel.
    checks: fn(&str, &Kernel) -> Vec<Check>,
}

const MODULES: &[Module] = &[
    Module {
        name: "gio_kernel",
        folder: "kernels",
        include: "include",
        targets: ALL,
        checks: checks::io,
    },
    Module {
        name: "gio_pool",
        folder: "kernels",
        include: "include",
        targets: ALL,
        checks: checks::pool,
    },
    Module {
        name: "bench_gpu",
        folder: "bench",
        include: "../kernels/include",
        targets: NEWER,
        checks: checks::other,
    },
];

/// Compiles every module, compares it with the committed files (or replaces those), and checks the
/// SASS.
///
/// # Errors
/// Fails if a tool is missing, or the source does not compile ([`crate::child::SaidNo`]).
pub fn run(check_only: bool) -> Result<Vec<Report>> {
    let folder = folder::target("ptx");
    let toolkit = std::path::absolute(needs::package("ptx", "nvidia/cu13/bin")?)?;
    let root = folder::workspace();
    let reports = MODULES.iter().map(|module| {
        let home = root.join(module.folder);
        let source = Source { toolkit: &toolkit, module, home: &home, folder: &folder };
        run_module(&source, check_only)
    });
    reports.collect()
}

fn run_module(source: &Source<'_>, check_only: bool) -> Result<Report> {
    let module = source.module;
    let committed = source.compile(COMMITTED)?;
    let manifest = sources::manifest(source, &committed)?;
    let mut stale = Vec::new();
    for (path, text) in [("ptx", &committed.ptx), ("sources", &manifest)] {
        let path = format!("{}/{}", module.folder, module.file(path));
        if !folder::update(&path, text, check_only)? {
            stale.push(path);
        }
    }
    let mut targets = Vec::new();
    for &(capability, sm) in module.targets {
        let ptx = match capability {
            COMMITTED => committed.ptx.clone(),
            other => source.compile(other)?.ptx,
        };
        let kernels = source.assemble(capability, sm)?;
        let checked = |kernel: Kernel| {
            let checks = (module.checks)(entry(&ptx, &kernel.name), &kernel);
            Checked { kernel: kernel.name, checks }
        };
        targets.push(Target {
            capability,
            sm,
            kernels: kernels.into_iter().map(checked).collect(),
        });
    }
    let source_hash = sources::hash_of(&manifest).to_owned();
    Ok(Report { name: module.name, source_hash, stale, targets })
}

impl Module {
    /// Returns the path of a committed file, from the module's folder.
    fn file(&self, extension: &str) -> String {
        format!("ptx/{}.{extension}", self.name)
    }
}

/// Returns the part of the PTX with this kernel.
fn entry<'a>(ptx: &'a str, kernel: &str) -> &'a str {
    const WORD: &str = ".entry ";
    let Some(start) = ptx.find(&format!("{WORD}{kernel}(")) else { return "" };
    let body = &ptx[start..];
    body[WORD.len()..].find(WORD).map_or(body, |end| &body[..WORD.len() + end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kernel_has_its_own_part_of_the_ptx() {
        let ptx = ".version 9.0\n.visible .entry a(\n) { x; }\n.visible .entry ab(\n) { y; }";
        assert!(entry(ptx, "a").contains("x;") && !entry(ptx, "a").contains("y;"));
        assert!(entry(ptx, "ab").contains("y;") && !entry(ptx, "ab").contains("x;"));
        assert_eq!(entry(ptx, "b"), "");
    }
}
