//! A package for a machine with a GPU and without a toolchain: programs, kernels, and a script that
//! runs them and records the results.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::child;
use crate::folder;
use crate::needs;

/// Limit of the size in bytes; some services reject larger uploads.
const BYTES_MAX: u64 = 60 << 20;
/// Minor version of the oldest supported glibc: Ubuntu 22.04, Debian 12, RHEL 9.
const GLIBC: u32 = 34;
const RUN: &str = include_str!("gpu/run.sh");
/// Kernels, which are also embedded in the programs: to read, or to compile by hand.
const PTX: &[&str] =
    &["kernels/ptx/gio_kernel.ptx", "kernels/ptx/gio_pool.ptx", "bench/ptx/bench_gpu.ptx"];

/// A program of the package.
struct Program {
    /// Name in the package.
    name: &'static str,
    /// Cargo command that builds it.
    build: &'static str,
    /// Name of the cargo target.
    target: &'static str,
}

const PROGRAMS: &[Program] = &[
    Program { name: "ripieno", build: "build --package ripieno", target: "ripieno" },
    Program { name: "bench", build: "build --package ripieno-bench", target: "ripieno-bench" },
    Program {
        name: "cuda-tests",
        build: "test --no-run --package gio-kernels --features cuda --test cuda",
        target: "cuda",
    },
];

/// Builds everything into `folder`, and replaces existing files. Returns the size in bytes.
///
/// # Errors
/// Fails with [`SaidNo`](crate::child::SaidNo) if a build fails, and with another error if a tool
/// is missing or a write fails.
pub fn pack(folder: &Path, trace: Option<&Path>) -> Result<u64> {
    needs::satisfy(&["cxx"])?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for program in PROGRAMS {
        let built = build(program)?;
        copy(&built, &folder.join(program.name))?;
        let needs = glibc(&fs::read(&built)?);
        ensure!(
            needs <= GLIBC,
            "{} needs glibc 2.{needs}, and machines with GPUs have 2.{GLIBC}: pack it on a system \
             that is no newer than Debian 12",
            program.name
        );
    }
    let root = folder::workspace();
    for path in PTX {
        let file = root.join(path);
        copy(&file, &folder.join(file.file_name().unwrap_or_default()))?;
    }
    if let Some(trace) = trace {
        copy(trace, &folder.join("trace.jsonl"))?;
    }
    let run = folder.join("run.sh");
    fs::write(&run, RUN).with_context(|| format!("cannot write {}", run.display()))?;
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755))?;
    fs::write(folder.join("packed.txt"), described(root))?;
    let bytes = size(folder)?;
    ensure!(
        bytes <= BYTES_MAX,
        "{} is {} MiB, more than {}: is something else in it?",
        folder.display(),
        bytes >> 20,
        BYTES_MAX >> 20
    );
    Ok(bytes)
}

/// Builds one program. Returns its path, which cargo's messages have.
fn build(program: &Program) -> Result<PathBuf> {
    let mut cargo = Command::new("cargo");
    cargo.args(program.build.split(' ')).args(["--release", "--message-format=json"]);
    let said = child::compile(cargo.stderr(Stdio::inherit()))?;
    for message in serde_json::Deserializer::from_slice(&said.stdout).into_iter::<Value>() {
        let message = message?;
        if message["target"]["name"] == program.target
            && let Some(path) = message["executable"].as_str()
        {
            return Ok(path.into());
        }
    }
    bail!("cargo built {} and did not say where", program.target)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let what = || format!("cannot copy {} to {}", from.display(), to.display());
    // A running program cannot be overwritten, and the permissions must be the source's.
    let _ = fs::remove_file(to);
    fs::copy(from, to).map(drop).with_context(what)
}

/// Returns the minor version of glibc 2 that a program needs: the highest one that it names.
fn glibc(program: &[u8]) -> u32 {
    let name = b"GLIBC_2.";
    let found = program.windows(name.len()).enumerate().filter(|(_, bytes)| bytes == name);
    let minor = |at: usize| {
        let digits = program[at + name.len()..].iter().take_while(|byte| byte.is_ascii_digit());
        digits.take(4).fold(0, |number, digit| number * 10 + u32::from(digit - b'0'))
    };
    found.map(|(at, _)| minor(at)).max().unwrap_or(0)
}

/// Describes the sources of the package.
fn described(root: &Path) -> String {
    let said = |program: &str, args: &[&str]| {
        let text = child::text(Command::new(program).args(args).current_dir(root));
        text.map_or_else(|_| "not known".into(), |text| text.trim().to_owned())
    };
    let commit = said("git", &["describe", "--always", "--dirty", "--abbrev=12"]);
    let rustc = said("rustc", &["--version"]);
    format!("packed from: {commit}\ncompiler: {rustc}\n")
}

fn size(folder: &Path) -> Result<u64> {
    let entries = fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))?;
    let mut bytes = 0;
    for entry in entries {
        let meta = entry?.metadata()?;
        // Results of a run are not part of the package.
        bytes += if meta.is_file() { meta.len() } else { 0 };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
