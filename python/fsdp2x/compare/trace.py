"""What a rank records: events in the order of execution, each with the sketch of one tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Phases of a step, as reports name them.
INITIAL, INPUT, FORWARD, RECOMPUTED, LOSS = "initial weight", "input", "forward output", "recomputed output", "loss"
OUTPUT_GRADIENT, LOCAL_GRADIENT = "gradient of output", "gradient before reduction"
GRADIENT, NORM, CLIPPED = "gradient after reduction", "clipped norm", "gradient after clipping"
WEIGHT, BUFFER = "weight after optimizer step", "buffer after optimizer step"
# Each rank has its own tensor in these phases. In the others, ranks have shards or copies of one tensor.
PER_RANK = (INPUT, FORWARD, RECOMPUTED, LOSS, OUTPUT_GRADIENT, LOCAL_GRADIENT)


class Key(NamedTuple):
    """Names the same tensor in two runs: the ``call``-th of this name and phase in the step."""

    step: int
    phase: str
    name: str
    call: int


# The name of a batch begins with LOADER.
LOADER = "batches of loader "
Rows = tuple[Key, list[int], list[int]]


@dataclass(frozen=True)
class Event:
    """A tensor of one rank: its full shape, and the flat range of its elements that the rank has.

    ``part``: if the process has the rows of several ranks, the one whose rows these are, from 0. -1: of all.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    offset: int
    numel: int
    part: int = -1

    @property
    def is_full(self) -> bool:
        return self.numel == torch.Size(self.shape).numel()


@dataclass
class RankTrace:
    """The events of a rank, a row of sketch values for each, and the tensors that were kept completely, by part.

    ``rows``: for each batch, hashes of the rows that the rank trained on, and of those that its loader gave.
    """

    events: list[Event]
    values: Tensor
    kept: dict[Key, list[Tensor]]
    rows: list[Rows] = field(default_factory=list)

    def save(self, path: Path) -> None:
        events = [(tuple(one.key), one.shape, one.dtype, one.offset, one.numel, one.part) for one in self.events]
        kept, rows = ([(tuple(key), *more) for key, *more in said] for said in (self.kept.items(), self.rows))
        torch.save({"events": events, "values": self.values, "kept": kept, "rows": rows}, path)

    @classmethod
    def load(cls, path: Path) -> RankTrace:
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        events = [Event(Key(*key), *more) for key, *more in saved["events"]]
        rows = [(Key(*key), *hashes) for key, *hashes in saved["rows"]]
        return cls(events, saved["values"], {Key(*key): one for key, one in saved["kept"]}, rows)
