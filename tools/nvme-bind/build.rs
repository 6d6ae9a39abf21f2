//! Finds the version that `--version` prints: with the commit, if this is a checkout.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let mut version = env!("CARGO_PKG_VERSION").to_owned();
    // A copy of the source inside another project's checkout has another prefix.
    if git("rev-parse --show-prefix").as_deref() == Some("tools/nvme-bind/") {
        // Each commit and each checkout changes one of them.
        let paths = ["HEAD", "logs/HEAD"].map(|file| git(&format!("rev-parse --git-path {file}")));
        for path in paths.iter().flatten().filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
        if let Some(commit) = git("rev-parse --short=12 HEAD") {
            version = format!("{version} ({commit})");
        }
    }
    println!("cargo::rustc-env=RIPIENO_VERSION={version}");
}

/// Returns the output of git, or None if git, the checkout, or a commit is missing.
fn git(args: &str) -> Option<String> {
    let output = Command::new("git").args(args.split(' ')).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
