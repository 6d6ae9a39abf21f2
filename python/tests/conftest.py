"""One line that `cargo xtask ci` counts tests by."""


def pytest_terminal_summary(terminalreporter):
    count = {name: len(terminalreporter.stats.get(name, ())) for name in
             ("passed", "failed", "error", "skipped")}
    failed = count["failed"] + count["error"]
    terminalreporter.write_line(
        f"test result: {'FAILED' if failed else 'ok'}. {count['passed']} passed; {failed} failed; "
        f"{count['skipped']} ignored"
    )
