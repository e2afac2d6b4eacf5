"""Runs programs in pools of ranks until the sides differ on one, and makes that one small."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fuzz import execute
from fuzz.grammar import draw
from fuzz.program import Program
from fuzz.reduce import reduced
from harness.context import Body
from harness.pool import RankPool, report

TIMEOUT_S = 40.0


class Ranks:
    """A pool that is created again whenever a program has broken it."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._pool: RankPool | None = None

    def run(self, program: Program, sides: tuple[str, ...]) -> list[str]:
        """Returns the differences of the sides on any rank. Ranks that hang, die, or diverge also count."""
        values = self.collect(Body.of(execute.run_program), repr(program), sides)
        if isinstance(values, str):
            return [values]
        found = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(values) for text in texts]
        raised = [one for _, one in values]
        if any(one != raised[0] for one in raised):
            self.close()
            found.append(f"ranks raised differently: {raised}")
        return found

    def collect(self, body: Body, *arguments: Any) -> list[Any] | str:
        """Returns each rank's value, or a report of the ranks that did not return."""
        if self._pool is None:
            self._pool = RankPool(self.world)
        outcomes = self._pool.run(body, "fsdp2x", {}, arguments, {}, TIMEOUT_S)
        is_broken = self._pool.broken
        if self._pool.is_spent:
            self.close()
        if is_broken:
            return report("the ranks did not end together", outcomes)
        return [one.value for one in outcomes]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def explain(program: Program, world: int, found: list[str]) -> str:
    """Returns the message of a failing test: the divergences and the command that reproduces them."""
    lines = "\n".join(found[:6])
    return f'{lines}\n\n{program}\n\ncd tests && python -m fuzz run --world {world} "{program!r}"'


def search(ranks: Ranks, seeds: Iterable[int], sides: tuple[str, ...], *, only: str = "") -> None:
    """Raises AssertionError on the first program whose differences match `only`, after having made it small."""
    for seed in seeds:
        program = draw(seed, ranks.world)
        if _matches(ranks.run(program, sides), only):
            small = reduced(program, lambda smaller: _matches(ranks.run(smaller, sides), only))
            raise AssertionError(f"seed {seed}: {explain(small, ranks.world, ranks.run(small, sides))}")


def _matches(found: list[str], only: str) -> bool:
    return any(re.search(only, one) for one in found)
