//! C programs, compiled against the shared library or the static one.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Compiler options after the language standard, common to C and C++.
pub const WARNINGS: [&str; 5] = ["-O1", "-Wall", "-Wextra", "-Werror", "-pedantic"];

pub fn output(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    output
}

pub fn compiler(variable: &str, usual: &str) -> Command {
    Command::new(env::var_os(variable).unwrap_or_else(|| usual.into()))
}

pub fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// System libraries that the static library needs.
fn private_libraries() -> Vec<String> {
    let text = fs::read_to_string(source("ripieno.pc.in")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Libs.private:")).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

/// Compiles a program, and links it with the shared library or the static one.
pub fn compile(place: &Path, program: &str, shared: bool) -> PathBuf {
    let built = env::current_exe().unwrap();
    let built = built.parent().unwrap();
    let mut command = compiler("CC", "cc");
    command.args(["-std=c11", "-pthread"]).args(WARNINGS);
    command.arg("-I").arg(source("include")).arg(source(program));
    if shared {
        // As installed: programs look for the library's soname.
        let library = built.join("libripieno_c.so");
        let version = concat!("0.", env!("CARGO_PKG_VERSION_MINOR"));
        for name in ["libripieno.so".to_owned(), format!("libripieno.so.{version}")] {
            std::os::unix::fs::symlink(&library, place.join(name)).unwrap();
        }
        command.arg("-L").arg(place).arg("-lripieno");
        command.arg(format!("-Wl,-rpath,{}", place.display()));
    } else {
        command.arg(built.join("libripieno_c.a")).args(private_libraries());
    }
    let made = place.join("program");
    output(command.arg("-o").arg(&made));
    made
}
