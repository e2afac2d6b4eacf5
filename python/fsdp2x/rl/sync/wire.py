"""Plans what a push sends: dtypes of parameters, their buckets, and the layout that engines get once."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fsdp2x.api import ALIGN_BYTES, MergedModel, align_up, clean_name
from fsdp2x.io.export.stream import BucketPlan, cast_params, plan_buckets, ring_of
from fsdp2x.io.names import Family
from fsdp2x.rl.sync.targets.base import WireLayout


def plan_wire(
    caller: str,
    model: nn.Module,
    chosen: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    keep: Mapping[str, torch.dtype],
    names: str,
    bucket_bytes: int,
    arrange: Callable[[list[Family]], list[Family]] = list,
    merged: MergedModel | None = None,
) -> list[BucketPlan]:
    """Returns the buckets of a push. Patterns of ``keep`` match FQNs and names in the files.

    ``arrange`` makes another order of the families. ``merged`` is the model whose weights are sent.

    Raises:
        ValueError: a pattern matches nothing, or two of them give one parameter different dtypes.
    """
    dtypes = cast_params(chosen, dtype)
    layers = [] if merged is None else merged.layers.values()
    uncast = {fqn for layer in layers for fqn in layer.params.values()}  # they are cast when they are merged
    unnamed = () if merged is None else chosen

    def plan() -> list[BucketPlan]:
        gathered = {name: None if name in uncast else kind for name, kind in dtypes.items()}
        return plan_buckets(model, chosen, gathered, names, bucket_bytes, arranged, unnamed)

    def arranged(families: list[Family]) -> list[Family]:
        return arrange(families if merged is None else merged.families(chosen, dtypes))

    if keep:
        spellings = {name: {name, clean_name(name)} for name in chosen}
        for bucket in plan():
            for family in bucket.families:
                for name in family.params:
                    spellings[name] |= {spec.name for spec in family.outputs}
        dtypes.update(_kept(caller, keep, spellings))
    return plan()


def layer_of(name: str) -> tuple[str, int] | None:
    """Returns the text before the first number in ``name``, and the number. None if there is no number."""
    parts = name.split(".")
    return next(((".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdigit()), None)


def by_layers(families: list[Family]) -> list[Family]:
    """Sorts families: those before the first layer, layers in ascending order, stack by stack, and the others."""
    stacks: dict[str, int] = {}

    def place(family: Family) -> tuple[int, int, int]:
        layer = layer_of(family.outputs[0].name)
        if layer is None:
            return (2 if stacks else 0), 0, 0
        return 1, stacks.setdefault(layer[0], len(stacks)), layer[1]

    places = [place(family) for family in families]
    return [families[index] for index in sorted(range(len(families)), key=places.__getitem__)]


def _kept(caller: str, keep: Mapping[str, torch.dtype], spellings: Mapping[str, set[str]]) -> dict[str, torch.dtype]:
    kept: dict[str, tuple[str, torch.dtype]] = {}
    for pattern, dtype in keep.items():
        found = [name for name, known in spellings.items() if any(fnmatch.fnmatchcase(one, pattern) for one in known)]
        if not found:
            some = ", ".join(sorted(min(known) for known in list(spellings.values())[:3]))
            raise ValueError(f"{caller}: keep: no parameter matches {pattern!r}. Names look like {some}.")
        for name in found:
            before = kept.setdefault(name, (pattern, dtype))
            if before[1] != dtype:
                raise ValueError(
                    f"{caller}: keep: {name!r} is {before[1]} by {before[0]!r}, but {dtype} by {pattern!r}. Make the "
                    "patterns exclude each other."
                )
    return {name: dtype for name, (_, dtype) in kept.items()}


def layout_digest(plans: list[BucketPlan]) -> str:
    """Returns a digest that is equal if names, shapes, dtypes and buckets are."""
    text = repr([[(spec.name, tuple(spec.shape), str(spec.dtype)) for spec in plan.specs] for plan in plans])
    return hashlib.sha256(text.encode()).hexdigest()


def describe_wire(plans: list[BucketPlan], rings: dict, deltas: bool) -> WireLayout:
    """Returns the layout of ``plans``, whose rings are made with ``keep_files``."""
    files = tuple((ring.file, ring.num_bytes) for ring in rings.values() if ring.file is not None)
    # Deltas take at most half of their tensors' bytes, plus alignment.
    spare = [
        sum(align_up(spec.num_bytes) + ALIGN_BYTES for spec in plan.specs)
        for plan in plans
        if deltas or not lies_in_ring(plan, rings)
    ]
    return WireLayout(tuple(plan.specs for plan in plans), files, max(spare, default=0))


def lies_in_ring(plan: BucketPlan, rings: dict) -> bool:
    """Returns whether a bucket is handed out in the memory that the ranks wrote to, mappable by other processes."""
    if plan.alone or not plan.gathered or not all(family.is_renamed_only for family in plan.families):
        return False
    return ring_of(rings, plan).file is not None
