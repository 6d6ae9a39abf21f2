//! The programs that run in the guest, and their libraries.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::child;
use crate::command::test::lean;
use crate::folder::{self, IN_DEBUG};
use crate::step::Step;

const PROGRAMS: &[&str] = &["vm-tests", "nvme-bind", "ripieno"];

/// Builds the programs with the same options as the workspace's tests, so that CI compiles
/// everything once. Returns their paths.
pub fn build() -> Result<Vec<PathBuf>> {
    // `--tests` although no test is run: without them dependencies have other features, and half of
    // the workspace is compiled once more.
    lean(Step::cargo("guest", &format!("build {IN_DEBUG} --bins --tests"))).demand()?;
    Ok(PROGRAMS.iter().map(|name| folder::target("debug").join(name)).collect())
}

/// Returns the files that the dynamic linker loads for a program.
pub fn libraries(program: &PathBuf) -> Result<Vec<PathBuf>> {
    Ok(paths(&child::text(Command::new("ldd").arg(program))?))
}

fn paths(ldd: &str) -> Vec<PathBuf> {
    let path =
        |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(Into::into);
    ldd.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_paths_that_ldd_names() {
        let ldd = "\tlinux-vdso.so.1 (0x7)\n\tlibc.so.6 => /lib/libc.so.6 (0x7)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x7)\n";
        assert_eq!(
            paths(ldd),
            ["/lib/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from)
        );
    }
}
