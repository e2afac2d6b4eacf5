"""``full_tensors``: the whole parameters of a sharded model under their own names, each in memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.io.export.stream import BUCKET_BYTES, stream_as


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
    return _copies(buckets, device)


def _copies(buckets, device: torch.device | str | None) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in buckets:
        for name, tensor in bucket.items():
            yield name, tensor.to(device or tensor.device, copy=True)
