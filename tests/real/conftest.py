"""Ends ``make test-real`` with a line for each comparison: how many numbers were equal, how fast steps were."""

import environments


def pytest_terminal_summary(terminalreporter):
    if environments.SPEEDS:
        terminalreporter.section("packages on both engines")
        for row in environments.SPEEDS:
            terminalreporter.write_line(row)
