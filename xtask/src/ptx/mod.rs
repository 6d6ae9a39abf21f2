//! The I/O kernel as PTX, and what the assembler makes of it, on a machine with no GPU.
//!
//! ```text
//!   install   a pinned nvcc and disassembler from PyPI (target/ptx/venv)
//!   compile   source -> PTX -> SASS and its resources, for one GPU each
//!   sources   what the committed PTX was made from
//!   sass      instructions, as the disassembler prints them
//!   checks    what the SASS has to be like
//!   report    the checks of all GPUs as a table, or as JSON
//! ```
//!
//! PTX is what the source asks for; only SASS is what a GPU does. Between the two, the assembler
//! may widen, narrow, merge, copy or move an access. The checks look at those that must survive.

mod checks;
mod compile;
mod install;
mod report;
mod sass;
mod sources;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

pub use compile::NotCompiled;
pub use report::{Report, Target};

use compile::Source;
use install::Toolkit;

/// GPUs to assemble for, with the compute capability of the PTX: the committed PTX for its own
/// architecture and for later ones, and what an older one would need PTX of its own for.
const TARGETS: &[(u32, u32)] = &[(COMMITTED, 90), (COMMITTED, 100), (COMMITTED, 120), (80, 80)];
/// Compute capability of the committed PTX.
const COMMITTED: u32 = 90;

const PTX: &str = "ptx/gio_kernel.ptx";
const SOURCES: &str = "ptx/gio_kernel.sources";

/// Compiles the kernel, compares it with what is committed (or replaces that), and checks the SASS.
///
/// # Errors
/// Says what this machine lacks, or that the source does not compile ([`NotCompiled`]).
pub fn run(check_only: bool) -> Result<Report> {
    let folder = folder();
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let toolkit = Toolkit::new(&folder)?;
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let source = Source { toolkit: &toolkit, kernels: &kernels, folder: &folder };
    let ptx = source.compile(COMMITTED)?;
    let manifest = sources::manifest(&kernels, &ptx)?;
    let mut stale = Vec::new();
    for (path, text) in [(PTX, &ptx), (SOURCES, &manifest)] {
        let file = kernels.join(path);
        if fs::read_to_string(&file).is_ok_and(|found| found == *text) {
            continue;
        }
        if check_only {
            stale.push(format!("kernels/{path}"));
        } else {
            fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
            eprintln!("wrote kernels/{path}");
        }
    }
    let mut targets = Vec::new();
    for &(capability, sm) in TARGETS {
        let ptx = if capability == COMMITTED { ptx.clone() } else { source.compile(capability)? };
        let assembled = source.assemble(capability, sm)?;
        targets.push(Target { capability, sm, checks: checks::all(&ptx, &assembled) });
    }
    Ok(Report { source_hash: sources::hash_of(&manifest).to_owned(), stale, targets })
}

/// Beside the other builds, where `cargo clean` finds it.
fn folder() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")).join("ptx")
}
