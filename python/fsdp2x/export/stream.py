"""``stream``: the whole tensors of a sharded model, a bucket at a time, unit after unit, the same on all ranks.

Plan first, then bytes: families of parameters (see ``hf.names``) are packed into buckets before anything is gathered,
so that ranks agree without talking, and each bucket is one gather into the ring of its process group. The gather of
the next bucket is started before a bucket is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.arguments import checked
from fsdp2x.export.entries import Entry
from fsdp2x.export.rings import GroupRing, SharedRing, make_ring
from fsdp2x.hf.names import Family, TensorSpec, plain_families, source_families
from fsdp2x.lookup import named_params
from fsdp2x.runtime.explain import explained
from fsdp2x.runtime.forks import require_own_process
from fsdp2x.runtime.transport import check_transport

# Two of these stay in the caches of a CPU and cost few page faults; collectives of this size reach full bandwidth.
BUCKET_BYTES = 16 << 20


@dataclass(frozen=True)
class Bucket:
    """Some whole tensors. ``tensors`` is None on a rank that does not receive; names, shapes and order are the same.

    The tensors are valid until the next bucket is taken: their memory is used again. Clone what must stay.
    """

    index: int
    specs: tuple[TensorSpec, ...]
    tensors: tuple[torch.Tensor, ...] | None

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor); nothing on a rank that does not receive."""
        return iter(() if self.tensors is None else zip(self.names, self.tensors, strict=True))


@checked
def stream(
    model: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Literal["hf", "model"] = "hf",
    params: Callable[[str, nn.Parameter], bool] | None = None,
    *,
    receive: bool = True,
    transport: str = "auto",
) -> Iterator[Bucket]:
    """Yields the parameters as whole tensors in buckets, in the order of ``named_parameters()``, ties once.

    The values are those of the sharded parameters, at any time between two steps. Ranks of one host share memory: each
    writes its rows to where all read them. Otherwise the process group gathers them: large parameters one by one and
    without copies, the small ones of a bucket together. Extra memory: two buckets (over a process group also the small
    parameters of one, and this rank's part of what is cast), and what names="hf" un-fuses.

    Collective: every rank must run the iterator to its end, with the same arguments but ``receive``.

    Args:
        model: a module that ``fully_shard`` was applied to, or a part of one; unsharded ones work too.
        bucket_bytes: limit of a bucket, in bytes of whole tensors; what must be converted together, or one larger
            parameter, exceeds it.
        dtype: floating-point parameters are converted to it before they are gathered.
        names: ``"hf"``: names and layout of the model's original files (experts un-fused where they were), names of
            PEFT's adapter files for adapter weights. ``"model"``: one tensor per parameter, under its FQN.
        params: which parameters, by FQN and sharded parameter; the same choice on every rank. Default all.
        receive: False: this rank takes part, but gets no tensors.
        transport: as for ``fully_shard``.

    Raises:
        ValueError: ``bucket_bytes`` is not positive, ``names`` or ``transport`` is unknown or not possible.
        RuntimeError: a parameter is on the meta device.
    """
    return stream_as("fsdp2x.export.stream", model, bucket_bytes, dtype, names, params, receive, transport)


def stream_as(caller, model, bucket_bytes, dtype, names, params, receive, transport) -> Iterator[Bucket]:
    """``stream`` whose errors start with ``caller``; ``dtype`` may be one dtype, or one for each FQN."""
    if bucket_bytes <= 0:
        raise ValueError(f"{caller}: bucket_bytes must be positive, got {bucket_bytes}")
    if names not in ("hf", "model"):
        raise ValueError(f'{caller}: names must be "hf" or "model", got {names!r}')
    transport = check_transport(transport)
    chosen = {name: p for name, p, _ in named_params(model) if params is None or params(name, p)}
    meta = [name for name, param in chosen.items() if param.is_meta]
    if meta:
        raise RuntimeError(f"{caller}: parameters on the meta device have no values yet: {meta}")
    dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(chosen, dtype)
    entries = {name: Entry.of(name, param, dtypes.get(name)) for name, param in chosen.items()}
    described = {name: (entry.param.shape, entry.dtype) for name, entry in entries.items()}
    families = source_families(model, described) if names == "hf" else plain_families(described)
    return _run(_pack(families, entries, bucket_bytes), receive, transport)


@dataclass
class _Plan:
    """One bucket: its families, and which of their parameters are gathered together over ``group``."""

    index: int
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None
    families: list[Family] = field(default_factory=list)
    gathered: list[Entry] = field(default_factory=list)
    alone: list[Entry] = field(default_factory=list)


def _pack(families: list[Family], entries: dict[str, Entry], bucket_bytes: int) -> list[_Plan]:
    plans: list[_Plan] = []
    filled_bytes = 0
    for family in families:
        members = [entries[name] for name in family.params]
        groups = {(id(e.group), e.device): e for e in members if e.group is not None}
        # Members over several groups are gathered one by one: each by DTensor itself.
        first = next(iter(groups.values())) if len(groups) == 1 else None
        size_bytes = sum(entry.whole_bytes for entry in members)
        plan = plans[-1] if plans else None
        differs = (
            plan is not None
            and first is not None
            and plan.group is not None
            and (plan.group is not first.group or plan.device != first.device)
        )
        if plan is None or differs or filled_bytes + size_bytes > bucket_bytes:
            plan = _Plan(len(plans))
            plans.append(plan)
            filled_bytes = 0
        plan.families.append(family)
        if first is not None:
            plan.group, plan.device = first.group, first.device
        for entry in members:
            (plan.gathered if first is not None and entry.group is not None else plan.alone).append(entry)
        filled_bytes += size_bytes
    return plans


def _run(plans: list[_Plan], receive: bool, transport: str) -> Iterator[Bucket]:
    rings = _make_rings(plans, receive, transport)
    for plan, following in zip(plans, [*plans, None][1:], strict=True):
        if plan.index == 0 and plan.gathered:
            _ring_of(rings, plan).fill(plan.gathered)
        tensors = _finish(plan, rings, receive)
        if following is not None and following.gathered:
            _ring_of(rings, following).fill(following.gathered)
        specs = tuple(spec for family in plan.families for spec in family.outputs)
        yield Bucket(plan.index, specs, tensors)
        del tensors


def _ring_of(rings: dict, plan: _Plan) -> GroupRing | SharedRing:
    return rings[id(plan.group), plan.device]


def _make_rings(plans: list[_Plan], receive: bool, transport: str) -> dict:
    require_own_process("export a sharded model")
    buckets: dict = {}
    for plan in plans:
        if plan.gathered:
            buckets.setdefault((id(plan.group), plan.device), []).append(plan)
    rings = {}
    for key, members in buckets.items():
        group = members[0].group
        receivers = [True] * dist.get_world_size(group)
        with explained(group, "meeting of the ranks for an export"):
            dist.all_gather_object(receivers, receive, group=group)
        gathered = [plan.gathered for plan in members]
        rings[key] = make_ring(group, gathered[0][0].wire_device, gathered, transport, receivers)
    return rings


@torch.no_grad()
def _finish(plan: _Plan, rings: dict, receive: bool) -> tuple[torch.Tensor, ...] | None:
    whole: dict[str, torch.Tensor] = {}
    if plan.gathered:
        gathered = _ring_of(rings, plan).finish(plan.gathered)
        if receive:
            whole.update(zip([entry.name for entry in plan.gathered], gathered, strict=True))
    for entry in plan.alone:
        tensor = entry.alone()
        if receive:
            whole[entry.name] = tensor
    if not receive:
        return None
    made: list[torch.Tensor] = []
    for family in plan.families:
        outputs = family.convert([whole[name] for name in family.params])
        made += outputs
    return tuple(made)
