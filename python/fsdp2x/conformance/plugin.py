"""pytest's options for ``fsdp2x.conformance``, and the ranks as a fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fsdp2x.conformance.behavior import cases
from fsdp2x.conformance.ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdp2x.conformance")
    group.addoption("--engine", default="fsdp2x:fully_shard", help="the function to test, as module:function")
    group.addoption("--world", default="1,2", help="numbers of ranks to test it on. Default: 1,2")
    group.addoption(
        "--engine-option", action="append", default=[], metavar="NAME=TEXT", help="a keyword argument of each call"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "conforms" not in metafunc.fixturenames:
        return
    found = [(world, *case) for world in map(int, metafunc.config.getoption("--world").split(",")) for case in cases()]
    ids = [f"{module.rpartition('.')[2]}.{name}-{row}-{world}" for world, module, name, row in found]
    metafunc.parametrize(("world", "module", "name", "row"), found, ids=ids)


@pytest.fixture(scope="session")
def conforms(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Ranks]]:
    engine = request.config.getoption("--engine")
    options = dict(pair.split("=", 1) for pair in request.config.getoption("--engine-option"))
    pools: dict[int, Ranks] = {}

    def ranks(world: int) -> Ranks:
        return pools.setdefault(world, Ranks(world, engine, options))

    yield ranks
    for pool in pools.values():
        pool.close()
