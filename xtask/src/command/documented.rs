//! `cargo xtask documented`: runs the commands of README and docs/start as they stand there.
//!
//! A block of commands is run by one shell, in an empty folder; the blocks of a page share it.
//! `cargo run` finds the workspace, `ripieno` is the program that README builds, and `/var/tmp` is
//! a folder that goes with the run. A block that takes what not every machine has is skipped, with
//! the reason.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::step::Step;
use crate::tally::Tally;
use crate::{folder, needs};

pub const NEEDS: &[&str] = &["cxx"];

/// First words of the shell's blocks. The others are configuration, source code and output.
const PROGRAMS: &str = "cargo cat cc curl echo export head lmcache ln mkdir nvme-bind pip podman \
    printf python python3 ripieno sudo systemctl ulimit uv vllm";

/// Texts of a block that this command does not run, and the reason. The first one counts.
const NOT_HERE: &[(&str, &str)] = &[
    ("sudo ", "it changes the machine"),
    ("systemctl", "it changes the machine"),
    ("vfio:", "it needs a drive"),
    ("ng:", "it needs a drive"),
    ("10.0.0.", "it names other machines"),
    ("cargo install", "it installs programs for the user"),
    ("cargo xtask", "it is a step of CI, or its tests"),
    ("cargo fetch", "CI has done it"),
    ("--executor cuda", "it needs a GPU"),
    ("vllm", "`cargo xtask engine` has vLLM, and the example"),
    ("sglang", "`cargo xtask engine` has its interface"),
    ("lmcache", "`cargo xtask engine` has it"),
    ("nixl", "`cargo xtask engine` has it"),
    ("pip install", "`cargo xtask python` installs the package"),
    (" TRACE", "it wants the user's own file"),
    ("podman ", "it needs a container engine"),
    ("curl ", "it asks a server that is not there"),
    (" ctl ", "it asks a server that is not there"),
];

/// Starts a server, which the rest of the block can ask.
const SERVER: &str = "ripieno serve ";

/// A block of commands of a page.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    line: usize,
    script: String,
}

pub fn run() -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    Step::cargo("build", "build --release --bin ripieno").demand()?;
    let (start, mut tally) = (Instant::now(), Tally::default());
    let home = folder::target("documented");
    for page in pages()? {
        let name = page.strip_prefix(folder::workspace()).unwrap_or(&page).display();
        let text = fs::read_to_string(&page).with_context(|| format!("no {name}"))?;
        let place = make_place(&home)?;
        for Block { line, script } in blocks(&text) {
            let begin = Instant::now();
            let verdict = if let Some(why) = reason(&script) {
                tally.skipped += 1;
                format!("ignored, {why}")
            } else {
                let is_passed = run_block(&script, &place)?;
                tally.count(is_passed);
                let word = if is_passed { "ok" } else { "FAILED" };
                format!("{word} <{:.1}s>", begin.elapsed().as_secs_f64())
            };
            println!("test {name}:{line} ... {verdict}");
        }
    }
    println!("{}", tally.line(start.elapsed()));
    Ok(tally.exit_code())
}

/// Returns README and the pages of docs/start, in order.
fn pages() -> Result<Vec<PathBuf>> {
    let root = folder::workspace();
    let mut pages = Vec::new();
    for entry in fs::read_dir(root.join("docs/start"))? {
        pages.push(entry?.path());
    }
    pages.sort();
    pages.insert(0, root.join("README.md"));
    Ok(pages)
}

/// Returns the blocks of shell commands: indented lines, which begin with a program.
fn blocks(page: &str) -> Vec<Block> {
    let (mut blocks, mut fenced): (Vec<Block>, _) = (Vec::new(), false);
    let mut is_open = false;
    for (index, line) in page.lines().enumerate() {
        fenced ^= line.starts_with("```");
        match line.strip_prefix("    ").filter(|_| !fenced) {
            Some(command) if is_open => {
                let block = blocks.last_mut().expect("it is open");
                block.script.push_str(command);
                block.script.push('\n');
            }
            Some(command) => {
                is_open = true;
                blocks.push(Block { line: index + 1, script: format!("{command}\n") });
            }
            None => is_open = false,
        }
    }
    blocks.retain(|block| {
        let first = block.script.split_whitespace().next().unwrap_or_default();
        first.starts_with("target/") || PROGRAMS.split_whitespace().any(|name| name == first)
    });
    blocks
}

/// Returns the reason why a block is not run here.
fn reason(script: &str) -> Option<&'static str> {
    let has_server = script.contains(SERVER);
    let is_reason = |text: &str| {
        let asks = matches!(text, "curl " | " ctl ");
        script.contains(text) && !(asks && has_server)
    };
    NOT_HERE.iter().find(|(text, _)| is_reason(text)).map(|&(_, why)| why)
}

/// Makes an empty folder, with the programs that commands name.
fn make_place(home: &Path) -> Result<PathBuf> {
    let _ = fs::remove_dir_all(home);
    fs::create_dir_all(home.join("tmp"))?;
    fs::create_dir_all(home.join("bin"))?;
    fs::create_dir_all(home.join("here"))?;
    let home = home.canonicalize()?;
    let program = folder::target("release/ripieno").canonicalize()?;
    std::os::unix::fs::symlink(program, home.join("bin/ripieno"))?;
    Ok(home)
}

/// Runs a block. Returns true if all its commands succeeded.
fn run_block(script: &str, home: &Path) -> Result<bool> {
    eprintln!("{}", script.trim_end());
    let path = std::env::var("PATH").unwrap_or_default();
    // Cargo looks for the workspace in the current folder, which is another one here.
    let cargo = "cargo() { local verb=$1; shift; \
        command cargo \"$verb\" --offline --manifest-path \"$MANIFEST\" \"$@\"; }";
    let script = script.replace("/var/tmp/", &format!("{}/tmp/", home.display()));
    let mut shell = Command::new("bash");
    shell.args(["-euo", "pipefail", "-c", &format!("{cargo}\n{script}")]);
    shell.current_dir(home.join("here")).stdin(Stdio::null());
    shell.env("HOME", home.join("tmp")).env("PATH", format!("{}/bin:{path}", home.display()));
    shell.env("MANIFEST", folder::workspace().join("Cargo.toml"));
    for (name, default) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
        let users = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default().join(default);
        shell.env(name, std::env::var_os(name).map_or(users, PathBuf::from));
    }
    shell.env("CARGO_TARGET_DIR", folder::target("").canonicalize()?);
    let mut shell = shell.process_group(0).spawn().context("cannot run bash")?;
    let group = i32::try_from(shell.id()).ok().and_then(Pid::from_raw);
    let status = shell.wait()?;
    // A server outlives a block that failed. ESRCH: nothing did.
    let _ = group.map(|group| kill_process_group(group, Signal::KILL));
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_shells_and_keep_their_lines_together() {
        let page = "text\n\n    ripieno a\n    b\n\n    key = 1\n\n```text\n    cargo x\n```\n\n\
            \x20   cat > f <<END\n    x\n    END\n";
        let found = blocks(page);
        let wanted = [(3, "ripieno a\nb\n"), (12, "cat > f <<END\nx\nEND\n")];
        assert_eq!(found.len(), wanted.len(), "{found:?}");
        for (block, (line, script)) in found.iter().zip(wanted) {
            assert_eq!((block.line, &*block.script), (line, script));
        }
    }

    #[test]
    fn what_not_every_machine_has_is_a_reason() {
        assert_eq!(reason("ripieno replay\n"), None);
        assert_eq!(reason("sudo nvme-bind list\n"), Some("it changes the machine"));
        assert_eq!(reason("ripieno serve --config a &\nripieno ctl status\n"), None);
        assert!(reason("ripieno ctl status\n").is_some());
    }

    #[test]
    fn the_first_commands_of_the_readme_are_among_those_that_run() {
        let readme = fs::read_to_string(folder::workspace().join("README.md")).unwrap();
        let scripts: Vec<_> = blocks(&readme).into_iter().map(|block| block.script).collect();
        let replay = "cargo run --release --bin ripieno -- replay\n";
        assert!(scripts.iter().any(|script| script == replay), "{scripts:?}");
        assert_eq!(reason(replay), None);
    }
}
