"""Plans what belongs to a checkpoint and which rank writes each chunk. Ranks agree once per layout.

`tree` holds model and optimizer as nested dicts. `flat` has the same leaves by dotted name, as DCP names them. Small
parts (schedule, scaler, data position, extra) are separate Python values, read back with `weights_only=True`.

torch's planner decides which chunk of a tensor a rank holds and which replica writes it. So meshes of any shape are cut
as FSDP2 cuts them. The plan depends only on names, shapes and layouts, and is reused by the next save of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from fsdp2x.base.failures import CheckpointError, gather_on_rank_0, on_rank_0, rank_and_size, reworded
from fsdp2x.base.optimizer_hooks import why_swapped
from fsdp2x.io.checkpoint.manifest import model_layout
from fsdp2x.io.checkpoint.optimizer import Optimizers, layout_of, named_state
from fsdp2x.io.checkpoint.rng import device_of, rng_state
from fsdp2x.io.checkpoint.trees import check_loadable, flatten
from fsdp2x.io.formats.dcp import KeyPath
from fsdp2x.sharding.spec import lines_of, strided_axes

PARTS = ("scheduler", "scaler", "data", "extra")
OWN = "ranks"  # in a per-rank checkpoint, entries of one rank have the path (OWN, rank, ...)


@dataclass
class State:
    """State of this rank. `signature` is equal if names, shapes, dtypes and layouts of the tensors are equal.

    `plain` has the layouts of plain tensors that an optimizer keeps for DTensors.
    """

    flat: dict[str, Any]
    paths: dict[str, KeyPath]
    aliases: dict[str, str]
    small: dict[str, Any]
    rng: dict[str, Any]
    signature: tuple
    layouts: dict[str, str]
    plain: dict[str, str]


def collect(
    model: torch.nn.Module, optimizers: Optimizers, small: Mapping[str, Any], trusted: bool, keeps_own: bool = False
) -> State:
    """Collects everything of this rank. Not collective. Raises `CheckpointError` for what could not be loaded.

    With `keeps_own`, everything but shards gets a name of this rank.
    """
    if why := why_swapped(model.parameters()):
        raise CheckpointError(why)
    tensors, aliases = model_layout(model)
    tree: dict[str, Any] = {"model": tensors}
    plain: dict[KeyPath, str] = {}
    if optimizers:
        tree["optimizer"], plain = named_state(model, optimizers)
    flat, paths = flatten(tree)
    layouts = {name: layout for name, value in flat.items() if (layout := layout_of(value)) is not None}
    plain_layouts = {name: plain[path[1:]] for name, path in paths.items() if path[1:] in plain}
    layouts.update(plain_layouts)
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise CheckpointError(f"{name} is on the meta device and has no values. Load the model first.")
    # Copied, because the next step changes lists in some state dicts while a thread may still write them.
    states = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in small.items()}
    parts = {name: copy.deepcopy(state) for name, state in states.items() if small[name] is not None}
    if not trusted:
        check_loadable({**{n: v for n, v in flat.items() if not isinstance(v, torch.Tensor)}, **parts})
    signature = (
        keeps_own,
        *(
            (name, value.dtype, value.shape, layouts.get(name)) if isinstance(value, torch.Tensor) else (name,)
            for name, value in flat.items()
        ),
    )
    if keeps_own:
        own = (OWN, str(rank_and_size()[0]))
        named = {name: () if isinstance(value, DTensor) else own for name, value in flat.items()}
        paths = {".".join((*named[name], name)): (*named[name], *path) for name, path in paths.items()}
        flat = {".".join((*named[name], name)): value for name, value in flat.items()}
    return State(flat, paths, aliases, parts, rng_state(device_of(model)), signature, layouts, plain_layouts)


@dataclass(frozen=True)
class Chunk:
    """A block of the full tensor `name`: the part that one rank holds."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass
class Plan:
    """The chunks and entries that each rank writes.

    Attributes:
        mine: chunks that this rank writes. Each chunk is written once.
        objects: entries that are not tensors, likewise.
        metadata, paths: those of all ranks, on rank 0 only.
    """

    signature: tuple
    mine: list[Chunk]
    objects: list[str]
    metadata: Metadata | None = None
    paths: Mapping[str, tuple] | None = None

    def of_all_ranks(self) -> tuple[Metadata, dict[str, KeyPath]]:
        """Returns metadata and paths, on rank 0."""
        assert self.metadata is not None and self.paths is not None, "only rank 0 has them"
        return self.metadata, dict(self.paths)


def local_plan(flat: Mapping[str, Any]) -> SavePlan:
    """Returns the plan of this rank. Raises `CheckpointError` for a tensor of which it holds more than one block."""
    for name, tensor in flat.items():
        if isinstance(tensor, DTensor) and strided_axes(tensor)[0] and not _is_block(lines_of(tensor)):
            raise CheckpointError(
                f"{name} has placements {tensor.placements}, which give a rank lines of several blocks of a fused "
                "matrix. A checkpoint cannot describe them. Save full tensors, for example with fsdp2x.save_hf."
            )
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(flat), is_coordinator=True)
    return planner.create_local_plan()


def _is_block(lines: list[torch.Tensor]) -> bool:
    return all(bool((one.diff() == 1).all()) for one in lines)


def chunks_of(flat: Mapping[str, Any]) -> list[Chunk]:
    """Returns the chunks of the tensors in `flat` that this rank holds."""
    return _chunks(local_plan(flat).items)


def make_plan(flat: Mapping[str, Any], paths: Mapping[str, KeyPath], signature: tuple = ()) -> Plan:
    """Makes the plan with all ranks. Collective. Raises `CheckpointError` if chunks overlap or leave gaps."""
    local: list[SavePlan] = []

    def describe() -> tuple[SavePlan, Mapping[str, tuple]]:
        local.append(local_plan(flat))
        return local[0], paths

    everything = gather_on_rank_0(describe)
    metadata: list[Metadata] = []

    def assign() -> list[list[tuple]]:
        plans, described = _global_plan([plan for plan, _ in everything])
        metadata.append(described)
        whole = _first_holders([plan for plan, _ in everything])
        dealt = [[_key(item) for item in plan.items if item.type == WriteItemType.SHARD] for plan in plans]
        return [[*keys, *(key for key, owner in whole.items() if owner == rank)] for rank, keys in enumerate(dealt)]

    assigned = on_rank_0(assign)
    rank, _ = rank_and_size()
    wanted = set(assigned[rank])
    mine = [item for item in local[0].items if _key(item) in wanted]
    objects = [item.index.fqn for item in mine if item.type == WriteItemType.BYTE_IO]
    plan = Plan(signature, _chunks(mine), objects)
    if rank == 0:
        plan.metadata = metadata[0]
        plan.paths = {name: path for _, some in reversed(everything) for name, path in some.items()}
    return plan


def plan_alone(entries: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> Plan:
    """Makes the plan of a process that writes everything alone. Not collective."""
    local = local_plan(entries)
    objects = [item.index.fqn for item in local.items if item.type == WriteItemType.BYTE_IO]
    return Plan((), _chunks(local.items), objects, _global_plan([local])[1], paths)


def _global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    with reworded(CheckpointError, "the ranks do not hold each tensor exactly once", ValueError):
        return planner.create_global_plan(plans)


def _first_holders(plans: Sequence[SavePlan]) -> dict[tuple, int]:
    """Returns the rank that writes each entry that is not a shard: the first one that has it.

    Buffers may differ by rank, such as batch statistics. torch would take each from another rank to balance bytes.
    """
    found: dict[tuple, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type != WriteItemType.SHARD:
                found.setdefault(_key(item), rank)
    return found


def _chunks(items: Sequence[WriteItem]) -> list[Chunk]:
    return [_chunk(item) for item in items if item.type != WriteItemType.BYTE_IO]


def local_data(flat: Mapping[str, Any], chunk: Chunk) -> torch.Tensor:
    """Returns the memory of a chunk on this rank. Raises `CheckpointError` for a tensor that is more than its bytes."""
    tensor = flat[chunk.name]
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach()
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
        raise CheckpointError(
            f"{chunk.name} is a {type(local).__name__} of layout {local.layout}, which this form of checkpoint cannot "
            "hold. Save the result of `get_model_state_dict` with torch.distributed.checkpoint."
        )
    if tuple(local.shape) != chunk.sizes:
        raise CheckpointError(
            f"{chunk.name}: its placements give this rank {chunk.sizes}, but it holds {tuple(local.shape)}. "
            "A checkpoint cannot describe this sharding."
        )
    return local


def _chunk(item: WriteItem) -> Chunk:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is a tensor"
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return Chunk(item.index.fqn, data.properties.dtype, tuple(data.size), offsets, sizes)


def _key(item: WriteItem) -> tuple:
    offset = item.index.offset
    return (item.index.fqn, None if offset is None else tuple(offset))
