//! `cargo xtask abi`: generates the Rust half of the headers that host code and kernels share, by
//! bindgen.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::Args;
use xxhash_rust::xxh3::xxh3_128;

use crate::{EXIT_STEP_FAILED, child, folder, needs};

#[derive(Args)]
pub struct AbiArgs {
    /// Change nothing: fail if the committed files differ from what the headers give
    #[arg(long)]
    check: bool,
}

pub const NEEDS: &[&str] = &["bindgen"];

/// Derives of every struct. `IntoBytes` proves that it has no padding.
const DERIVES: &str = "PartialEq,Eq,zerocopy::FromBytes,zerocopy::IntoBytes,zerocopy::Immutable";

/// A header, the generated file, and the names to include.
struct Binding {
    header: &'static str,
    rust: &'static str,
    names: &'static str,
}

const BINDINGS: &[Binding] = &[
    Binding {
        header: "kernels/include/gio/abi.h",
        rust: "gio-uring/src/abi/generated.rs",
        names: "gio_.*|GIO_[A-Z].*",
    },
    Binding {
        header: "kernels/include/pool/abi.h",
        rust: "kernels/src/pool/generated.rs",
        names: "gio_(scatter_gather|pattern)_.*|GIO_(TILE|POOL_.*|SCATTER|GATHER|PATTERN_[FPC].*)",
    },
];

/// Generates every binding, and compares it with the committed file or replaces that.
///
/// # Errors
/// Fails if this machine lacks something, or if a header is rejected ([`child::SaidNo`]).
pub fn run(args: &AbiArgs) -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    let bindgen = std::path::absolute(folder::target("tools/bin/bindgen"))?;
    let libclang = std::path::absolute(needs::package("abi", "clang/native")?)?;
    let mut stale = Vec::new();
    for binding in BINDINGS {
        let text = binding.make(&bindgen, &libclang)?;
        if !folder::update(binding.rust, &text, args.check)? {
            stale.push(binding.rust);
        }
    }
    for path in &stale {
        eprintln!("error: {path} is not what its header gives; run `cargo xtask abi`");
    }
    println!("{} of {} bindings as committed", BINDINGS.len() - stale.len(), BINDINGS.len());
    Ok(if stale.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_STEP_FAILED) })
}

impl Binding {
    fn make(&self, bindgen: &Path, libclang: &Path) -> Result<String> {
        let root = folder::workspace();
        let header = fs::read(root.join(self.header))
            .with_context(|| format!("cannot read {}", self.header))?;
        let mut command = Command::new(bindgen);
        command
            .current_dir(root)
            .env("LIBCLANG_PATH", libclang)
            .args(["--allowlist-item", self.names, "--no-recursive-allowlist"])
            .args(["--with-derive-default", "--with-derive-custom-struct"])
            .arg(format!(".*={DERIVES}"))
            .args(["--ctypes-prefix", "::std::ffi", "--rust-target", "1.85"])
            .args(["--disable-header-comment", "--no-doc-comments", "--rustfmt-configuration-file"])
            .arg(root.join("rustfmt.toml"))
            .arg(self.header)
            .args(["--", "-x", "c", "-I", "kernels/include"]);
        let output = child::compile(&mut command)?;
        let body = String::from_utf8(output.stdout).context("bindgen wrote no text")?;
        let (hash, path) = (xxh3_128(&header), self.header);
        Ok(format!("// Made by `cargo xtask abi`: do not edit.\n// {hash:032x} {path}\n{body}"))
    }
}
