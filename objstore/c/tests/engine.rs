//! C programs against the shared library and the static one: the example engine, killed after
//! random numbers of commits, the smallest example, and every function of the header.

mod program;

use std::{
    fs,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use program::{WARNINGS, compile, compiler, output, source};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

fn survives_being_killed(shared: bool) {
    let place = tempfile::tempdir().unwrap();
    let engine = compile(place.path(), "examples/engine.c", shared);
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let mut random = StdRng::seed_from_u64(seed);
    let mut counts = Vec::new();
    for _ in 0..5 {
        counts.push(counts.last().unwrap_or(&0) + random.random_range(1..30));
        let mut command = Command::new(&engine);
        command.arg(place.path().join("home")).arg(counts[counts.len() - 1].to_string());
        let run = command.output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        let wrong = String::from_utf8_lossy(&run.stderr);
        let is_right = run.status.success() && said.ends_with("committed, and are right\n");
        assert!(is_right, "seed {seed}, killed after {counts:?}: {}\n{said}{wrong}", run.status);
    }
}

#[test]
fn what_was_committed_survives_a_killed_engine_shared() {
    survives_being_killed(true);
}

#[test]
fn what_was_committed_survives_a_killed_engine_static() {
    survives_being_killed(false);
}

#[test]
fn every_function_does_what_the_header_says() {
    for shared in [true, false] {
        let place = tempfile::tempdir().unwrap();
        let program = compile(place.path(), "tests/api.c", shared);
        output(Command::new(program).arg(place.path().join("home")));
    }
}

#[test]
fn hello_finds_its_block_when_it_is_run_again() {
    let place = tempfile::tempdir().unwrap();
    let hello = compile(place.path(), "examples/hello.c", true);
    for expected in ["stored; run it again\n", "found\n", "found\n"] {
        let said = output(Command::new(&hello).arg(place.path().join("home"))).stdout;
        assert_eq!(String::from_utf8_lossy(&said), expected);
    }
    let lines = fs::read_to_string(source("examples/hello.c")).unwrap().lines().count();
    assert!(lines <= 40, "hello.c has {lines} lines; it is the first thing that people read");
}

#[test]
fn an_engine_says_what_is_wrong() {
    let place = tempfile::tempdir().unwrap();
    let engine = compile(place.path(), "examples/engine.c", true);
    let home = place.path().join("home");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("precious"), "x").unwrap();
    let refused = Command::new(&engine).arg(&home).arg("1").output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("RIPIENO_STATUS_OCCUPIED") && said.contains("precious"), "{said}");
}

#[test]
fn the_header_is_also_cpp() {
    let mut command = compiler("CXX", "c++");
    command.args(["-std=c++17", "-fsyntax-only"]).args(WARNINGS).arg("-include");
    output(command.arg(source("include/ripieno.h")).args(["-x", "c++", "/dev/null"]));
}
