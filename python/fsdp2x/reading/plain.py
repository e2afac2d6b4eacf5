"""Trees of plain values from files: whether following them comes to an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp2x.errors import CorruptFile

DEEPEST = 100
MOST_VALUES = 20_000_000


def check_plain(tree: Any, where: str) -> None:
    """Raises `CorruptFile` for mappings and sequences that hold themselves, are nested too deep, or become too many.

    A file names what it has said before, so that a few bytes may stand for a tree that no memory holds.
    """
    known: dict[int, tuple[int, int]] = {}
    open_: set[int] = set()

    def measure(node: Any, depth: int) -> tuple[int, int]:
        """Values below a node, and levels."""
        if isinstance(node, Mapping):
            children = node.values()
        elif isinstance(node, list | tuple | set | frozenset):
            children = node
        else:
            return 1, 0
        if id(node) in open_:
            raise CorruptFile(f"{where}: damaged, a value in it holds itself")
        if id(node) not in known:
            if depth == DEEPEST:
                raise CorruptFile(f"{where}: damaged, its values are nested deeper than {DEEPEST} levels")
            open_.add(id(node))
            num = levels = 0
            for child in children:
                num_below, levels_below = measure(child, depth + 1)
                num, levels = num + num_below, max(levels, levels_below)
            open_.discard(id(node))
            known[id(node)] = num + 1, levels + 1
        num, levels = known[id(node)]
        if depth + levels > DEEPEST:
            raise CorruptFile(f"{where}: damaged, its values are nested deeper than {DEEPEST} levels")
        if num > MOST_VALUES:
            raise CorruptFile(f"{where}: damaged, references make more than {MOST_VALUES} values of it")
        return num, levels

    measure(tree, 0)
