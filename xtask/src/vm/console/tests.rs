use super::*;

fn read(lines: &[&str]) -> Console {
    let mut console = Console::default();
    for line in lines {
        console.line(line);
    }
    console
}

#[test]
fn a_whole_run_is_counted() {
    let mut console = read(&["noise", "\u{1b}vm: suite a has 3 tests\r", "vm: running b"]);
    assert_eq!(console.line("vm: test b ... ok\r\n"), Some(("b".into(), Heard::Ok)));
    let failed = console.line("vm: test c ... FAILED: 1: 2");
    assert_eq!(failed, Some(("c".into(), Heard::Failed("1: 2".into()))));
    console.line("vm: test d ... skipped: why");
    console.line("vm: suite a ended");
    assert_eq!(console.finish(), (Tally { passed: 1, failed: 1, skipped: 1 }, None));
}

#[test]
fn a_run_that_stops_in_the_middle_has_failed() {
    let console = read(&["vm: suite a has 4 tests", "vm: test b ... ok", "vm: running c"]);
    let (tally, wrong) = console.finish();
    assert_eq!((tally.passed, tally.failed), (1, 3));
    assert_eq!(wrong.unwrap(), "the machine stopped in c");
}

#[test]
fn silence_and_a_panic_are_failures() {
    assert_eq!(read(&[]).finish().0.failed, 1);
    let panicked = read(&[
        "vm: suite a has 1 tests",
        "vm: test b ... ok",
        "vm: suite a ended",
        "[ 1.0] Kernel panic - not syncing: Attempted to kill init!",
    ]);
    assert_eq!(panicked.finish().0, Tally { passed: 1, failed: 1, skipped: 0 });
}

#[test]
fn what_a_program_prints_is_not_taken_for_a_result() {
    let mut console = Console::default();
    assert_eq!(console.line("say vm: test b ... ok"), None);
    assert_eq!(console.line("test b ... ok"), None);
    assert_eq!(console.finish().0.passed, 0);
}
