"""Whole tensors of a sharded model, a bucket at a time (``stream``) or each in its own memory (``full_tensors``).

Plan first, then bytes: families of parameters (see ``io/names.py``) are packed into buckets before anything is
gathered, so that ranks agree without communication. Each bucket is one gather into the ring of its process group. The
gather of the next bucket is started before a bucket is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import Call, call_of, calling, current_call, exchange
from fsdp2x.base.processes import require_own_process
from fsdp2x.io.export.rings import Entry, GroupRing, SharedRing, make_ring, raise_changed
from fsdp2x.io.names import Family, TensorSpec, plain_families, source_families
from fsdp2x.lifecycle.tree import named_params
from fsdp2x.sharding.transport import check_transport

Choice = Callable[[str, nn.Parameter], bool]


@dataclass
class BucketPlan:
    """One bucket: its families, and which of their parameters are gathered together over ``group``.

    ``device``: where those parameters are. ``versions``: of the entries, when the pass began; empty: not compared.
    """

    index: int
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None
    families: list[Family] = field(default_factory=list)
    gathered: list[Entry] = field(default_factory=list)
    alone: list[Entry] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (*self.gathered, *self.alone)

    @property
    def alone_groups(self) -> list[dist.ProcessGroup]:
        """The process groups over which parameters are redistributed one by one."""
        sharded = [entry.param for entry in self.alone if isinstance(entry.param, DTensor)]
        axes = [
            param.device_mesh.get_group(axis)
            for param in sharded
            for axis, placement in enumerate(param.placements)
            if placement != Replicate()
        ]
        return list({id(group): group for group in axes}.values())

    def begin(self) -> None:
        """A pass begins: from here on the parameters stay as they are."""
        self.versions = [entry.version for entry in self.entries]

    @property
    def changed(self) -> str:
        """A parameter that is not what it was when the pass began; empty: none."""
        now = zip(self.entries, self.versions, strict=False)
        return next((entry.name for entry, version in now if entry.version != version), "")

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for family in self.families for spec in family.outputs)


def chosen_params(caller: str, model: nn.Module, params: Choice | None) -> dict[str, nn.Parameter]:
    """The parameters that ``params`` chooses, by FQN, in the order of ``named_parameters()``, ties once."""
    chosen = {name: p for name, p, _ in named_params(model) if params is None or params(name, p)}
    meta = [name for name, param in chosen.items() if param.is_meta]
    if meta:
        raise RuntimeError(f"{caller}: parameters on the meta device have no values yet: {meta}")
    return chosen


def plan_buckets(
    model: nn.Module,
    chosen: Mapping[str, nn.Parameter],
    dtypes: Mapping[str, torch.dtype | None],
    names: str,
    bucket_bytes: int,
    arrange: Callable[[list[Family]], list[Family]] = list,
    unnamed: Collection[str] = (),
) -> list[BucketPlan]:
    """The buckets of these parameters of ``model``. ``dtypes``: by FQN; None or absent: as it is.

    ``arrange``: makes other families of them, or another order. ``unnamed``: FQNs that only ``arrange`` brings in.
    """
    entries = {name: Entry.of(name, param, dtypes.get(name)) for name, param in chosen.items()}
    described = {name: (entry.param.shape, entry.dtype) for name, entry in entries.items() if name not in unnamed}
    families = source_families(model, described) if names == "hf" else plain_families(described)
    return pack(arrange(families), entries, bucket_bytes)


def pack(families: list[Family], entries: dict[str, Entry], bucket_bytes: int) -> list[BucketPlan]:
    plans: list[BucketPlan] = []
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
            plan = BucketPlan(len(plans))
            plans.append(plan)
            filled_bytes = 0
        plan.families.append(family)
        if first is not None:
            plan.group, plan.device = first.group, first.device
        for entry in members:
            (plan.gathered if first is not None and entry.group is not None else plan.alone).append(entry)
        filled_bytes += size_bytes
    return plans


def check_bucket_bytes(caller: str, bucket_bytes: int) -> None:
    if bucket_bytes <= 0:
        raise ValueError(f"{caller}: bucket_bytes must be positive, got {bucket_bytes}")


def ring_of(rings: dict, plan: BucketPlan) -> GroupRing | SharedRing:
    return rings[id(plan.group), plan.device]


def make_rings(
    plans: list[BucketPlan], receive: bool, transport: str, keep_files: bool = False, in_order: bool = True
) -> dict:
    """The rings of these buckets, for ``ring_of``. Collective. ``keep_files``, ``in_order``: as for ``make_ring``."""
    require_own_process("export a sharded model")
    buckets: dict = {}
    for plan in plans:
        if plan.gathered:
            buckets.setdefault((id(plan.group), plan.device), []).append(plan)
    groups = [members[0].group for members in buckets.values()]
    groups += [group for plan in plans for group in plan.alone_groups]
    receivers: dict[int, list[bool]] = {}
    problem = ""
    for group in {id(group): group for group in groups}.values():
        try:
            told = exchange((receive, problem), group, "export of weights")
            receivers[id(group)] = [receives for receives, _ in told]
            problem = problem or next((text for _, text in told if text), "")
        except ValueError as error:  # of this group alone: those of the next one are to hear of it
            problem = problem or str(error)
    if problem:
        raise ValueError(problem)
    rings = {}
    for key, members in buckets.items():
        gathered = [plan.gathered for plan in members]
        group, device = members[0].group, gathered[0][0].wire_device
        rings[key] = make_ring(group, device, gathered, transport, receivers[key[0]], keep_files, in_order)
    return rings


@torch.no_grad()
def finish(plan: BucketPlan, rings: dict, receive: bool) -> tuple[torch.Tensor, ...] | None:
    """The whole tensors of a bucket that was filled, in the order of ``plan.specs``; None without ``receive``."""
    whole: dict[str, torch.Tensor] = {}
    changed = plan.changed
    for group in plan.alone_groups:
        changed = next(filter(None, exchange(changed, group, "export of weights")), "")
    if plan.gathered:
        gathered = ring_of(rings, plan).finish(plan.gathered, changed)
        if receive and gathered is not None:
            whole.update(zip([entry.name for entry in plan.gathered], gathered, strict=True))
    if changed:
        raise_changed(current_call("export of weights"), changed)
    for entry in plan.alone:
        tensor = entry.alone()
        if receive:
            whole[entry.name] = tensor
    if not receive:
        return None
    return tuple(
        tensor for family in plan.families for tensor in family.convert([whole[name] for name in family.params])
    )


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
        ValueError: ``bucket_bytes`` is not positive, ``names`` or ``transport`` is unknown or not possible; on every
            rank: a rank streams another model or other parameters, or is in another call.
        RuntimeError: a parameter is on the meta device; on every rank: a parameter changed between two buckets.
    """
    return stream_as("fsdp2x.export.stream", model, bucket_bytes, dtype, names, params, receive, transport)


def stream_as(caller, model, bucket_bytes, dtype, names, params, receive, transport) -> Iterator[Bucket]:
    """``stream`` whose errors start with ``caller``; ``dtype`` may be one dtype, or one for each FQN."""
    check_bucket_bytes(caller, bucket_bytes)
    transport = check_transport(transport)
    chosen = chosen_params(caller, model, params)
    dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(chosen, dtype)
    plans = plan_buckets(model, chosen, dtypes, names, bucket_bytes)
    return run_plans(plans, receive, transport, call_of(caller, model, chosen.values(), names_shapes=True))


def run_plans(plans: list[BucketPlan], receive: bool, transport: str, call: Call) -> Iterator[Bucket]:
    """The buckets of ``plans``, gathered into rings of this pass alone. Collective."""
    with calling(call):
        rings = make_rings(plans, receive, transport)
    for plan in plans:
        plan.begin()
    for plan, following in zip(plans, [*plans, None][1:], strict=True):
        if plan.index == 0 and plan.gathered:
            ring_of(rings, plan).fill(plan.gathered)
        with calling(call):
            tensors = finish(plan, rings, receive)
        if following is not None and following.gathered:
            ring_of(rings, following).fill(following.gathered)
        yield Bucket(plan.index, plan.specs, tensors)
        del tensors


@checked
def full_tensors(
    model: nn.Module,
    *,
    params: Callable[[str, nn.Parameter], bool] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (FQN, whole tensor) for every parameter, in the order of ``named_parameters()``, ties once.

    What is yielded is the value of the sharded parameter in its original dtype, as in a full state dict, in memory of
    its own; it works at any time between two steps and changes no unit. Parameters that are not sharded are copied.

    Collective: every rank must run the iterator to its end, with the same arguments. Two buckets of ``bucket_bytes`` of
    whole tensors (or of one larger parameter) are in memory at a time; what the caller keeps comes on top.

    Args:
        model: a module that ``fully_shard`` was applied to, or a part of one.
        params: which parameters, by name and sharded parameter, for instance
            ``lambda name, param: "lora_" in name``; the same choice on every rank. Default all.
        dtype: convert floating-point parameters before they are gathered, which also saves traffic.
        device: where the yielded tensors are, such as ``"cpu"``; default where the parameters are.
        bucket_bytes: limit of a gather, in bytes of whole tensors.

    Raises:
        ValueError: ``bucket_bytes`` is not positive; on every rank: the ranks are in different calls, or pass different
            models.
        RuntimeError: a parameter is on the meta device; on every rank: a parameter changed between two buckets.
    """
    buckets = stream_as("fsdp2x.full_tensors", model, bucket_bytes, dtype, "model", params, True, "auto")
    items = (item for bucket in buckets for item in bucket.items())
    return ((name, tensor.to(device or tensor.device, copy=True)) for name, tensor in items)
