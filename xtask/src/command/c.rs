//! `cargo xtask c`: the C interface as others use it: its header, and the installed files.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::step::Step;
use crate::{folder, needs};

#[derive(Args)]
pub struct CArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Generate objstore/c/include/ripieno.h from the sources
    Header,
    /// Install both libraries, the header, the files for pkg-config and CMake, and the NIXL backend
    Install {
        /// Prefix of PREFIX/lib, its folders nixl, pkgconfig and cmake, and PREFIX/include
        #[arg(long, value_name = "DIR", default_value = "/usr/local")]
        prefix: PathBuf,
    },
    /// Install into target/c, build the example engine with pkg-config, shared and static, and run
    /// both, the shared one also in valgrind (unless RIPIENO_SKIP_VALGRIND is set); build the
    /// examples with CMake (unless RIPIENO_SKIP_CMAKE is set), and run them
    Check,
}

const NEEDS: &[&str] = &["cxx"];
pub const CHECK_NEEDS: &[&str] = &["cxx", "pkg-config"];

/// Needs of a part of the check, each with the variable that disables it; c.sh reads it as well.
pub const PARTS: [(&str, &str); 2] =
    [("valgrind", "RIPIENO_SKIP_VALGRIND"), ("cmake", "RIPIENO_SKIP_CMAKE")];

/// Version of the libraries: that of the workspace, which is also this program's.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The backend of NIXL, below a prefix. NIXL looks for this name in a folder.
pub const NIXL_BACKEND: &str = "lib/nixl/libplugin_RIPIENO.so";

pub fn run(args: &CArgs) -> Result<ExitCode> {
    match &args.action {
        Action::Header => {
            needs::satisfy(NEEDS)?;
            Step::cargo("header", "test --package ripieno-c --test header")
                .env("RIPIENO_WRITE_HEADER", "1")
                .run_alone()
        }
        Action::Install { prefix } => {
            needs::satisfy(NEEDS)?;
            install(prefix)?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Check => {
            let wanted = PARTS.into_iter().filter(|(_, off)| env::var_os(off).is_none());
            needs::satisfy(CHECK_NEEDS)?;
            needs::satisfy(&wanted.map(|(need, _)| need).collect::<Vec<_>>())?;
            check()
        }
    }
}

fn check() -> Result<ExitCode> {
    // Absolute, because the script changes its folder.
    let place = std::path::absolute(folder::target("c"))?;
    // Files installed by an earlier version must not affect this one.
    Step::new("empty", "rm").args(["-rf".into(), place.to_string_lossy()]).demand()?;
    install(&place.join("prefix"))?;
    let examples = folder::workspace().join("objstore/c/examples");
    Step::new("engines", "sh")
        .args(["-euxc", include_str!("c.sh"), "sh"])
        .args([place, examples].map(|path| path.display().to_string()))
        .args([VERSION])
        .run_alone()
}

/// Builds and installs the libraries.
pub fn install(prefix: &Path) -> Result<()> {
    // With the workspace's default members, so that the crates that they share are built once: with
    // other packages, cargo chooses other features of their dependencies.
    const PACKAGES: &str = "--package ripieno-c --package ripieno --package nvme-bind";
    Step::cargo("build", &format!("build --release --lib {PACKAGES}")).demand()?;
    let script = folder::workspace().join("xtask/src/command/c-install.sh");
    Step::new("install", "bash")
        .args([&script, prefix, &folder::target("release")].map(|path| path.to_string_lossy()))
        .args([VERSION])
        .demand()
}
