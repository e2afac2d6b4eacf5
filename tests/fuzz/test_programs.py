"""Random programs: losses, outputs, gradients, parameters, placements, errors and memory are the same on every side."""

import pytest

from fuzz.execute import SIDES
from fuzz.search import Ranks, search

# Ranks -> programs; more ranks than cores are slow.
NUM_PROGRAMS = {1: 4, 2: 8, 3: 2, 4: 1}
NUM_FULL = {1: 500, 2: 3000, 3: 500, 4: 800}


@pytest.fixture
def ranks(request, world):
    if request.config.getoption("--impl") == "torch":
        pytest.skip("upstream is a side here already")
    pool = Ranks(world)
    yield pool
    pool.close()


@pytest.fixture
def first_seed(request):
    return request.config.getoption("--fuzz-seed")


@pytest.mark.parametrize("world", NUM_PROGRAMS)
def test_programs(ranks, world, first_seed):
    search(ranks, range(first_seed, first_seed + NUM_PROGRAMS[world]), SIDES)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world", NUM_FULL)
def test_many_programs(ranks, world, first_seed):
    start = first_seed + NUM_PROGRAMS[world]
    search(ranks, range(start, start + NUM_FULL[world]), SIDES)
