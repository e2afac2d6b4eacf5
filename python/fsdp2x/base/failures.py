"""Exchanges objects between the ranks, compares the public calls they are in, and raises a rank's failure on all.

No rank may skip an exchange: each function is a collective of its group, by default of all ranks. Two models of one
shape look alike in all else that ranks compare. So their units have numbers, in the order of ``fully_shard`` calls.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.base.agreement import exchange_bytes, reported
from fsdp2x.base.arguments import with_memory
from fsdp2x.base.collectives import explained
from fsdp2x.base.errors import CheckpointError, ConfigError, CorruptFile, first_line, reworded  # noqa: F401
from fsdp2x.base.optimizer_hooks import original_number
from fsdp2x.base.processes import Process, name_ended, own_host, require_own_process

Group = dist.ProcessGroup | None

# --- public calls that ranks are in ---

P = ParamSpec("P")
T = TypeVar("T")
all_units: weakref.WeakSet[Any] = weakref.WeakSet()  # the ``ShardedUnit``s of this process
_num_units: defaultdict[tuple[int, UnitNumber], int] = defaultdict(int)
_NUM_SHOWN = 4


@dataclass(frozen=True)
class Call:
    """A public call. ``ranks`` each hold a part of ``model``. Both are empty for a model that is not sharded.

    ``shapes``: models of other shapes are not compared here, because a later exchange names the parameter.
    """

    name: str
    model: str = ""
    ranks: tuple[int, ...] = ()
    digest: bytes = b""  # of the units and parameters
    shapes: bytes = b""

    def __str__(self) -> str:
        return f"{self.name} of {self.model}" if self.model else self.name


# Dies with its block, also if an interrupt keeps the block from ending it. So callers get copies.
_current: ContextVar[weakref.ref[Call] | None] = ContextVar("fsdp2x_call", default=None)


@dataclass(frozen=True)
class UnitNumber:
    """``number`` counts units of this kind and these shapes over these ranks, in the order of their making."""

    ranks: tuple[int, ...] = ()
    kind: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    number: int = 0


def number_unit(state: Any, ranks: Iterable[int]) -> UnitNumber:
    """Returns the number of a new unit, by which later calls identify it."""
    kind = ", ".join(_kind(module) for module in state.modules)
    like = UnitNumber(tuple(sorted(ranks)), kind, tuple(tuple(record.param.shape) for record in state.params))
    # Ranks may be threads of one process, as in torch's tests.
    key = (dist.get_rank() if dist.is_initialized() else 0, like)
    _num_units[key] += 1
    all_units.add(state)
    return replace(like, number=_num_units[key] - 1)


def has_sharded() -> bool:
    """Returns whether this process has sharded anything."""
    return bool(_num_units)


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def call_of(name: str, model: nn.Module, params: Iterable[torch.Tensor], *, names_shapes: bool = False) -> Call:
    """Returns the call ``name`` on ``params`` of ``model``. ``names_shapes``: it compares shapes itself."""
    places: dict = {}
    for state in all_units:
        for index, record in enumerate(state.params):
            places[id(record.param)] = places[record.original, "original"] = (state, index)
    indices: defaultdict[Any, list[int]] = defaultdict(list)
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


def digest(facts: Sequence) -> bytes:
    """Returns bytes that are equal for equal facts, such as ``UnitParams``."""
    return hashlib.sha256(repr(facts).encode()).digest()


@contextlib.contextmanager
def calling(call: Call) -> Iterator[None]:
    """Assigns the exchanges of the block to ``call``. If it is interrupted, peers that wait for it raise."""
    inside, before = replace(call), _current.get()
    try:
        _current.set(weakref.ref(inside))
        with reported(str(call), KeyboardInterrupt):
            yield
    finally:
        _current.set(before)


def named_call(name: str, *compared: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator that assigns the function's exchanges to the call ``name`` on its argument ``model``.

    ``compared`` are other arguments that decide what is exchanged.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        defaults = {key: parameter.default for key, parameter in signature.parameters.items()}

        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # raises Python's own error, which has the function's name
            told = [f"{key}={given[key]!r}" for key in compared if given.get(key, defaults[key]) != defaults[key]]
            call = call_of(f"{name}({', '.join(told)})" if told else name, given["model"], given["model"].parameters())
            with calling(call), with_memory():
                return function(*args, **kwargs)

        return named

    return decorate


def current_call(what: str) -> Call:
    """Returns the call that this thread is in, or else ``what``."""
    known = _current.get()
    inside = None if known is None else known()
    return Call(what) if inside is None else replace(inside)


def require_same_call(calls: Mapping[int, Call]) -> None:
    """Checks the calls of the ranks. Ranks of other parts of a pipeline may have other models.

    Raises:
        ValueError: two calls differ.
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


# --- exchanges ---


def rank_and_size(group: Group = None) -> tuple[int, int]:
    """Returns the place in the group. A process without a group is rank 0 of 1."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def exchange(mine: T, group: Group = None, what: str = "synchronization of the ranks") -> list[T]:
    """Returns the objects of all ranks, in rank order.

    Errors name the public call that this rank is in, or ``what`` outside of any.

    Raises:
        ValueError, Diverged: on every rank, if the ranks are in different calls.
    """
    if rank_and_size(group)[1] == 1:
        return [mine]
    require_own_process("agree with the other ranks")
    call, members = current_call(what), group or dist.group.WORLD
    assert members is not None, "the default group is made"
    with explained(group, str(call)):
        everyone = [pickle.loads(said) for said in exchange_bytes(members, str(call), pickle.dumps((call, mine)))]
    ranks = dist.get_process_group_ranks(group)
    require_same_call({rank: call for rank, (call, _) in zip(ranks, everyone, strict=True)})
    return [theirs for _, theirs in everyone]


def run_on_all_ranks(
    work: Callable[[], T], *, what: str = "", raising: type[Exception] = CheckpointError, group: Group = None
) -> T:
    """Runs ``work`` on every rank and returns its result. If it fails anywhere, every rank raises the same ``raising``.

    ``work`` itself must not contain a collective: a rank that fails early would leave the others waiting in it. An
    error that is neither ``raising`` nor from the file system is our mistake and stays attached as the cause.
    """
    mine: list[T] = []
    gather_all(lambda: mine.append(work()), what=what, raising=raising, group=group)
    return mine[0]


def gather_all(
    work: Callable[[], T], *, what: str = "", raising: type[Exception] = CheckpointError, group: Group = None
) -> list[T]:
    """Runs ``work`` on every rank and returns all results in rank order. Fails as ``run_on_all_ranks`` does."""
    result, error = _attempt(work)
    found = exchange((None if error is None else sentence(error, raising), result), group)
    if failures := {rank: text for rank, (text, _) in enumerate(found) if text is not None}:
        expected = error is None or isinstance(error, raising | OSError)
        raise raising(join_failures(failures, len(found), what)) from (None if expected else error)
    return [value for _, value in found]  # type: ignore[return-value]


def on_rank_0(work: Callable[[], T], *, what: str = "", group: Group = None) -> T:
    """Runs ``work`` on rank 0 and returns its result on every rank. Fails as ``run_on_all_ranks`` does."""
    rank, _ = rank_and_size(group)
    return gather_all(lambda: work() if rank == 0 else None, what=what, group=group)[0]  # type: ignore[return-value]


def gather_on_rank_0(work: Callable[[], T], *, what: str = "", group: Group = None) -> list[T]:
    """Runs ``work`` on every rank. Rank 0 gets all results in rank order, the others an empty list."""
    everyone = gather_all(work, what=what, group=group)
    return everyone if rank_and_size(group)[0] == 0 else []


def first_problem(problem: str, group: Group, what: str) -> str:
    """Returns the problem of the first rank that has one, the same on each. Empty if no rank has one."""
    return next(filter(None, exchange(problem, group, what)), "")


def odd_rank(values: Sequence[Any]) -> int | None:
    """Returns the first rank whose value is not that of rank 0, or None."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def problems_of_all(problem: str | None, group: Group = None, what: str = "synchronization of the ranks") -> str:
    """Returns the problems of all ranks in one sentence, the same on each. Empty if no rank has one."""
    said = exchange(problem, group, what)
    ranks = [0] if len(said) == 1 else dist.get_process_group_ranks(group)
    return "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, said, strict=True) if text is not None)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def join_failures(failures: Mapping[int, str], num_ranks: int, what: str) -> str:
    """Joins the messages of the ranks. A sentence that several ranks share appears once."""
    by_text: dict[str, list[str]] = {}
    for rank, text in sorted(failures.items()):
        by_text.setdefault(text, []).append(str(rank))
    if len(by_text) == 1 and len(failures) == num_ranks:
        joined = next(iter(by_text))
    else:
        joined = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in by_text.items())
    subject, _, rest = joined.partition(": ")
    joined = rest if rest and what.endswith(f" {subject}") else joined  # the same path twice
    return f"{what}: {joined}" if what else joined


def sentence(error: BaseException, known: type[Exception] = CheckpointError) -> str:
    """Returns the text of an error: alone if fsdp2x wrote it, else with its type or file."""
    if isinstance(error, known | CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


class LostRanks:
    """Knows every rank's process, and turns the failure of a collective into an error that names the ranks that ended.

    Building one is a collective. It looks at the processes of this host only and never reports ranks elsewhere.
    """

    def __init__(self) -> None:
        self.processes = exchange(Process.own())

    @property
    def local_pids(self) -> list[int]:
        """Process ids of this host's ranks."""
        here = own_host()
        return [process.pid for process in self.processes if process.host == here]

    @contextlib.contextmanager
    def named(self, during: str) -> Iterator[None]:
        """Replaces errors of the block by one that names the lost ranks, if there are any.

        A ``CheckpointError`` passes: all ranks agreed on it, so none is lost.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            lost = name_ended(dict(enumerate(self.processes))) if isinstance(error, RuntimeError) else ""
            if not lost:
                raise
            raise RuntimeError(f"{during}: lost {lost}, which ended while the others waited for it") from error
