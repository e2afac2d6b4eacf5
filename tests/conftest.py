"""Options, markers and the end of the session for all tests; the distributed harness itself is tests/harness."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.session import close_session
from harness.shares import watch_shares
from harness.tables import thin_out, world_of

TESTS = Path(__file__).parent
# Folders of tests of what only fsdp2x does.
ONLY_FSDP2X = ("dist", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--impl",
        choices=("fsdp2x", "torch"),
        default="fsdp2x",
        help="which fully_shard the parity tests exercise; 'torch' shows that the tests hold for upstream's own",
    )
    parser.addoption("--full", action="store_true", help="also run the slow and exotic tests marked `full`")
    parser.addoption(
        "--verdict", type=Path, help="tests of a device: end with a page of what they show, in a file, too"
    )
    parser.addoption(
        "--shares", choices=("check", "write"), help="compare each folder's share of the time with durations.json"
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="of the first program that tests/fuzz draws")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: slow or exotic; runs with --full")
    config.addinivalue_line("markers", "each_pair: any two values of two arguments meet; otherwise each occurs")
    config.addinivalue_line("markers", "each_world: every number of ranks; otherwise, of those above two, the smallest")
    config.addinivalue_line("markers", "shows(claim): which claim of gpu/verdict.py a test is about")
    if config.getoption("--verdict"):
        sys.path.append(str(TESTS / "gpu"))
        from verdict import Verdict

        config.pluginmanager.register(Verdict(config.getoption("--verdict")))
    watch_shares(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imported modules and collected items stay, so garbage collections skip them, now and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        thin_out(items)
        # Left out here, not skipped one by one: three thousand reports take seconds of a short run.
        _leave_out(config, items, lambda item: item.get_closest_marker("full") is not None)
    if config.getoption("--impl") == "torch":
        _leave_out(config, items, lambda item: item.path.relative_to(TESTS).parts[0] in ONLY_FSDP2X)
    # Within a file, one world size after the other: fewer pools are alive at a time.
    items.sort(key=lambda item: (str(item.path), world_of(item)))


def _leave_out(config: pytest.Config, items: list[pytest.Item], which: Callable[[pytest.Item], bool]) -> None:
    left_out = [item for item in items if which(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not which(item)]


def pytest_unconfigure(config: pytest.Config) -> None:
    close_session()
