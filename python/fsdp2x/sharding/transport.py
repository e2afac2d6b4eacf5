"""How the ranks of a group hand each other bytes: the kinds of transports, and the one on an accelerator's streams."""

from __future__ import annotations

import enum
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x.base import torch_private
from fsdp2x.base.native import _C


class TransportKind(enum.StrEnum):
    """How the ranks of a group hand each other bytes, as the engine names it, and what follows from that."""

    LOCAL = "local"  # a rank alone on a CPU
    SHM = "shm"  # ranks of one host, which read each other's memory
    PROCESS_GROUP = "process_group"  # collectives of the CPU, which this thread waits for
    DEVICE = "device"  # collectives of a process group on the streams of an accelerator

    @property
    def is_collective(self) -> bool:
        """All ranks come to everything in one order, train the same parameters, and send what others are to have."""
        return self in (TransportKind.PROCESS_GROUP, TransportKind.DEVICE)

    @property
    def shares_memory(self) -> bool:
        """Slots are one copy for all ranks, in which shards may rest, and units are reduced in any order."""
        return self is TransportKind.SHM


# What may be asked for.
TRANSPORTS = ("auto", TransportKind.SHM, TransportKind.PROCESS_GROUP)


def check_transport(name: str) -> str:
    """``name``, or what FSDP2X_TRANSPORT says in place of "auto", for scripts that cannot pass the argument."""
    if name == "auto":
        name = os.environ.get("FSDP2X_TRANSPORT", "auto")
    if name not in TRANSPORTS:
        raise ValueError(f"fully_shard: transport must be one of {', '.join(TRANSPORTS)}, got {name!r}")
    return name


def layer_maker(device: torch.device) -> Callable[[], Any] | None:
    """Makes the streams and events of ``device`` as the engine wants them; None on the CPU, which has none."""
    if device.type == "cpu":
        return None
    if device.type == "cuda" and torch.version.hip is None:
        _warn_without_kernels()
    return functools.partial(_C.TorchLayer, device)


@functools.cache
def _warn_without_kernels() -> None:
    """Once, at the first CUDA device: a build that found no nvcc works, so nobody would look for the reason."""
    if not _C.has_device_kernels():
        warnings.warn(
            "fsdp2x was built without nvcc: on a GPU torch's operations run in place of its kernels, which costs a "
            "launch or more for each parameter, and wire formats are refused. Build it again where nvcc is, or with "
            "`make build CUDA=wheels`, which takes nvcc from packages. `fsdp2x doctor` says what would be used.",
            stacklevel=2,
        )


def has_streams(device: torch.device) -> bool:
    """Whether collectives run beside the compute on streams, and gather in place."""
    return layer_maker(device) is not None


def device_transport(layer, group: dist.ProcessGroup | None, comm_memory: str | None):
    """The engine's transport over ``group`` on the streams of ``layer``; ``comm_memory``: where its slots come from."""
    _warn_of_one_queue(layer.device)
    world = 1 if group is None else dist.get_world_size(group)
    pack_below = pack_below_bytes(torch_private.gathers_of(group, layer.device), world)
    return _C.DeviceTransport(
        all_gather=functools.partial(_all_gather_now, group),
        all_gather_group=None if pack_below is None or group is None else functools.partial(_all_gather_group, group),
        reduce_scatter=device_reduction(group),
        all_to_all=functools.partial(_all_to_all_now, group),
        allocate=None if group is None else torch_private.comm_allocator(comm_memory, group, layer.device),
        layer=layer,
        pack_below_bytes=pack_below or 0,
    )


def _warn_of_one_queue(device: torch.device) -> None:
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "fsdp2x: CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams one queue of the device, in which gathers and "
            "reductions wait for the compute that was enqueued before them: nothing overlaps. Tensor parallelism of "
            "Megatron asks for it, fully sharded training does not: unset it.",
            stacklevel=2,
        )


def device_reduction(group: dist.ProcessGroup | None) -> Callable[..., bool]:
    """A reduce-scatter in stream order, of (output, source, average).

    What is divided by another number than the ranks' is summed first: NCCL's premultiplied sum costs no pass, but takes
    the factor of bf16 for zero before torch 2.15, and a pass over reduced rows is short.
    """
    return functools.partial(_reduce_scatter_now, group)


# Where every gather is a launch of its own, each pays the latency of all steps around a ring, about 4 us a rank. Device
# memory copies 7 MiB in that time: what is smaller is not worth a gather of its own. Estimated from NCCL's published
# latencies, not measured on several GPUs.
_ALONE_BYTES = 64 * 2**20
_ALONE_BYTES_OF_A_RANK = 8 * 2**20


def pack_below_bytes(gathers: str, world: int) -> int | None:
    """Parameters of fewer bytes are gathered together, in one packed collective; None: all are.

    ``gathers``: how the backend runs many gathers, as ``torch_private.gathers_of`` says. Of parameters that are large
    enough the engine gathers few alone, and none where they are many (csrc/core/gather_plan.hpp).
    """
    if gathers == "grouped":
        return _C.PACK_BELOW_BYTES
    return max(_ALONE_BYTES, world * _ALONE_BYTES_OF_A_RANK) if gathers == "in turn" else None


# The following are ordered by the current stream and return when they are enqueued: a synchronous collective of NCCL
# runs on the current stream and blocks no host; gloo's blocks it, and is for tests there.


def _all_gather_now(group: dist.ProcessGroup | None, output: torch.Tensor, source: torch.Tensor) -> bool:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, source, group=group)
    return True


def _all_gather_group(group: dist.ProcessGroup, outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> bool:
    torch_private.all_gather_group(group, outputs, sources)
    return True


def _reduce_scatter_now(
    group: dist.ProcessGroup | None, output: torch.Tensor, source: torch.Tensor, average: bool
) -> bool:
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, source, op=op, group=group)
    return True


def _all_to_all_now(group: dist.ProcessGroup | None, output: torch.Tensor, source: torch.Tensor) -> bool:
    dist.all_to_all_single(output, source, group=group)
    return True
