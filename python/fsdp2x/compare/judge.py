"""Finds the first difference of two recorded runs that rounding does not explain.

The reference side runs again with random relative errors of one epsilon in the elements of each module's output, of
its gradient, and of each parameter's gradient (Monte Carlo arithmetic: Parker 1997). The distance of these two runs is
the noise of a tensor. It contains what sums in another order do, also where terms cancel and where steps amplify it.

A distance of more than ``NUM_NOISES`` times the noise is a difference. The noise counts as at least an eighth of an
epsilon of the tensor's norm, so the limit is never below one epsilon. Integers must be equal, unless the noise changes
them too.

A tensor with few elements can have almost no noise by chance. So it gets the largest relative noise of the tensors with
its phase and name, of all ranks and steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp2x.compare.sketch import average, combine, distance, norm
from fsdp2x.compare.trace import LOCAL_GRADIENT, PER_RANK, Event, Key, RankTrace

NUM_NOISES = 8.0
_SMALLEST_NOISE = 1 / 8  # in epsilons of the norm
_FEW = 64


@dataclass(frozen=True)
class Difference:
    """A tensor that differs. ``missing``: the side without it, "a" or "b", or "" if both have it."""

    key: Key
    ranks: tuple[int, ...]
    missing: str = ""
    relative: float = 0.0
    limit: float = 0.0
    before: tuple[Key, ...] = ()
    note: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether both sides have the tensor, in one shape."""
        return self.limit > 0


@dataclass
class Run:
    """The traces of all processes of a side, by key. ``num_parts``: how many ranks' rows each process has."""

    processes: list[RankTrace]
    num_parts: int = 1
    order: dict[Key, int] = field(init=False, default_factory=dict)
    _parts: dict[Key, dict[int, tuple[Event, Tensor]]] = field(init=False)

    def __post_init__(self) -> None:
        self._parts = defaultdict(dict)
        for process, one in enumerate(self.processes):
            for event, values in zip(one.events, one.values, strict=True):
                for part in range(self.num_parts) if event.part < 0 else [event.part]:
                    self._parts[event.key][process * self.num_parts + part] = event, values
                self.order.setdefault(event.key, len(self.order))

    @property
    def num_ranks(self) -> int:
        return len(self.processes) * self.num_parts

    def event(self, key: Key) -> Event:
        return next(iter(self._parts[key].values()))[0]

    def ranks_of(self, key: Key) -> set[int]:
        return set(self._parts[key]) if key.phase in PER_RANK else set(range(self.num_ranks))

    def sharers(self, key: Key, rank: int) -> range:
        """Returns the ranks of another run whose tensors have this rank's as their mean, such as their losses."""
        if self.num_parts == 1 or key.phase not in PER_RANK or self._parts[key][rank][0].part >= 0:
            return range(rank, rank + 1)
        first = rank - rank % self.num_parts
        return range(first, first + self.num_parts)

    def mean(self, key: Key, ranks: range) -> Tensor:
        """Returns the sketch of the mean of tensors. A rank without one counts as zeros."""
        if len(ranks) == 1:
            return self.values(key, ranks[0])
        return average([self.values(key, rank) for rank in ranks if rank in self._parts[key]], len(ranks))

    def values(self, key: Key, rank: int) -> Tensor:
        """Returns the sketch of the full tensor that a rank has, or has a shard of."""
        parts = self._parts[key]
        if rank in parts and parts[rank][0].is_full:
            return parts[rank][1]
        by_range = {(event.offset, event.numel): values for event, values in parts.values()}
        return combine(list(by_range.values()))


def judge(a: Run, b: Run, noisy: Run) -> list[Difference]:
    """Returns all differences in the order of execution. ``noisy``: the run of ``b`` with noise."""
    noises = _Noises(b, noisy)
    order = _merged(a, b)
    found = _other_rows(b)
    for index, key in enumerate(order):
        before = tuple(order[max(0, index - 3) : index])
        if key not in a.order or key not in b.order:
            if key.phase != LOCAL_GRADIENT:  # some engines have no such tensor
                present = b if key in b.order else a
                found.append(Difference(key, tuple(sorted(present.ranks_of(key))), "ab"[present is a], before=before))
        elif difference := _compare(key, a, b, noises, before):
            found.append(difference)
    return sorted(found, key=lambda one: one.key.step)


def _other_rows(b: Run) -> list[Difference]:
    """Returns the first batch whose rows the loaders of ``b`` do not give. ``b`` trained on the rows of run a."""
    batches: dict[Key, tuple[Counter[int], Counter[int]]] = {}
    for key, rows, own in (batch for one in b.processes for batch in one.rows):
        trained, given = batches.setdefault(key, (Counter(), Counter()))
        trained.update(rows)
        given.update(own)
    for key, (trained, given) in batches.items():
        if lacking := (trained - given).total():
            note = f"b's loader does not give {lacking} of the {trained.total()} rows that the ranks of a read."
            if (num_repeated := trained.total() - len(trained)) > given.total() - len(given):
                note += f" In a, {num_repeated} of these rows repeat others."
            note += " b trained on the rows of a, so later differences have other causes."
            return [Difference(key, tuple(range(b.num_ranks)), note=note)]
    return []


def _merged(a: Run, b: Run) -> list[Key]:
    """Returns all keys in the order of ``b``. Keys that only ``a`` has follow their predecessors in ``a``."""
    position: dict[Key, tuple[int, ...]] = {key: (index,) for key, index in b.order.items()}
    last: tuple[int, ...] = (-1,)
    for index, key in enumerate(a.order):
        if key in position:
            last = position[key]
        else:
            position[key] = (last[0], index)
    return sorted(position, key=lambda key: (key.step, position[key]))


def _compare(key: Key, a: Run, b: Run, noises: _Noises, before: tuple[Key, ...]) -> Difference | None:
    one, other = a.event(key), b.event(key)
    ranks = tuple(sorted(a.ranks_of(key) | b.ranks_of(key)))
    if one.shape != other.shape:
        return Difference(key, ranks, before=before, note=f"shape {list(one.shape)} in a, {list(other.shape)} in b")
    if (lacking := a.ranks_of(key) ^ b.ranks_of(key)) and key.phase != LOCAL_GRADIENT:
        missing = "a" if lacking <= b.ranks_of(key) else "b"
        return Difference(key, tuple(sorted(lacking)), missing, before=before)
    wrong, worst, limit = [], 0.0, 0.0
    for rank in a.ranks_of(key) & b.ranks_of(key):
        mine, reference = a.mean(key, b.sharers(key, rank)), b.values(key, rank)
        allowed = NUM_NOISES * noises.relative(key, _epsilon(one, other))
        apart = _relative(mine, reference)
        if apart > allowed:
            wrong.append(rank)
            worst, limit = max(worst, apart), allowed
    note = "" if one.dtype == other.dtype else f"{one.dtype} in a, {other.dtype} in b"
    return Difference(key, tuple(sorted(wrong)), "", worst, limit, before, note) if wrong else None


def _epsilon(*events: Event) -> float:
    """Returns the coarsest epsilon, 0 for integers."""
    dtypes = [getattr(torch, event.dtype) for event in events]
    return max(torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0 for dtype in dtypes)


def _relative(one: Tensor, other: Tensor) -> float:
    """Returns the distance of two tensors relative to the larger norm."""
    return distance(one, other) / (max(norm(one), norm(other)) or 1.0)


class _Noises:
    """The noise of each tensor, relative to its norm: the largest of all ranks."""

    def __init__(self, run: Run, noisy: Run) -> None:
        self._of_key: dict[Key, float] = {}
        self._of_few: dict[tuple[str, str], float] = defaultdict(float)
        for key in run.order.keys() & noisy.order.keys():
            ranks = run.ranks_of(key) & noisy.ranks_of(key)
            largest = max((_relative(run.values(key, one), noisy.values(key, one)) for one in ranks), default=0.0)
            self._of_key[key] = largest
            if torch.Size(run.event(key).shape).numel() <= _FEW:
                group = key.phase, key.name
                self._of_few[group] = max(self._of_few[group], largest)

    def relative(self, key: Key, epsilon: float) -> float:
        few = self._of_few[key.phase, key.name] if epsilon else 0.0
        return max(self._of_key.get(key, 0.0), few, _SMALLEST_NOISE * epsilon)
