//! What a build asks from the machine, and how to get it.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

/// Whether `program` is on the PATH.
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Makes sure of a C++ compiler: the I/O kernel is compiled for host threads in every build.
pub fn cxx_compiler() -> Result<()> {
    // The variable that the `cc` crate reads, too.
    if std::env::var_os("CXX").is_some() || is_installed("c++") {
        return Ok(());
    }
    install("c++", "g++", "neither `c++` on the PATH nor $CXX")
}

/// Makes sure of a program that is in Debian's `package`.
pub fn program(program: &str, package: &str) -> Result<()> {
    if is_installed(program) {
        return Ok(());
    }
    install(program, package, &format!("no `{program}` on the PATH"))
}

fn install(program: &str, package: &str, missing: &str) -> Result<()> {
    if !rustix::process::geteuid().is_root() || !Path::new("/usr/bin/apt-get").exists() {
        bail!(
            "{missing}\n  \
             hint: install it, such as with `sudo apt-get install {package}`, and run this again"
        );
    }
    let install = format!("apt-get install -y --no-install-recommends {package}");
    eprintln!("{missing}; we are root, so install it:");
    // A new machine has no package lists, an old one may have stale ones: update, and try again.
    if !(succeeds(&install) || succeeds("apt-get update") && succeeds(&install))
        || !is_installed(program)
    {
        bail!("{missing}, and `{install}` gave none\n  hint: its output is above");
    }
    Ok(())
}

/// Shows a command line of plain words, and runs it.
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
    fn finds_only_what_is_there() {
        assert!(is_installed("sh"));
        assert!(!is_installed("no-such-program-anywhere"));
    }

    #[test]
    fn a_failed_command_is_seen() {
        assert!(succeeds("true"));
        assert!(!succeeds("false"));
        assert!(!succeeds("no-such-program-anywhere"));
    }
}
