//! A run on machines that lack programs and a network to get them.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::{env, fs};

/// Mock of cargo: steps pass, crates are present, nothing can be installed.
const CARGO: &str = r#"#!/bin/sh
case "$1" in
install) exit 101 ;;
test | xtask)
    echo "test result: ok. 3 passed; 0 failed; ${RIPIENO_SKIP_QEMU:-0} ignored; finished in 0s" ;;
esac
"#;
const NOTHING: &str = "#!/bin/sh\n";
/// Programs that setup.sh uses and every machine has.
const TOOLS: &str = "bash cat find flock grep id mkdir mv realpath rm sed sort touch uname";

/// Runs `cargo xtask ARGS` on a machine that has only these programs.
fn xtask(name: &str, programs: &[(&str, &str)], args: &[&str]) -> Output {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&home);
    let bin = home.join("bin");
    fs::create_dir_all(&bin).unwrap();
    for (program, script) in programs {
        fs::write(bin.join(program), script).unwrap();
        fs::set_permissions(bin.join(program), PermissionsExt::from_mode(0o755)).unwrap();
    }
    for tool in TOOLS.split(' ') {
        let path = env::var_os("PATH").unwrap();
        let mut paths = env::split_paths(&path).map(|folder| folder.join(tool));
        symlink(paths.find(|path| path.is_file()).unwrap(), bin.join(tool)).unwrap();
    }
    let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
    xtask.args(args).env("PATH", &bin).env("CARGO_TARGET_DIR", home.join("target"));
    xtask.env_remove("CXX").env_remove("RIPIENO_QEMU").env_remove("RIPIENO_SKIP_QEMU");
    xtask.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn what_is_optional_and_cannot_be_had_is_skipped_by_name() {
    let output = xtask("optional", &[("cargo", CARGO), ("c++", NOTHING)], &["ci"]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
    let skipped = [
        "deny",
        "oldest rust",
        "advisories",
        "book",
        "c",
        "python",
        "cpu",
        "engine",
        "abi",
        "ptx",
        "vm",
    ];
    for step in skipped {
        assert!(err.contains(&format!("\n{step}: skipped: ")), "{step}:\n{err}");
    }
    assert!(
        err.contains("\nprograms: skipped in part: this machine lacks qemu-system-x86_64"),
        "{err}"
    );
    // Tests ran in `tests`, `programs`, `slow`, `loom`, `simulator`, `candle`, `crash` and
    // `documented`. QEMU's part is one test, which `tests` always leaves to `programs`.
    let total = format!("24 passed, 0 failed, {} skipped", skipped.len() + 2);
    assert_eq!(out.lines().last(), Some(&*total), "{out}{err}");
}

#[test]
fn what_no_step_can_do_without_ends_the_run_before_the_first_one() {
    let no_crates = CARGO.replace("install)", "install | fetch)");
    for (name, programs, wanted) in [
        ("compiler", vec![("cargo", CARGO)], "this machine lacks a C++ compiler"),
        ("crates", vec![("cargo", &*no_crates), ("c++", NOTHING)], "`cargo fetch --locked` failed"),
    ] {
        let output = xtask(name, &programs, &["ci"]);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{err}");
        assert!(err.contains(wanted) && err.contains("\n  hint: "), "{err}");
        assert!(!err.contains("==> [1/"), "a step ran:\n{err}");
    }
}

#[test]
fn a_command_that_was_asked_for_by_name_fails_without_what_it_needs() {
    let output = xtask("named", &[("cargo", CARGO), ("c++", NOTHING)], &["vm"]);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{err}");
    assert!(err.contains("error: this machine lacks"), "{err}");
}
