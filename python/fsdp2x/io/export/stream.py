"""``stream``: the whole tensors of a sharded model, a bucket at a time, unit after unit, the same on all ranks.

Plan first, then bytes: families of parameters (see ``hf.names``) are packed into buckets before anything is gathered,
so that ranks agree without talking, and each bucket is one gather into the ring of its process group. The gather of
the next bucket is started before a bucket is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.calls import Call, call_of, calling
from fsdp2x.io.export.plans import (
    BucketPlan,
    check_bucket_bytes,
    chosen_params,
    finish,
    make_rings,
    plan_buckets,
    ring_of,
)
from fsdp2x.io.names import TensorSpec
from fsdp2x.sharding.transport import check_transport

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
