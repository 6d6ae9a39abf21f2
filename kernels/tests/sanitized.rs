//! Compiles `sanitized/main.cpp` with the kernel's own headers under sanitizers, and runs it.
//! `cargo xtask sanitize` has Rust's side as well.

use std::{
    path::Path,
    process::{Command, Output},
};

/// Operations: a few seconds on two processors.
const TURNS: &str = "2500";

fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

/// Runs the program; once more without address space randomisation if the sanitizer's shadow memory
/// does not fit beside what the system mapped.
fn run(program: &Path, args: &[&str]) -> Output {
    let output = Command::new(program).args(args).output().expect("it was just compiled");
    if !text(&output).contains("unexpected memory mapping") {
        return output;
    }
    let arch = std::env::consts::ARCH;
    let command = Command::new("setarch").args([arch, "-R"]).arg(program).args(args).output();
    command.expect("setarch (util-linux) starts the program without randomisation")
}

/// Compiles the program as `name` with `sanitizers`, of the compiler's libraries `libraries`, and
/// runs it.
fn compile_and_run(name: &str, sanitizers: &str, libraries: &str) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let compiled = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-g", "-pthread", "-fno-strict-aliasing"])
        .arg(format!("-fsanitize={sanitizers}"))
        .arg("-fno-sanitize-recover=all")
        .arg("-I")
        .arg(here.join("include"))
        .arg(here.join("tests/sanitized/main.cpp"))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap_or_else(|error| {
            panic!("{compiler} did not start: {error}; install a C++ compiler")
        });
    assert!(
        compiled.status.success(),
        "{compiler} cannot build with -fsanitize={sanitizers}; install {libraries} (part of g++), \
         or set CXX to a compiler that has it:\n{}",
        text(&compiled)
    );
    // Each warp reads the host's words itself; then through the relay, as on a GPU.
    for args in [&[TURNS][..], &[TURNS, "relay"]] {
        let output = run(&program, args);
        assert!(output.status.success(), "{args:?}: {}", text(&output));
        assert!(text(&output).contains("no wrong byte"), "{args:?}: {}", text(&output));
    }
}

#[test]
fn no_data_race_between_kernel_controllers_and_caller() {
    compile_and_run("gio-thread", "thread", "libtsan");
}

#[test]
fn no_access_out_of_bounds_and_nothing_undefined() {
    compile_and_run("gio-address", "address,undefined", "libasan and libubsan");
}
