use super::*;

#[test]
fn reads_the_closing_line_of_a_test_binary() {
    let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; \
                7 filtered out; finished in 0.01s\n";
    assert_eq!(Tally::of_line(line), Tally { passed: 12, failed: 3, skipped: 1 });
}

#[test]
fn what_a_command_prints_is_counted_once() {
    for (passed, failed, skipped) in [(52, 1, 0), (7, 1, 2), (3, 0, 0)] {
        let tally = Tally { passed, failed, skipped };
        assert_eq!(Tally::of_line(&tally.line(Duration::from_millis(4500))), tally);
        // The last line of a run is a sum, and must not count again.
        assert_eq!(Tally::of_line(&tally.to_string()), Tally::default());
    }
}

#[test]
fn a_test_that_cannot_run_here_is_counted() {
    for line in ["SKIPPED a: root is needed\n", "test b ... SKIPPED a: root is needed\n"] {
        assert_eq!(Tally::of_line(line), Tally { passed: 0, failed: 0, skipped: 1 });
    }
}

#[test]
fn other_lines_count_nothing() {
    for line in ["", "test a ... ok", "12 passed; 3 failed", "test result: "] {
        assert_eq!(Tally::of_line(line), Tally::default(), "{line:?}");
    }
}

#[test]
fn skipped_tests_are_named_only_if_there_are_any() {
    assert_eq!(Tally { passed: 2, failed: 0, skipped: 0 }.to_string(), "2 passed, 0 failed");
    assert_eq!(
        Tally { passed: 2, failed: 1, skipped: 4 }.to_string(),
        "2 passed, 1 failed, 4 skipped"
    );
}
