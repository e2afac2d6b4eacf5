"""Says what an exception in a sharded model's forward has to do with sharding: notes added to the exception itself."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fsdp2x.runtime.state import UnitState


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
