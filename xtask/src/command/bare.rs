//! `cargo xtask bare`: runs the README's commands, or installs and tries the packages, on a machine
//! with nothing preinstalled.
//!
//! The machine is a minimal Debian in a folder, entered with `chroot`. It shares this machine's
//! Rust toolchain (read-only), network configuration, and package sources.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::child::quoted;
use crate::needs::{self, Need};
use crate::step::Step;
use crate::{RunArgs, child, folder, report};

/// Files and folders of this machine that configure the network and its packages.
const NETWORK: &[&str] = &[
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/apt",
    "/etc/pip.conf",
    "/etc/ssl/certs",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/usr/share/keyrings",
];
/// Prefixes of variables that do the same, in either case.
const VARIABLES: &str = "http_ https_ no_proxy all_ ssl_cert_ curl_ca_ pip_ cargo_http_ cargo_net_ \
    cargo_registr cargo_source_ rustup_dist rustup_update rustup_auto";
const ENTER: &str = include_str!("bare.sh");
/// Trials of the packages, which are in `packages`. The last line stores and loads blocks.
const PACKAGES: &str = r#"sudo apt-get install -y /packages/deb/*.deb man-db python3-venv
ripieno --version
ripieno replay --model tiny --requests 5 --verify full
nvme-bind list
grep -A3 "package_name: clap" /usr/share/doc/ripieno/THIRD-PARTY.yml
man ripieno-replay | grep conversation_trace
bash -ec 'cd /usr/share/bash-c*/*; . ./ripieno; . ./nvme-bind; complete -p ripieno nvme-bind'
cd xtask/src/command; sh -eux package.sh /trial /packages/wheel-$(uname -m)/* "$(cat package.py)""#;
/// Path of the clone in the new root.
const CLONE: &str = "/ripieno";

#[derive(Args)]
pub struct BareArgs {
    /// Create the minimal Debian anew instead of reusing that of an earlier run
    #[arg(long)]
    fresh: bool,
    /// Install the packages that `cargo xtask package` made, and try them, instead
    #[arg(long)]
    packages: bool,
    #[command(flatten)]
    run: RunArgs,
}

pub fn run(args: &BareArgs) -> Result<ExitCode> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "a root folder is made and entered with mount and chroot, which only root may do\n  \
         hint: run this as root"
    );
    needs::satisfy([Need::Mmdebstrap])?;
    let packages = folder::target("package");
    let commands = if args.packages {
        let made = folder::only_file(&packages.join("deb"), "ripieno_");
        made.context("no packages\n  hint: `cargo xtask package` makes them")?;
        PACKAGES.lines().map(str::to_owned).collect()
    } else {
        commands(&fs::read_to_string(folder::workspace().join("README.md"))?)
    };
    ensure!(!commands.is_empty(), "README.md has no commands under `{QUICK_START}`");
    let folder = folder::target("bare");
    let (debian, root) = (folder.join("debian"), folder.join("root"));
    if args.fresh && debian.exists() {
        fs::remove_dir_all(&debian)?;
    }
    make_debian(&debian)?;
    make_root(&debian, &root)?;
    if args.packages {
        child::run(Command::new("cp").arg("-r").arg(packages).arg(root.join("packages")))?;
    }
    let script = folder.join("enter.sh");
    fs::write(&script, entry(&root)?)?;
    report::run_all(commands.iter().map(|line| in_root(&script, line)).collect(), args.run)
}

const QUICK_START: &str = "## Quick start";

/// Returns the commands of the README's quick start, in order.
fn commands(readme: &str) -> Vec<String> {
    let section = readme.split(QUICK_START).nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let lines = section.lines().filter_map(|line| line.strip_prefix("    "));
    lines.map(|line| line.split(" #").next().unwrap_or(line).trim().to_owned()).collect()
}

/// Creates a Debian with only its essential packages and apt.
fn make_debian(debian: &Path) -> Result<()> {
    if debian.exists() {
        return Ok(());
    }
    let release = fs::read_to_string("/etc/os-release")?;
    let suite = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let suite = suite.context("/etc/os-release has no VERSION_CODENAME: this is no Debian")?;
    let part = debian.with_extension("part");
    let _ = fs::remove_dir_all(&part);
    fs::create_dir_all(&part)?;
    let mut command = Command::new("mmdebstrap");
    command.args(["--variant=minbase", suite]).arg(&part).args(package_sources());
    child::run(&mut command)?;
    fs::rename(&part, debian).context("cannot rename the new Debian")
}

/// Returns this machine's lists of package sources.
fn package_sources() -> Vec<PathBuf> {
    let entries = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    let one = PathBuf::from("/etc/apt/sources.list");
    let all = entries.map(|entry| entry.path()).chain([one].into_iter().filter(|p| p.exists()));
    all.filter(|path| path.extension().is_some_and(|end| end == "list" || end == "sources"))
        .collect()
}

/// Creates a clean copy of the Debian, with a clone of HEAD.
fn make_root(debian: &Path, root: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(root);
    child::run(Command::new("cp").arg("-a").arg(debian).arg(root))?;
    for path in NETWORK.iter().map(Path::new).filter(|path| path.exists()) {
        let to = root.join(path.strip_prefix("/")?);
        let parent = to.parent().unwrap_or(root);
        fs::create_dir_all(parent)?;
        // Follows links, whose targets may be missing in the root.
        child::run(Command::new("cp").args(["-rL", "--remove-destination"]).arg(path).arg(parent))?;
    }
    let mut clone = Command::new("git");
    clone.args(["clone", "--quiet"]).arg(folder::workspace()).arg(root.join(&CLONE[1..]));
    child::run(&mut clone)
}

/// Returns the script that runs a command in the root, with this machine's toolchain and network.
fn entry(root: &Path) -> Result<String> {
    let home = PathBuf::from(env::var_os("HOME").context("HOME is not set")?);
    let place = |name: &str, default: &str| {
        env::var_os(name).map_or_else(|| home.join(default), PathBuf::from)
    };
    let (rustup, cargo) = (place("RUSTUP_HOME", ".rustup"), place("CARGO_HOME", ".cargo"));
    let programs = cargo.join("bin");
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display());
    let mut variables = vec![
        ("HOME".to_owned(), home.display().to_string()),
        ("RUSTUP_HOME".to_owned(), rustup.display().to_string()),
        ("CARGO_HOME".to_owned(), cargo.display().to_string()),
        ("PATH".to_owned(), path),
    ];
    variables.extend(env::vars().filter(|(name, _)| {
        let name = name.to_lowercase();
        VARIABLES.split_whitespace().any(|prefix| name.starts_with(prefix))
    }));
    let assigned = [("root", root), ("rustup", &rustup), ("programs", &programs)]
        .map(|(name, path)| format!("{name}={}\n", quoted(&path.to_string_lossy())))
        .concat();
    let variables = variables.iter().map(|(name, value)| quoted(&format!("{name}={value}")));
    let variables = variables.collect::<Vec<_>>().join(" ");
    Ok(format!("clone={CLONE}\nline=$1\n{assigned}set -- {variables}\n{ENTER}"))
}

/// Returns a step that runs a command in the root, which has no `sudo` and no package lists.
fn in_root(script: &Path, line: &str) -> Step {
    let inside = match line.strip_prefix("sudo ") {
        Some(line) => format!("apt-get -qq update && {line}"),
        None => line.to_owned(),
    };
    Step::new(line, "unshare")
        .args("--mount --pid --fork --kill-child sh".split(' '))
        .args([script.to_string_lossy().into_owned(), inside])
        .tests_at_least(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_the_commands_that_a_new_machine_needs() {
        let readme = fs::read_to_string(folder::workspace().join("README.md")).unwrap();
        assert_eq!(
            commands(&readme),
            [
                "sudo apt-get install -y g++",
                "cargo fetch --locked",
                "cargo run --release --bin ripieno -- replay",
                "cargo xtask test"
            ]
        );
    }

    #[test]
    fn commands_end_with_their_section() {
        let readme =
            "    a\n## Quick start\n\ntext\n\n    b c  # why\n\n    d\n\n## More\n\n    e\n";
        assert_eq!(commands(readme), ["b c", "d"]);
    }
}
