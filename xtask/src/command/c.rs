//! `cargo xtask c`: the C interface as others use it: its header, and the installed files.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs, io, os::unix::fs::symlink};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};

use crate::needs;
use crate::step::Step;
use crate::{child, folder};

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
const CHECK_NEEDS: &[&str] = &["cxx", "pkg-config"];

/// Needs of a part of the check, each with the variable that disables it; c.sh reads it as well.
const PARTS: [(&str, &str); 2] =
    [("valgrind", "RIPIENO_SKIP_VALGRIND"), ("cmake", "RIPIENO_SKIP_CMAKE")];

/// Version of the libraries: that of the workspace, which is also this program's.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The backend of NIXL, below a prefix. NIXL looks for this name in a folder.
pub const NIXL_BACKEND: &str = "lib/nixl/libplugin_RIPIENO.so";

/// Returns the step of `cargo xtask ci`. A test of ripieno-c compares the header.
pub fn step() -> Step {
    let step = Step::cargo("c", "xtask c check").needs(CHECK_NEEDS);
    PARTS.into_iter().fold(step, |step, (need, off)| step.part_needs(need, off))
}

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
    match fs::remove_dir_all(&place) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            bail!("cannot empty {}: {error}", place.display())
        }
        _ => {}
    }
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
    let (from, source) = (folder::target("release"), folder::workspace().join("objstore/c"));
    let (lib, include) = (prefix.join("lib"), prefix.join("include"));
    let (pkgconfig, cmake) = (lib.join("pkgconfig"), lib.join("cmake/Ripieno"));
    for folder in [&include, &pkgconfig, &cmake] {
        let made = fs::create_dir_all(folder);
        made.with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let real = format!("libripieno.so.{VERSION}");
    place(&include.join("ripieno.h"), |to| copy(&source.join("include/ripieno.h"), to))?;
    place(&lib.join("libripieno.a"), |to| copy(&from.join("libripieno_c.a"), to))?;
    place(&lib.join(&real), |to| copy(&from.join("libripieno_c.so"), to))?;
    place(&lib.join(soname()), |to| symlink(&real, to))?;
    place(&lib.join("libripieno.so"), |to| symlink(soname(), to))?;
    let templates = [
        ("ripieno.pc", &pkgconfig),
        ("RipienoConfig.cmake", &cmake),
        ("RipienoConfigVersion.cmake", &cmake),
    ];
    templates.iter().try_for_each(|(name, to)| fill_in(&source.join(format!("{name}.in")), to))?;
    nixl_backend(prefix)
}

/// Builds the backend of NIXL, with the static library in it, into `lib/nixl` of a prefix.
fn nixl_backend(prefix: &Path) -> Result<()> {
    let (lib, to) = (prefix.join("lib"), prefix.join(NIXL_BACKEND));
    let folder = to.parent().unwrap_or(prefix);
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let made = folder.join("made.so");
    let mut compile = Command::new(env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    compile.args(["-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]);
    compile.args(["-Wall", "-Wextra", "-Werror", "-pedantic"]);
    compile.arg(format!("-DRIPIENO_PLUGIN_VERSION=\"{VERSION}\""));
    compile.arg("-I").arg(prefix.join("include"));
    compile.arg(folder::workspace().join("objstore/c/nixl/plugin.cpp"));
    compile.arg(lib.join("libripieno.a")).args(["-Wl,--exclude-libs,ALL", "-ldl", "-lm", "-lrt"]);
    child::run(compile.arg("-o").arg(&made))?;
    // At once: a process may have the old one open.
    fs::rename(&made, &to).with_context(|| format!("cannot write {}", to.display()))?;
    eprintln!("wrote {}", to.display());
    Ok(())
}

/// Writes the file of a template into a folder.
fn fill_in(template: &Path, folder: &Path) -> Result<()> {
    let text = fs::read_to_string(template);
    let text = text.with_context(|| format!("cannot read {}", template.display()))?;
    let text = text.replace("@VERSION@", VERSION).replace("@SONAME@", &soname());
    let name = template.file_stem().unwrap_or_default();
    place(&folder.join(name), |to| fs::write(to, text))
}

/// Returns the soname of the library; objstore/c/build.rs sets the same one.
fn soname() -> String {
    let mut numbers = VERSION.split('.');
    let mut next = || numbers.next().unwrap_or_default();
    match next() {
        "0" => format!("libripieno.so.0.{}", next()),
        major => format!("libripieno.so.{major}"),
    }
}

/// Replaces a file. A running program keeps its open library.
fn place(to: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
    match fs::remove_file(to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            bail!("cannot replace {}: {error}", to.display())
        }
        _ => {}
    }
    make(to).with_context(|| format!("cannot write {}", to.display()))?;
    eprintln!("wrote {}", to.display());
    Ok(())
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::copy(from, to).map(drop)
}
