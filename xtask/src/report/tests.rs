use super::*;
use crate::needs::Lacking;

fn outcome(verdict: Verdict, tally: Tally) -> Outcome {
    Outcome { verdict, tally, took: Duration::from_secs(61), cpu: Duration::from_secs(90) }
}

#[test]
fn a_failure_without_a_failed_test_still_counts() {
    let tests = Tally { passed: 9, failed: 0, skipped: 1 };
    let all = [
        outcome(Verdict::Ok, tests),
        outcome(Verdict::Failed("exit status: 101".into()), Tally::default()),
    ];
    assert_eq!(total(all.iter()).to_string(), "9 passed, 1 failed, 1 skipped");
}

#[test]
fn failed_tests_count_once() {
    let tests = Tally { passed: 9, failed: 2, skipped: 0 };
    let all = [outcome(Verdict::Failed("exit status: 101".into()), tests)];
    assert_eq!(total(all.iter()).to_string(), "9 passed, 2 failed");
}

#[test]
fn the_table_names_what_failed_and_how_to_run_it_again() {
    let step = Step::cargo("clippy", "clippy --workspace");
    let failed = outcome(Verdict::Failed("exit status: 101".into()), Tally::default());
    let table = table(&[(&step, failed)], 2, Duration::from_secs(125));
    for part in ["FAILED", "1:01", "1:30", "2:05", "$ cargo clippy --workspace", "2 more not run"] {
        assert!(table.contains(part), "{part:?} is missing in:\n{table}");
    }
}

#[test]
fn the_table_names_what_was_skipped() {
    let lacking = Lacking::from([("qemu", "no QEMU".to_owned())]);
    let tests = Step::cargo("tests", "test").part_needs("qemu", "OFF").without(&lacking);
    let ran = outcome(Verdict::Ok, Tally { passed: 9, failed: 0, skipped: 2 });
    let vm = Step::cargo("vm", "xtask vm").needs(&["qemu"]).without(&lacking);
    let one = Tally { passed: 0, failed: 0, skipped: 1 };
    let skipped = outcome(Verdict::Skipped("no QEMU".into()), one);
    let all = [(&tests, ran), (&vm, skipped)];
    let table = table(&all, 0, Duration::from_secs(125));
    for part in ["tests: skipped in part: no QEMU", "vm: skipped: no QEMU"] {
        assert!(table.contains(part), "{part:?} is missing in:\n{table}");
    }
    let total = total(all.iter().map(|(_, outcome)| outcome));
    assert_eq!(total.to_string(), "9 passed, 0 failed, 3 skipped");
}

#[test]
fn a_failure_on_a_full_disk_says_so() {
    assert_eq!(full_disk(Some(3 << 20)), " (only 3 MiB are free on the build folder's disk)");
    assert_eq!(full_disk(Some(9 << 30)), "");
}

#[test]
fn a_step_aside_is_run_once_and_has_its_output_and_counts() {
    let line = "echo 'test result: ok. 3 passed; 0 failed; 1 ignored'; echo an error >&2";
    let step = Step::new("aside", "sh").args(["-c", line]).tests_at_least(1).aside();
    let (outcome, output) = run_aside(&step, Deadline::never()).unwrap();
    assert_eq!((outcome.verdict, outcome.tally.passed), (Verdict::Ok, 3));
    let output = String::from_utf8(output).unwrap();
    assert!(output.contains("3 passed") && output.contains("an error"), "{output}");
}

#[test]
fn steps_aside_run_one_after_the_other_beside_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("made");
    let made = made.to_str().unwrap();
    let step = |name: &str, line: &str| Step::new(name, "sh").args(["-c", line, "sh", made]);
    // The second one aside would fail before the first one's end, and the last one waits for both.
    let wait = "until [ -e \"$1.both\" ]; do sleep 0.01; done";
    let steps = [
        step("main", wait),
        step("one", "sleep 0.1; touch \"$1\"").aside(),
        step("other", "[ -e \"$1\" ] && touch \"$1.both\"").aside(),
    ];
    let done = run_steps(&steps, Deadline::never(), false);
    let names: Vec<&str> = done.iter().map(|(step, _)| &*step.name).collect();
    assert_eq!(names, ["main", "one", "other"]);
    assert!(done.iter().all(|(_, outcome)| outcome.verdict == Verdict::Ok), "{done:?}");
}
