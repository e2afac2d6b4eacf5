"""Parameters whose rows do not divide over the ranks: what their padding costs, and the dim that needs none.

Each rank keeps room for the most rows that any rank has, so 128 experts over 512 ranks take four times their bytes, at
rest and in every gather and reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2x.sharding.extensions import is_wrapper
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.shapes import ParamFacts

# Less padding than this, or a smaller part of the whole, is not worth a word.
_WORTH_BYTES = 2**20
_WORTH_FACTOR = 1.5
# From here on a model that is split without a placement of the user's is cut along another dim.
_AVOIDED_FACTOR = 2.0


@dataclass(frozen=True)
class Padding:
    """One parameter, cut along ``dim`` over ``world`` ranks, takes ``factor`` times its bytes."""

    name: str
    shape: tuple[int, ...]
    dim: int
    world: int
    factor: float
    wasted_bytes: int  # on all ranks together
    even_dim: int | None  # a dim that the ranks divide


def padding_of(name: str, facts: ParamFacts, world: int) -> Padding | None:
    """What padding costs; None where it costs next to nothing."""
    outer, rows, inner = facts.view
    padded_rows = -(-rows // world) * world
    wasted_bytes = outer * (padded_rows - rows) * inner * facts.dtype.itemsize
    if wasted_bytes < _WORTH_BYTES or padded_rows < _WORTH_FACTOR * rows:
        return None
    even = next((dim for dim, size in enumerate(facts.size) if size and size % world == 0), None)
    return Padding(name, tuple(facts.size), facts.shard_dim, world, padded_rows / rows, wasted_bytes, even)


def padding_in(groups: Iterable[ShardedParamGroup], model: nn.Module) -> list[Padding]:
    """Of the groups of a sharded model."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        one
        for group in groups
        for param in group.params
        if (one := padding_of(names.get(id(param.param), param.fqn), param.facts, group.ranks.world))
    ]


def even_placement(param: nn.Parameter, world: int) -> Shard | None:
    """``Shard`` of a dim that the ranks divide, where rows would at least double the bytes; None: the rows."""
    if param.dim() < 2 or isinstance(param, DTensor) or is_wrapper(param):
        return None
    found = padding_of("", ParamFacts("", tuple(param.shape), 0, param.dtype), world)
    if found is None or found.factor < _AVOIDED_FACTOR or found.even_dim is None:
        return None
    return Shard(found.even_dim)


def advice(found: Sequence[Padding]) -> list[str]:
    """A sentence for each kind of parameter: the same last names and shapes in several blocks count as one."""
    kinds: dict[tuple, list[Padding]] = {}
    for one in found:
        kinds.setdefault((one.name.rpartition(".")[2], one.shape, one.dim, one.world), []).append(one)
    return [_sentence(kind) for kind in kinds.values()]


def _sentence(kind: list[Padding]) -> str:
    first = kind[0]
    names = first.name if len(kind) == 1 else f"{first.name} and {len(kind) - 1} like it"
    ways = []
    if len(first.shape) == 3:
        ways.append("spread experts with parallel.expert_parallel (fsdp2x.moe.expert_parallel)")
    if first.even_dim is not None:
        ways.append(f"shard_placement_fn=lambda param: Shard({first.even_dim}) for them")
    ways.append("shard over fewer ranks with replicas (HSDP)")
    return (
        f"padding: {names} {first.shape}: {first.shape[first.dim]} rows over {first.world} ranks take "
        f"{first.factor:.1f} times their bytes; {', or '.join(ways)}"
    )
