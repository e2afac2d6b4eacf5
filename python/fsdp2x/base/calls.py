"""What ranks compare before they exchange anything: the public call, its model, and the parameters of its units.

Two models of one shape look alike in all else that ranks compare. Their units have different numbers, which follow the
order of ``fully_shard`` calls. Different parameters in the units of a group would give collectives of different sizes,
which backends answer with an abort of the process or with wrong numbers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, ParamSpec, Protocol, TypeVar

import torch.distributed as dist
from torch import nn

from fsdp2x.base.optimizer_hooks import original_number

P = ParamSpec("P")
T = TypeVar("T")
all_units: weakref.WeakSet[NumberedUnit] = weakref.WeakSet()  # of this process
_num_units: defaultdict[tuple[int, UnitNumber], int] = defaultdict(int)
_NUM_SHOWN = 4


@dataclass(frozen=True)
class Call:
    """``ranks`` hold a part of ``model`` each; both are empty for one that is not sharded.

    ``shapes``: models of other shapes are not compared here, since an exchange that follows names the parameter.
    """

    name: str
    model: str = ""
    ranks: tuple[int, ...] = ()
    digest: bytes = b""  # of the units and parameters
    shapes: bytes = b""

    def __str__(self) -> str:
        return f"{self.name} of {self.model}" if self.model else self.name


_current: ContextVar[Call | None] = ContextVar("fsdp2x_call", default=None)


class ParamRecord(Protocol):
    """A sharded parameter, as far as calls look at it."""

    param: nn.Parameter
    original: int


class NumberedUnit(Protocol):
    """A unit, as far as calls look at it."""

    number: UnitNumber
    modules: Any  # a sequence of modules

    @property
    def params(self) -> Sequence[ParamRecord]: ...


@dataclass(frozen=True)
class UnitNumber:
    """``number``: of the units of this kind and these shapes over these ranks, in the order of their making."""

    ranks: tuple[int, ...] = ()
    kind: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    number: int = 0


def number_unit(state: NumberedUnit, ranks: Iterable[int]) -> UnitNumber:
    """The number of a new unit, by which later calls know it."""
    kind = ", ".join(_kind(module) for module in state.modules)
    like = UnitNumber(tuple(sorted(ranks)), kind, tuple(tuple(record.param.shape) for record in state.params))
    # Ranks may be threads of one process, as in torch's tests.
    key = (dist.get_rank() if dist.is_initialized() else 0, like)
    _num_units[key] += 1
    all_units.add(state)
    return replace(like, number=_num_units[key] - 1)


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def call_of(name: str, model: nn.Module, params: Iterable[nn.Parameter], *, names_shapes: bool = False) -> Call:
    """The call ``name`` on ``params``, which belong to ``model``. ``names_shapes``: it compares shapes itself."""
    places: dict = {}
    for state in all_units:
        for index, record in enumerate(state.params):
            places[id(record.param)] = places[record.original, "original"] = (state, index)
    indices: defaultdict[NumberedUnit, list[int]] = defaultdict(list)
    for param in params:
        place = places.get(id(param)) or places.get((original_number(param), "original"))
        if place is not None:
            indices[place[0]].append(place[1])
    if not indices:
        return Call(name)
    units = sorted(indices, key=lambda state: (state.number.kind, state.number.shapes, state.number.number))
    parts = [
        f"{state.number.kind} {state.number.number}"
        + (f" (parameters {indices[state]})" if len(indices[state]) < len(state.params) else "")
        for state in units
    ]
    shown = parts if len(parts) <= _NUM_SHOWN else [*parts[: _NUM_SHOWN - 1], "...", parts[-1]]
    ranks = set(itertools.chain.from_iterable(state.number.ranks for state in units))
    text = f"{_kind(model)} (unit{'s' * (len(parts) > 1)} {', '.join(shown)})"
    shapes = digest([state.number.shapes for state in units]) if names_shapes else b""
    return Call(name, text, tuple(sorted(ranks)), digest(parts), shapes)


@contextlib.contextmanager
def calling(call: Call) -> Iterator[None]:
    """What the block exchanges belongs to ``call``."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def named_call(name: str, *compared: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: what the function exchanges belongs to the call ``name`` on its argument ``model``.

    ``compared``: other arguments that decide what is exchanged.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        defaults = {key: parameter.default for key, parameter in signature.parameters.items()}

        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # Python's own sentence has the function's name
            told = [f"{key}={given[key]!r}" for key in compared if given.get(key, defaults[key]) != defaults[key]]
            call = call_of(f"{name}({', '.join(told)})" if told else name, given["model"], given["model"].parameters())
            with calling(call):
                return function(*args, **kwargs)

        return named

    return decorate


def current_call(what: str) -> Call:
    """The call that this thread is in; ``what`` it does otherwise."""
    return _current.get() or Call(what)


def require_same_call(calls: Mapping[int, Call]) -> None:
    """Checks what the ranks are in, by rank. Ranks of other parts of a pipeline may have other models.

    Raises:
        ValueError: two of them differ.
    """
    seen: dict[tuple, tuple[int, Call]] = {}
    first = next(iter(calls.items()))
    for rank, call in calls.items():
        other, known = seen.setdefault((call.ranks, call.shapes), (rank, call))
        if known.name == call.name == first[1].name and known.digest == call.digest:
            continue
        other, known = (other, known) if known != call else first
        raise ValueError(
            f"fsdp2x: the ranks are in different calls: rank {other} in {known}, rank {rank} in {call}. Make the same "
            "calls in the same order on every rank. Equal units are numbered in the order of fully_shard calls."
        )


# --- parameters of units ---

Facts = tuple[Any, ...]


@dataclass(frozen=True)
class UnitParams:
    """What of one unit, or of its part over one mesh, decides about the sizes of collectives."""

    name: str
    params: tuple[tuple[str, Facts], ...]  # (name, facts) in order


def facts_of_model(name: str) -> UnitParams:
    """Tells models of the same units apart. ``name``: class, and number in the order of ``fully_shard`` calls."""
    return UnitParams(f"model {name}", ())


def digest(facts: Sequence) -> bytes:
    """Equal for equal facts, such as ``UnitParams``."""
    return hashlib.sha256(repr(facts).encode()).digest()


def disagreement(of_rank: Mapping[int, Sequence[UnitParams]]) -> str:
    """The first difference between the units of the first rank and of another one; "" when there is none."""
    first = next(iter(of_rank))
    for rank, units in of_rank.items():
        for is_unit in (True, False):  # a unit that differs tells more than the number of the model
            sides = ([one for one in side if bool(one.params) is is_unit] for side in (of_rank[first], units))
            for here, there in zip_longest(*sides):
                if here != there:
                    return f"rank {first} has {_text(here, there)}, rank {rank} {_text(there, here)}"
    return ""


def _text(unit: UnitParams | None, beside: UnitParams | None) -> str:
    if unit is None:
        return "no more units"
    text = f"unit {unit.name!r}" if unit.params else unit.name
    for param, other in zip_longest(unit.params, beside.params if beside is not None else unit.params):
        if param is None:
            return f"{text} with {len(unit.params)} parameters"
        if param != other:
            return f"{text} with {param[0]!r} ({', '.join(str(fact) for fact in param[1])})"
    return text
