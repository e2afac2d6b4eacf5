"""Tables of settings: what `each_value` and `each_pair` leave to `--full`."""

import itertools
from collections import defaultdict

import pytest

STRENGTHS = {"each_value": 1, "each_pair": 2}


def thin_out(items: list[pytest.Item]) -> None:
    """Of a test marked `each_value` (`each_pair`) those cases remain in which each value of every argument, the world
    size included, occurs (meets each of every other argument); the rest becomes `full`."""
    tests = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("full"):
            for name, strength in STRENGTHS.items():
                if item.get_closest_marker(name):
                    tests[item.path, item.originalname, strength].append(item)
    for (*_, strength), cases in tests.items():
        for item in set(cases) - _chosen(cases, strength):
            item.add_marker("full")


def _chosen(cases: list[pytest.Item], strength: int) -> set[pytest.Item]:
    parts = {}
    for item in cases:
        values = [(name, repr(value)) for name, value in item.callspec.params.items()]
        parts[item] = set(itertools.combinations(values, min(strength, len(values))))
    missing, chosen = set().union(*parts.values()), set()
    while missing:
        best = max(cases, key=lambda item: len(parts[item] & missing))
        chosen.add(best)
        missing -= parts[best]
    return chosen
