"""Ends ``make test-real`` with a line for each comparison; gives its tests, of many processes each, half an hour."""

from pathlib import Path

import environments
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))


def pytest_terminal_summary(terminalreporter):
    if environments.SPEEDS:
        terminalreporter.section("packages on both engines")
        for row in environments.SPEEDS:
            terminalreporter.write_line(row)
