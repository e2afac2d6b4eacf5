"""Defines how the ranks of a group exchange bytes: the kinds of transports, and the one over accelerator streams."""

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
    """How the ranks of a group exchange bytes, by the engine's names."""

    LOCAL = "local"  # one rank on a CPU
    SHM = "shm"  # ranks of one host, which read each other's memory
    PROCESS_GROUP = "process_group"  # CPU collectives that the calling thread waits for
    DEVICE = "device"  # collectives of a process group on the streams of an accelerator

    @property
    def is_collective(self) -> bool:
        """Whether all ranks act in the same order, train the same parameters, and send what the others need."""
        return self in (TransportKind.PROCESS_GROUP, TransportKind.DEVICE)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks share one copy of the gather buffers and units may be reduced in any order."""
        return self is TransportKind.SHM


# Allowed values of the argument.
TRANSPORTS = ("auto", TransportKind.SHM, TransportKind.PROCESS_GROUP)


def check_transport(name: str) -> str:
    """Returns ``name``; FSDP2X_TRANSPORT replaces "auto", for scripts that cannot pass the argument."""
    if name == "auto":
        name = os.environ.get("FSDP2X_TRANSPORT", "auto")
    if name not in TRANSPORTS:
        raise ValueError(f"fully_shard: transport must be one of {', '.join(TRANSPORTS)}, got {name!r}")
    return name


def layer_maker(device: torch.device) -> Callable[[], Any] | None:
    """Returns a maker of streams and events of ``device`` for the engine. None on the CPU."""
    if device.type == "cpu":
        return None
    if device.type == "cuda" and torch.version.hip is None:
        _warn_without_kernels()
    return functools.partial(_C.TorchLayer, device)


@functools.cache
def _warn_without_kernels() -> None:
    """Warns once, at the first CUDA device. A build without nvcc works, so users would not look for the reason."""
    if not _C.has_device_kernels():
        warnings.warn(
            "fsdp2x was built without nvcc, so slower torch operations replace its kernels and wire formats raise an "
            "error. Rebuild it where nvcc is installed, or with `make build CUDA=wheels`, which takes nvcc from "
            "packages. `fsdp2x doctor` shows the kernels in use.",
            stacklevel=2,
        )


def has_streams(device: torch.device) -> bool:
    """Returns whether collectives run on separate streams, overlapped with compute, and gather in place."""
    return layer_maker(device) is not None


def device_transport(layer, group: dist.ProcessGroup | None, comm_memory: str | None):
    """Makes the transport over ``group`` on the streams of ``layer``. ``comm_memory`` allocates its gather buffers."""
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
        pieces=pieces(),
    )


def pieces() -> tuple[int, int]:
    """Returns the bytes, of all ranks, above which a device reduces a unit in pieces, and those of a piece."""
    return _C.PIECES


def _warn_of_one_queue(device: torch.device) -> None:
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "fsdp2x: CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams one hardware queue, so gathers and reductions do "
            "not overlap with compute. Megatron's tensor parallelism needs it, but fully sharded training does not. "
            "Unset it.",
            stacklevel=2,
        )


def device_reduction(group: dist.ProcessGroup | None) -> Callable[..., bool]:
    """Returns a stream-ordered reduce-scatter of (output, source, average).

    If the divisor is not the number of ranks, it sums first and divides in a second pass over the reduced rows. NCCL's
    premultiplied sum needs no second pass, but reads a bf16 factor as zero before torch 2.15.
    """
    return functools.partial(_reduce_scatter_now, group)


# If every gather is a separate launch, each pays the latency of a whole ring, about 4 us per rank. Device memory copies
# 7 MiB in that time, so smaller parameters are not gathered alone. Estimated from NCCL's published latencies, not
# measured on several GPUs.
_ALONE_BYTES = 64 * 2**20
_ALONE_BYTES_OF_A_RANK = 8 * 2**20


def pack_below_bytes(gathers: str, world: int) -> int | None:
    """Returns the size in bytes below which parameters share one packed gather. None: all of them share it.

    ``gathers``: how the backend runs many gathers, from ``torch_private.gathers_of``. The engine gathers only a few
    larger parameters alone, and none if there are many (csrc/core/gather_plan.hpp).
    """
    if gathers in ("grouped", "messages"):
        return _C.PACK_BELOW_BYTES
    return max(_ALONE_BYTES, world * _ALONE_BYTES_OF_A_RANK) if gathers == "in turn" else None


# The following are ordered by the current stream and return once enqueued. A synchronous NCCL collective runs on the
# current stream and does not block the host. gloo's blocks it, and is used in tests only.


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
