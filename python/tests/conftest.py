"""Prints lines for `cargo xtask ci`: the reasons of skipped tests, and one with the counts."""


def pytest_terminal_summary(terminalreporter):
    stats = terminalreporter.stats
    for skipped in stats.get("skipped", ()):
        file, line, reason = skipped.longrepr
        terminalreporter.write_line(f"skipped: {file}:{line}: {reason}")
    names = ("passed", "failed", "error", "skipped")
    passed, failed, error, skipped = (len(stats.get(name, ())) for name in names)
    failed += error
    verdict = "FAILED" if failed else "ok"
    terminalreporter.write_line(
        f"test result: {verdict}. {passed} passed; {failed} failed; {skipped} ignored"
    )
