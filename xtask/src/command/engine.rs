//! `cargo xtask engine`: runs the connector's tests in a real vLLM.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{fs, thread};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::command::{c, python};
use crate::needs;
use crate::{EXIT_STEP_FAILED, folder};

#[derive(Args)]
pub struct EngineArgs {
    /// Modules of python/tests/with_vllm, such as `restart` [default: all]
    #[arg(value_name = "MODULE")]
    modules: Vec<String>,
    /// Number of parallel jobs [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    jobs: Option<u64>,
    /// Further arguments of pytest
    #[arg(last = true, value_name = "ARGS")]
    pytest: Vec<String>,
}

pub const NEEDS: &[&str] = &["cxx", "binutils", "numa", "vllm"];

pub fn run(args: &EngineArgs) -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    let tests = folder::workspace().join("python/tests/with_vllm");
    let modules = modules(&tests, &args.modules)?;
    install()?;
    // The tests of the NIXL backend use it as installed.
    let prefix = place().join("prefix");
    c::install(&prefix)?;
    let program = python::program()?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.map_or(cores, |jobs| usize::try_from(jobs).unwrap_or(cores));
    // Each job imports vLLM, and takes whole modules, whose tests share engines.
    let jobs = jobs.min(modules.len());
    // Not below /tmp, which may not support direct I/O.
    let home = place().join("tests");
    let status = Command::new(place().join("venv/bin/python"))
        .args(["-m", "pytest", "-p", "no:cacheprovider", "--durations=10", "--dist=loadfile"])
        // In the order given: a module with one long test is not the last then.
        .arg("--no-loadscope-reorder")
        .args(["-n", &jobs.to_string(), "--basetemp"])
        .arg(&home)
        .args(modules)
        .args(&args.pytest)
        .env("RIPIENO_NIXL", prefix.join(c::NIXL_BACKEND).parent().unwrap_or(&prefix))
        .env(python::PROGRAM, program)
        // Importing vLLM would take 20 seconds otherwise.
        .env_remove("PYTHONDONTWRITEBYTECODE")
        .status()
        .context("cannot run pytest")?;
    if !status.success() {
        return Ok(ExitCode::from(EXIT_STEP_FAILED));
    }
    fs::remove_dir_all(&home).with_context(|| format!("cannot remove {}", home.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the folder of vLLM's environment `venv`: for the CPU, with LMCache, SGLang and NIXL.
pub fn place() -> PathBuf {
    folder::target("engine")
}

/// Installs the package into vLLM's environment.
pub fn install() -> Result<()> {
    python::install(&place().join("venv"))
}

/// Returns the files of the requested modules.
fn modules(tests: &Path, asked: &[String]) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(tests).with_context(|| format!("no {}", tests.display()))?;
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    let name = |path: &Path| {
        let stem = path.file_stem()?.to_str()?.strip_prefix("test_")?;
        Some(stem.to_owned())
    };
    found.retain(|path| name(path).is_some_and(|name| asked.is_empty() || asked.contains(&name)));
    ensure!(!found.is_empty(), "{} has none of the modules {asked:?}", tests.display());
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests;
