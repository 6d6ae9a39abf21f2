use super::*;

fn shell(script: &str) -> Step {
    Step::new("a step", "sh").args(["-c", script])
}

fn run(step: &Step) -> Outcome {
    // Not to stdout: an outer run of these tests would count the made-up results below.
    step.run(Deadline::new(None, false), &mut io::sink(), None)
}

#[test]
fn a_command_line_is_shown_so_that_it_can_be_pasted() {
    let step = Step::cargo("docs", "doc --no-deps").env("RUSTDOCFLAGS", "-D warnings");
    assert_eq!(step.to_string(), "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps");
    assert_eq!(quoted("it's"), r"'it'\''s'");
    assert_eq!(quoted(""), "''");
}

#[test]
fn the_exit_code_decides() {
    assert_eq!(run(&shell("exit 0")).verdict, Verdict::Ok);
    assert!(matches!(run(&shell("exit 7")).verdict, Verdict::Failed(why) if why.contains('7')));
    let missing = Step::new("a step", "no-such-program-anywhere");
    assert!(matches!(run(&missing).verdict, Verdict::Failed(_)));
}

#[test]
fn a_step_that_ran_no_test_has_failed() {
    let none = shell("echo 'test result: ok. 0 passed; 0 failed; 2 ignored; 0 measured'");
    let outcome = run(&none.tests_at_least(1));
    assert!(matches!(outcome.verdict, Verdict::Failed(_)));
    assert_eq!(outcome.tally.skipped, 2);
    let one = shell("echo 'test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured'");
    assert_eq!(run(&one.tests_at_least(1)).verdict, Verdict::Ok);
}

#[test]
fn binaries_add_up() {
    let two = "test result: ok. 2 passed; 0 failed; 0 ignored\n\
               noise \u{fffd}\n\
               test result: FAILED. 3 passed; 1 failed; 0 ignored";
    let mut copy = Vec::new();
    let tally = copy_and_count(two.as_bytes(), &mut copy).unwrap();
    assert_eq!(copy, two.as_bytes());
    assert_eq!(tally, Tally { passed: 5, failed: 1, skipped: 0 });
}

#[test]
fn a_skipped_step_does_not_run() {
    let outcome = run(&shell("exit 1").skipped("why"));
    assert_eq!(outcome.verdict, Verdict::Skipped("why".into()));
    assert_eq!(outcome.tally.skipped, 1);
}

#[test]
fn a_step_without_what_it_needs_is_skipped_with_the_reason() {
    let step = || shell("exit 1").needs(&["cxx", "vllm"]);
    let lacking = Lacking::from([("vllm", "no network".to_owned())]);
    let outcome = run(&step().without(&lacking));
    assert_eq!(outcome.verdict, Verdict::Skipped("no network".into()));
    let other = Lacking::from([("qemu", "no network".to_owned())]);
    assert!(matches!(run(&step().without(&other)).verdict, Verdict::Failed(_)));
}

#[test]
fn a_step_without_what_a_part_needs_runs_without_that_part() {
    let step = shell("exit ${OFF:-7}").part_needs("qemu", "OFF");
    assert_eq!(step.all_needs().collect::<Vec<_>>(), ["qemu"]);
    let without = step.clone().without(&Lacking::from([("qemu", "no network".to_owned())]));
    assert!(matches!(run(&without).verdict, Verdict::Failed(why) if why.contains('1')));
    assert_eq!(without.skipped_parts, ["no network"]);
    let with = step.without(&Lacking::new());
    assert!(matches!(run(&with).verdict, Verdict::Failed(why) if why.contains('7')));
    assert!(with.skipped_parts.is_empty());
}

#[test]
fn cpu_time_of_grandchildren_is_counted() {
    let busy = "sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done'; true";
    let busy = Step::new("busy", "sh").args(["-c", busy]);
    assert!(run(&busy).cpu >= Duration::from_millis(20));
}
