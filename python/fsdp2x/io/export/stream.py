"""Yields full tensors of a sharded model, in buckets (``stream``) or each in separate memory (``full_tensors``).

It plans before it gathers: families of parameters (see ``io/names.py``) are packed into buckets in advance, so ranks
agree without communication. Each bucket is one gather into the ring of its process group. The gather of the next bucket
starts before a bucket is handed out.
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
from fsdp2x.base.failures import Call, call_of, calling, current_call, exchange, first_problem
from fsdp2x.base.processes import require_own_process
from fsdp2x.io.export.rings import Entry, Ring, make_ring, raise_changed
from fsdp2x.io.names import Family, TensorSpec, plain_families, source_families
from fsdp2x.lifecycle.tree import named_params
from fsdp2x.sharding.transport import check_transport

Choice = Callable[[str, torch.Tensor], bool]


@dataclass
class BucketPlan:
    """One bucket: its families, and which of their parameters are gathered together over ``group``.

    ``device`` is that of those parameters. ``versions`` are those of the entries at the start of the pass. Empty:
    versions are not compared.
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
        """Process groups over which parameters are redistributed one by one."""
        sharded = [entry.param for entry in self.alone if isinstance(entry.param, DTensor)]
        axes = [
            param.device_mesh.get_group(axis)
            for param in sharded
            for axis, placement in enumerate(param.placements)
            if placement != Replicate()
        ]
        return list({id(group): group for group in axes}.values())

    def begin(self) -> None:
        """Begins a pass. From here on the parameters must not change. Buffers may, so the pass has copies of them."""
        for entry in self.alone:
            if not isinstance(entry.param, nn.Parameter):
                entry.param = entry.param.clone()
        self.versions = [entry.version for entry in self.entries]

    @property
    def changed(self) -> str:
        """Returns the name of a parameter that changed since the pass began, or an empty string."""
        now = zip(self.entries, self.versions, strict=False)
        return next((entry.name for entry, version in now if entry.version != version), "")

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for family in self.families for spec in family.outputs)


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (FQN, parameter) in the order of ``named_parameters()``, ties once, then (FQN, persistent buffer)."""
    for name, param, _ in named_params(model):
        yield name, param
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer.detach()


def chosen_params(caller: str, model: nn.Module, params: Choice | None) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers that ``params`` selects by FQN, in the order of ``named_weights``."""
    chosen = {name: param for name, param in named_weights(model) if params is None or params(name, param)}
    meta = [name for name, param in chosen.items() if param.is_meta]
    if meta:
        raise RuntimeError(f"{caller}: parameters on the meta device have no values yet: {meta}. Load the model first.")
    return chosen


def plan_buckets(
    model: nn.Module,
    chosen: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype | None],
    names: str,
    bucket_bytes: int,
    arrange: Callable[[list[Family]], list[Family]] = list,
    unnamed: Collection[str] = (),
) -> list[BucketPlan]:
    """Returns the buckets of these parameters of ``model``. ``dtypes`` is by FQN. None or absent keeps the dtype.

    ``arrange`` makes other families of them, or another order. ``unnamed`` are FQNs that only ``arrange`` adds.
    """
    entries = {name: Entry.of(name, param, dtypes.get(name)) for name, param in chosen.items()}
    described = {name: (entry.param.shape, entry.dtype) for name, entry in entries.items() if name not in unnamed}
    families = source_families(model, described) if names == "hf" else plain_families(described)
    return pack(arrange(families), entries, bucket_bytes)


def pack(families: list[Family], entries: dict[str, Entry], bucket_bytes: int) -> list[BucketPlan]:
    plans: list[BucketPlan] = []
    filled_bytes = 0
    gathered = [any(entries[name].group is not None for name in family.params) for family in families]
    # Buffers after the last parameter have a separate bucket. Only buckets without them are handed out in their ring.
    end = max((index + 1 for index, is_gathered in enumerate(gathered) if is_gathered), default=0)
    for index, family in enumerate(families):
        members = [entries[name] for name in family.params]
        groups = {(id(e.group), e.device): e for e in members if e.group is not None}
        # DTensor itself gathers members over several groups one by one.
        first = next(iter(groups.values())) if len(groups) == 1 else None
        size_bytes = sum(entry.whole_bytes for entry in members)
        plan = plans[-1] if plans else None
        differs = (
            plan is not None
            and first is not None
            and plan.group is not None
            and (plan.group is not first.group or plan.device != first.device)
        )
        if plan is None or differs or index == end or filled_bytes + size_bytes > bucket_bytes:
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


def cast_params(chosen: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.dtype | None]:
    """Returns ``dtype`` for parameters. Buffers keep their own."""
    return {name: dtype if isinstance(param, nn.Parameter) else None for name, param in chosen.items()}


def check_bucket_bytes(caller: str, bucket_bytes: int) -> None:
    if bucket_bytes <= 0:
        raise ValueError(f"{caller}: bucket_bytes must be positive, got {bucket_bytes}")


def ring_of(rings: dict, plan: BucketPlan) -> Ring:
    return rings[id(plan.group), plan.device]


def make_rings(
    plans: list[BucketPlan], receive: bool, transport: str, keep_files: bool = False, in_order: bool = True
) -> dict:
    """Makes the rings of these buckets, for ``ring_of``. Collective. See ``make_ring`` for the flags."""
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
        except ValueError as error:  # of this group only; the ranks of the next group must learn of it
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
    """Returns the full tensors of a filled bucket in the order of ``plan.specs``, or None without ``receive``."""
    whole: dict[str, torch.Tensor] = {}
    changed = plan.changed
    for group in plan.alone_groups:
        changed = first_problem(changed, group, "export of weights")
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


# Two of these fit in the caches of a CPU and cost few page faults. Collectives of this size reach full bandwidth.
BUCKET_BYTES = 16 << 20


@dataclass(frozen=True)
class Bucket:
    """Full tensors of a part of the model. ``tensors`` is None on a rank with ``receive=False``.

    ``specs`` has their names, shapes, and dtypes, in the same order on all ranks. The tensors are valid until you take
    the next bucket, which reuses their memory. Clone what you keep.
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
        """Yields (name, full tensor). Yields nothing on a rank that does not receive."""
        return iter(() if self.tensors is None else zip(self.names, self.tensors, strict=True))


@checked
def stream(
    model: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Literal["hf", "model"] = "hf",
    params: Choice | None = None,
    *,
    receive: bool = True,
    transport: str = "auto",
) -> Iterator[Bucket]:
    """Yields the parameters as full tensors in buckets, in the order of ``named_parameters()``, tied ones once.

    Persistent buffers come after them, in their own dtype and with this rank's values at the first bucket.

    Use it between two steps to send weights elsewhere without holding the full model. Values are those of the sharded
    parameters. It needs memory for two buckets, and for what ``names="hf"`` un-fuses. Over a process group it also
    needs the small parameters of one bucket and those that are not cut along dim 0.

    Collective: every rank must run the iterator to its end or leave it after the same bucket, with the same arguments
    except ``receive``.

    Args:
        model: a module that ``fully_shard`` sharded, or a part of one. Unsharded ones work too.
        bucket_bytes: limit of a bucket in bytes of full tensors. One larger parameter, or parameters that must be
            converted together, may exceed it.
        dtype: dtype of floating-point parameters, converted before gathering. Default: unchanged.
        names: ``"hf"`` for names and layout of the model's original files (experts un-fused if they were) and of PEFT's
            adapter files. ``"model"`` for one tensor per parameter under its FQN.
        params: predicate over FQN and sharded parameter or buffer, with the same result on every rank. Default: all.
        receive: whether this rank gets tensors. With False it only takes part.
        transport: see ``fully_shard``.

    Yields:
        Buckets of names and full tensors, valid until the next one.

    Raises:
        ValueError: ``bucket_bytes`` is not positive, or ``names`` or ``transport`` is unknown or impossible. On every
            rank if a rank streams another model or other parameters, or is in another call.
        RuntimeError: a parameter is on the meta device. On every rank if a parameter changed between two buckets.
    """
    return stream_as("fsdp2x.export.stream", model, bucket_bytes, dtype, names, params, receive, transport)


def stream_as(caller, model, bucket_bytes, dtype, names, params, receive, transport) -> Iterator[Bucket]:
    """Runs ``stream`` with errors that start with ``caller``. ``dtype`` may be one dtype, or one for each FQN."""
    check_bucket_bytes(caller, bucket_bytes)
    transport = check_transport(transport)
    chosen = chosen_params(caller, model, params)
    dtypes = dtype if isinstance(dtype, Mapping) else cast_params(chosen, dtype)
    plans = plan_buckets(model, chosen, dtypes, names, bucket_bytes)
    return run_plans(plans, receive, transport, call_of(caller, model, chosen.values(), names_shapes=True))


def run_plans(plans: list[BucketPlan], receive: bool, transport: str, call: Call) -> Iterator[Bucket]:
    """Yields the buckets of ``plans``, gathered into rings of this pass. Collective."""
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
    params: Choice | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (FQN, full tensor) for every parameter, in the order of ``named_parameters()``, tied ones once.

    Persistent buffers come after them, in their own dtype and with this rank's values at the first item.

    Use it between two steps. Values are those of the sharded parameters in their original dtype, as in a full state
    dict, and each tensor has separate memory. Parameters that are not sharded are copied.

    Collective: every rank must run the iterator to its end, with the same arguments. It holds two buckets of
    ``bucket_bytes`` (or one larger parameter) at a time. Tensors that you keep are not included.

    Args:
        model: a module that ``fully_shard`` sharded, or a part of one.
        params: predicate over name and sharded parameter or buffer, such as ``lambda name, param: "lora_" in name``,
            with the same result on every rank. Default: all.
        dtype: dtype of floating-point parameters, converted before gathering, which also saves traffic. Default:
            unchanged.
        device: device of the tensors, such as ``"cpu"``. Default: that of the parameters.
        bucket_bytes: limit of a gather in bytes of full tensors.

    Yields:
        (FQN, full tensor).

    Raises:
        ValueError: ``bucket_bytes`` is not positive. On every rank if the ranks are in different calls or pass
            different models.
        RuntimeError: a parameter is on the meta device. On every rank if a parameter changed between two buckets.
    """
    buckets = stream_as("fsdp2x.full_tensors", model, bucket_bytes, dtype, "model", params, True, "auto")
    items = (item for bucket in buckets for item in bucket.items())
    return ((name, tensor.to(device or tensor.device, copy=True)) for name, tensor in items)
