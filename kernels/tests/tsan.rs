//! Compiles `tsan/main.cpp` with the kernel's own headers under ThreadSanitizer, and runs it.

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
fn run(program: &Path) -> Output {
    let output = Command::new(program).arg(TURNS).output().expect("it was just compiled");
    if !text(&output).contains("unexpected memory mapping") {
        return output;
    }
    let arch = std::env::consts::ARCH;
    let command = Command::new("setarch").args([arch, "-R"]).arg(program).arg(TURNS).output();
    command.expect("setarch (util-linux) starts the program without randomisation")
}

#[test]
fn no_data_race_between_kernel_controllers_and_caller() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gio-tsan");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let compiled = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"])
        .arg("-I")
        .arg(here.join("include"))
        .arg(here.join("tests/tsan/main.cpp"))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap_or_else(|error| {
            panic!("{compiler} did not start: {error}; install a C++ compiler")
        });
    assert!(
        compiled.status.success(),
        "{compiler} cannot build with -fsanitize=thread; install libtsan (part of g++), or set CXX \
         to a compiler that has it:\n{}",
        text(&compiled)
    );
    let output = run(&program);
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("no wrong byte"), "{}", text(&output));
}
