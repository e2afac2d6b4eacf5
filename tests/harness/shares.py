"""Shares of the folders in the time of all tests. A folder that outgrows the recorded one fails a complete run.

Shares and not seconds, because machines differ, and so does what else runs on them.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "durations.json"
# A folder may take so many times its share, and so much of the whole more: a start of the fork server falls anywhere.
FACTOR, SLACK = 1.3, 0.02


def outgrown(seconds: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """A line for each folder that took more of the whole than it may."""
    total = sum(seconds.values())
    return [
        f"{folder}: {took / total:.1%} of the time of all tests, recorded are {recorded.get(folder, 0):.1%}"
        for folder, took in seconds.items()
        if took / total > FACTOR * recorded.get(folder, 0) + SLACK
    ]


class Shares:
    """A pytest plugin: adds the time of the tests up by folder, and compares or writes the shares at the end."""

    def __init__(self, writes: bool):
        self.writes, self.lines = writes, []
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = Path(report.nodeid.partition("::")[0]).parent
        self.seconds["/".join(folder.parts[1:3])] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.OK:
            return
        if self.writes:
            total = self.seconds.total()
            shares = {folder: round(took / total, 4) for folder, took in sorted(self.seconds.items())}
            FILE.write_text(json.dumps(shares, indent=1) + "\n")
        else:
            recorded = json.loads(FILE.read_text())
            is_complete = all(folder in self.seconds or not (FILE.parent / folder).is_dir() for folder in recorded)
            self.lines = outgrown(self.seconds, recorded) if is_complete else []
            if self.lines:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.lines:
            terminalreporter.section("folders that have outgrown their share (make durations records them)")
            terminalreporter.write_line("\n".join(self.lines))


def watch_shares(config: pytest.Config) -> None:
    """Registers the plugin for a run of all default tests, with CI=1 or --shares."""
    option = config.option
    mode = option.shares or ("check" if os.environ.get("CI") else None)
    is_partial = option.full or option.keyword or option.markexpr or option.impl != "fsdp2x"
    if mode and not is_partial and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Shares(mode == "write"))
