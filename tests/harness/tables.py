"""Tables of settings: which cases of a test with several arguments run, and which are left to `--full`."""

import itertools
from collections import defaultdict

import pytest


def thin_out(items: list[pytest.Item]) -> None:
    """Keeps enough cases to use each value of each argument, and marks the rest `full`. The world size is an argument.

    Of several worlds of more than two ranks, the smallest one stays, unless the test is marked `each_world`. For a test
    marked `each_pair`, the cases cover all pairs of values of two arguments.
    """
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("full"):
            tests[item.path, item.originalname, *item.callspec.params].append(item)
    for cases in map(_without_larger_worlds, tests.values()):
        for item in set(cases) - _chosen(cases, 2 if cases[0].get_closest_marker("each_pair") else 1):
            item.add_marker("full")


def _without_larger_worlds(cases: list[pytest.Item]) -> list[pytest.Item]:
    worlds = {world_of(item) for item in cases}
    largest = min((world for world in worlds if world > 2), default=0)
    if largest == max(worlds) or not largest or cases[0].get_closest_marker("each_world"):
        return cases
    for item in cases:
        if world_of(item) > largest:
            item.add_marker("full")
    return [item for item in cases if world_of(item) <= largest]


def world_of(item: pytest.Item) -> int:
    """The number of ranks of a distributed test, or 0."""
    world = item.callspec.params.get("world", 0) if hasattr(item, "callspec") else 0
    return world if isinstance(world, int) else 0


def _chosen(cases: list[pytest.Item], strength: int) -> set[pytest.Item]:
    tables = [{name: id(value) for name, value in item.callspec.params.items()} for item in cases]
    axes = [name for name in tables[0] if len({table[name] for table in tables}) > 1]
    if len(axes) < 2 or len(axes) == strength:
        return set(cases)
    parts = [set(itertools.combinations([(axis, table[axis]) for axis in axes], strength)) for table in tables]
    missing, chosen = set().union(*parts), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(parts[index] & missing))
        chosen.add(cases[best])
        missing -= parts[best]
    return chosen
