"""One test for each behavior, row, and number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp2x.conformance.behavior import BEHAVIORS
from fsdp2x.conformance.ranks import Ranks


def test_contract(conforms: Callable[[int], Ranks], world: int, module: str, name: str, row: str) -> None:
    behavior, ranks = BEHAVIORS[module, name], conforms(world)
    if reason := behavior.why_skipped(ranks.engine, world):
        pytest.skip(reason)
    outcome = ranks.run(module, name, row)
    if lack := behavior.why_lacking(ranks.engine, row):
        assert outcome.status == "failed", f"{ranks.engine} conforms now. Remove: {lack}"
        pytest.xfail(lack)
    if outcome.status == "failed":
        pytest.fail(f"{behavior.contract} {outcome.reason}", pytrace=False)
