use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const RUN: &str = include_str!("run.sh");
/// Packed programs.
const PROGRAMS: [&str; 3] = ["ripieno", "bench", "cuda-tests"];

/// The script uses the names of the packed programs, and is valid bash.
#[test]
fn the_script_runs_what_is_packed() {
    for program in PROGRAMS {
        assert!(RUN.contains(&format!("./{program} ")), "{program}");
        assert!(include_str!("pack.sh").contains(&format!("\nbuild {program} ")), "{program}");
    }
    let read = Command::new("bash").args(["-n", "-c", RUN]).status().expect("bash");
    assert!(read.success());
}

/// Returns the sum of the limits, and the names of the steps.
fn plan(args: &[&str]) -> (u32, Vec<String>) {
    let plan = Command::new("bash").args(["-c", RUN, "run.sh", "--plan"]).args(args).output();
    let plan = String::from_utf8(plan.expect("bash").stdout).expect("text");
    let steps = plan.lines().map(|line| line.split_once(' ').expect("limit and name"));
    let (limits, names): (Vec<&str>, Vec<&str>) = steps.unzip();
    let sum = limits.iter().map(|limit| limit.parse::<u32>().expect("seconds")).sum();
    (sum, names.into_iter().map(str::to_owned).collect())
}

/// In the order of docs/results/gpu.md; no step can use up another one's time.
#[test]
fn the_limits_of_all_steps_fit_and_cheap_answers_come_first() {
    let first = [
        "doctor",
        "test-gpu-a_launch_per_batch_moves_the_right_bytes",
        "test-gpu-no_submission_is_lost_while_the_kernel_leaves",
        "bench-rate",
        "bench-operation",
        "test-gdr-a_pool_of_allocations_on_a_gpu",
        "replay-direct-resident",
    ];
    let second = ["doctor", "other-tests", "bench-retrieve", "memcheck"];
    for (args, order) in [(&[][..], &first[..]), (&["--second"], &second)] {
        let (sum, names) = plan(args);
        // Ten minutes, minus the time for start-up and packing.
        assert!(sum <= 540, "{sum} s\n{names:?}");
        let place = |wanted: &&str| names.iter().position(|name| name == *wanted);
        let places: Vec<Option<usize>> = order.iter().map(place).collect();
        assert!(places.is_sorted() && places[0].is_some(), "{places:?}\n{names:?}");
    }
}

/// A folder with run.sh and mock programs that print their arguments. `cases` are arms of a shell
/// `case` over the arguments.
struct Packed(tempfile::TempDir);

impl Packed {
    fn new(cases: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        // `seen` gets the number of steps in the archive while each program runs.
        let program = format!(
            r#"#!/bin/bash
case $* in --version) exit 0 ;; esac
tar -tzf "$RESULTS/results.tgz" 2>/dev/null | grep -c '\.out$' >>seen
case $* in {cases} esac
echo "was asked for $*"
"#
        );
        let programs = PROGRAMS.map(|name| (name, program.as_str())).into_iter();
        for (name, text) in programs.chain([("run.sh", RUN), ("packed.txt", "by a test\n")]) {
            let file = folder.path().join(name);
            fs::write(&file, text).expect("written");
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("set");
        }
        Self(folder)
    }

    fn results(&self) -> PathBuf {
        self.0.path().join("out")
    }

    fn start(&self, seconds: u32, args: &[&str]) -> Child {
        let mut command = Command::new(self.0.path().join("run.sh"));
        command.args(args).arg(self.results()).env("RESULTS", self.results());
        command.env("RIPIENO_SECONDS", seconds.to_string());
        command.stdout(Stdio::piped()).spawn().expect("bash")
    }

    /// Runs it to completion. Returns the exit code and the output.
    fn run(&self, seconds: u32, args: &[&str]) -> (i32, String) {
        let output = self.start(seconds, args).wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code().expect("not killed"), text)
    }

    /// Returns the archive's copy of a file.
    fn archived(&self, name: &str) -> Option<String> {
        let archive = self.results().join("results.tgz");
        let mut tar = Command::new("tar");
        tar.arg("-xzOf").arg(archive).arg(format!("results/{name}")).stderr(Stdio::null());
        let output = tar.output().expect("tar");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success().then_some(text)
    }
}

#[test]
fn after_each_step_the_archive_is_whole() {
    let packed = Packed::new("*a_launch_per_batch*) yes wrong | head -c 300000 >&2; exit 3 ;;");
    let (code, text) = packed.run(540, &[]);
    assert_eq!(code, 1, "one step failed:\n{text}");
    let seen = fs::read_to_string(packed.0.path().join("seen")).expect("steps ran");
    let seen: Vec<u32> = seen.lines().map(|line| line.parse().expect("a count")).collect();
    let (_, names) = plan(&[]);
    let ours = names.iter().filter(|name| !name.starts_with("nvidia-smi")).count();
    assert_eq!(seen.len(), ours, "{names:?}");
    assert!(seen.windows(2).all(|two| two[1] == two[0] + 1), "one more each time: {seen:?}");
    for name in names.iter().filter(|name| !name.starts_with("nvidia-smi")) {
        let log = packed.archived(&format!("{name}.log")).expect("its log");
        assert!(log.contains("# exit code "), "{name}: {log}");
        // 300,000 bytes of one step were truncated.
        assert!(log.len() < 140_000, "{name}: {} bytes", log.len());
    }
    let doctor = packed.archived("doctor.out").expect("its output");
    assert_eq!(doctor, "was asked for doctor\n");
    let mut files: Vec<_> = fs::read_dir(packed.results()).expect("results").collect();
    files.sort_by_key(|file| file.as_ref().expect("a file").file_name());
    let files: Vec<_> = files.into_iter().map(|file| file.expect("a file").file_name()).collect();
    assert_eq!(files, ["results.tgz", "summary.txt"], "and nothing else comes back");
    assert!(text.trim_end().ends_with("results.tgz"), "counts come last:\n{text}");
}

#[test]
fn a_step_that_hangs_is_killed_and_the_rest_has_its_place_in_the_summary() {
    let packed = Packed::new("*a_launch_per_batch*) sleep 600 ;;");
    let (code, text) = packed.run(4, &[]);
    assert_eq!(code, 1, "{text}");
    let log =
        packed.archived("test-gpu-a_launch_per_batch_moves_the_right_bytes.log").expect("archived");
    assert!(log.contains("# exit code 124"), "{log}");
    let summary = fs::read_to_string(packed.results().join("summary.txt")).expect("a summary");
    assert!(summary.starts_with("FAILED") && summary.contains("did not end"), "{summary}");
    assert!(summary.contains("bench-rate: no time left"), "{summary}");
    assert!(text.ends_with(&summary), "it is what is printed last:\n{text}");
}

/// Without GDRCopy its tests return early; the doctor only reports it.
#[test]
fn a_test_of_a_library_that_is_not_there_has_not_passed() {
    let packed = Packed::new("*gdr*|doctor) echo \"GDRCopy's library is not there (why)\" ;;");
    let (code, text) = packed.run(540, &[]);
    assert_eq!(code, 0, "{text}");
    let summary = packed.archived("summary.txt").expect("archived");
    let skipped = summary.lines().filter(|line| line.starts_with("skipped"));
    let tests = skipped.filter(|line| line.contains("GDRCopy's library is not there")).count();
    assert_eq!(tests, 2, "{summary}");
    assert!(summary.contains("  doctor\n"), "{summary}");
}

/// A machine may kill a command without a warning, or terminate it first.
#[test]
fn a_run_that_is_ended_leaves_the_steps_before() {
    for signal in ["KILL", "TERM"] {
        let packed = Packed::new("*a_launch_per_batch*) touch hangs; sleep 600 ;;");
        let child = packed.start(540, &[]);
        let deadline = Instant::now() + Duration::from_secs(600);
        while !packed.0.path().join("hangs").exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let step = packed.0.path().join("hangs").exists();
        let id = child.id().to_string();
        Command::new("kill").args(["-s", signal, &id]).status().expect("kill");
        let output = child.wait_with_output();
        assert!(step, "the step was never run");
        let text = String::from_utf8_lossy(&output.expect("it ends").stdout).into_owned();
        let doctor = packed.archived("doctor.out").expect("the archive is whole");
        assert_eq!(doctor, "was asked for doctor\n");
        let summary = packed.archived("summary.txt").expect("what passed");
        assert!(summary.contains("doctor"), "{summary}");
        let counted = text.contains("1 passed, 0 failed");
        assert_eq!(counted, signal == "TERM", "{signal}:\n{text}");
    }
}

/// The machine shows the last 12,000 characters.
#[test]
fn the_summary_fits_however_much_fails() {
    let long = "m".repeat(120);
    let packed = Packed::new(&format!(
        "*--list*) for i in {{1..60}}; do echo \"part::{long}_$i: test\"; done; exit 0 ;; \
         *caller*) exit 0 ;; *) echo {long} >&2; exit 1 ;;"
    ));
    let (code, text) = packed.run(540, &["--second"]);
    assert_eq!(code, 1, "{text}");
    let summary = fs::read_to_string(packed.results().join("summary.txt")).expect("a summary");
    assert!(summary.len() < 10_000, "{} bytes", summary.len());
    assert!(text.ends_with(&summary) && summary.contains("more lines are in"), "{summary}");
    let counts = summary.lines().last().expect("a line");
    assert!(counts.starts_with("1 passed, ") && counts.contains(" failed, "), "{counts}");
    let all = packed.archived("summary.txt").expect("archived");
    assert!(all.lines().filter(|line| line.starts_with("FAILED")).count() >= 60, "{all}");
}
