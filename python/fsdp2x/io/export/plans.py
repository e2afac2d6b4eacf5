"""Which families of parameters share a bucket, the rings that the buckets are gathered into, and a gathered bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp2x.base.calls import current_call
from fsdp2x.base.failures import exchange
from fsdp2x.base.processes import require_own_process
from fsdp2x.io.export.entries import Entry
from fsdp2x.io.export.rings import GroupRing, SharedRing, make_ring, raise_changed
from fsdp2x.io.names import Family, TensorSpec, plain_families, source_families
from fsdp2x.lifecycle.tree import named_params

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
    """The parameters that ``params`` chooses, by FQN, in the order of ``named_parameters()``, ties once.

    Raises:
        RuntimeError: one of them is on the meta device.
    """
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
    """The rings of these buckets, for ``ring_of``. Collective. ``keep_files``, ``in_order``: as for ``make_ring``.

    Raises:
        ValueError: on every rank: the ranks are in different calls.
    """
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
    """The whole tensors of a bucket that was filled, in the order of ``plan.specs``; None without ``receive``.

    Raises:
        ValueError, RuntimeError: on every rank: see ``Meetings.require``.
    """
    whole: dict[str, torch.Tensor] = {}
    changed = plan.changed
    for group in plan.alone_groups:
        changed = next(filter(None, exchange(changed, group, "export of weights")), "")
    if plan.gathered:
        gathered = ring_of(rings, plan).finish(plan.gathered, changed)
        if receive:
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
