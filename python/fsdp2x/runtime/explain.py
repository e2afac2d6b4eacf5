"""Says what an exception has to do with sharding: notes added to what a forward raised, ranks and units named where a
collective failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from fsdp2x.runtime.processes import introduced, name_ended, own_host

if TYPE_CHECKING:
    from fsdp2x.runtime.state import UnitState


class Diverged(RuntimeError):
    """The ranks of a process group were about to post different collectives, or one of them has left. All raise it."""


@contextlib.contextmanager
def explained(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """A collective of the block over ``group`` that fails is told as by ``explain_collective``."""
    try:
        yield
    except Exception as error:
        told = explain_collective(group, error, what)
        if told is error:
            raise
        raise told  # noqa: B904 (it has its cause)


def explain_collective(group: dist.ProcessGroup | None, error: BaseException, what: str) -> BaseException:
    """The exception to raise in place of ``error``, which a collective of ``group`` raised on this rank.

    ``what``: the operation, and its unit where it has one. Errors that are not the backend's get a note and stay
    themselves. Ranks are those of the default group.
    """
    if isinstance(error, Diverged):
        return error
    where = f"{_place_in(group)} was in the {what}"
    if not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError):
        error.add_note(f"fsdp2x: {where}")
        return error
    known = introduced()
    if ended := name_ended(known):
        said = f"{ended} ended meanwhile: its own output says why; restart all ranks"
    else:
        here = own_host()
        said = "no rank of this host has ended"
        if len(known) < dist.get_world_size():
            said = f"none of the {len(known)} ranks that this one has met has ended"
        if any(process.host != here for process in known.values()):
            said += ", one of another host may have"
        said += "; where none has, one hangs, has raised and lives, or runs other modules: look at the stacks of all"
    explained = RuntimeError(f"process group: {where}, when it failed: {said} (the backend says: {error})")
    explained.__cause__ = error
    return explained


def _place_in(group: dist.ProcessGroup | None) -> str:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == dist.get_world_size():
        return f"rank {rank} of {world}"
    return f"rank {dist.get_rank()}, which is {rank} of the {world} of its group,"


def explain_error(error: BaseException, root: UnitState) -> None:
    """Adds a note when ``error`` came of a sharded weight that was used outside of its unit's forward."""
    if not isinstance(error, RuntimeError) or "DTensor" not in str(error):
        return
    owners = {id(param.param): (param.fqn, state) for state in root.tree for param in state.params}
    found = _sharded_in(error.__traceback__, owners)
    if not found:
        return
    names = " or ".join(f"{name!r} of unit '{state.name}'" for name, state in found[:4])
    error.add_note(
        f"fsdp2x: {names} is sharded at this point (rank {root.ranks.rank}): it is whole only inside the forward of "
        "its unit's module. Call that module, call unshard() on it first, use "
        "fsdp2x.register_fsdp_forward_method for another method than forward, or put both modules into one unit with "
        "fully_shard([first, second])."
    )


def _sharded_in(traceback: TracebackType | None, owners: dict) -> list:
    """Names and units of the sharded parameters in the innermost frame that holds any, or whose code spells any."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        held = []
        for value in frame.f_locals.values():
            if isinstance(value, nn.Parameter):
                held.append(value)
            elif isinstance(value, nn.Module):
                held += [param for param in value._parameters.values() if param is not None]
        found = [owners[id(param)] for param in held if id(param) in owners]
        if not found and any(isinstance(value, nn.Module) for value in frame.f_locals.values()):
            spelled = set(frame.f_code.co_names)
            found = [owner for owner in owners.values() if _attributes(owner[0]) <= spelled]
        if found:
            return list(dict.fromkeys(found))
    return []


def _attributes(fqn: str) -> set[str]:
    return {part for part in fqn.split(".") if not part.isdigit()}
