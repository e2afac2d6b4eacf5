"""Measures a rank's memory: resident bytes from the kernel, pages of shared memory, and tensor allocations."""

import contextlib
import ctypes
import gc
import math
import os
from collections.abc import Callable

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.base import gloo_threads

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
# Entries of the engine's statistics that a memory report has under the same names.
LEDGER = ("gather_slot_bytes", "peak_gather_bytes", "scratch_bytes", "resident_shard_bytes", "wire_bytes")
# glibc's M_MMAP_THRESHOLD: from this size on, freed memory goes back to the kernel at once and leaves the resident set.
_M_MMAP_THRESHOLD = -3
_MMAP_FROM_BYTES = 65536


def return_freed_memory() -> None:
    """Makes the resident set follow allocations, for the rest of the process. Use it only in fresh processes."""
    if ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES) != 1:
        raise OSError("mallopt(M_MMAP_THRESHOLD) failed")


def _status() -> dict[str, int]:
    with open("/proc/self/status", encoding="ascii") as file:
        lines = (line.split() for line in file)
        return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[0].startswith(("Vm", "Rss"))}


def peak_private_bytes(run: Callable[[], object]) -> int:
    """How far `run` lifts the peak of the resident set, without pages of shared memory."""
    gc.collect()
    before = _status()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak restarts at the present
    run()
    after = _status()
    # Shared pages are never given back while the model lives: those at the end are those at the peak.
    return (after["VmHWM"] - before["VmRSS"]) - (after["RssShmem"] - before["RssShmem"])


def shared_files() -> dict[int, int]:
    """Inode -> bytes that exist, of each shared memory of the engine this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        with contextlib.suppress(FileNotFoundError):
            if "memfd:fsdp2x" in os.readlink(path):
                status = os.stat(path)
                found[status.st_ino] = status.st_blocks * 512
    return found


def copied_shared_bytes(inodes: set[int]) -> int:
    """Bytes of private copies this process has made of pages of these files (isolated views, written in place)."""
    total, counts = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            fields = line.split()
            if not fields[0].endswith(":"):
                counts = int(fields[4]) in inodes
            elif counts and fields[0] == "Anonymous:":
                total += int(fields[1]) * 1024
    return total


def _events(run: Callable[[], object], without: str = "") -> list[tuple[int, int]]:
    """(address, bytes) of the CPU tensor allocations of this thread during `run`, in order; frees are negative.

    `without`: an operator whose own temporaries do not count, because a device's kernel has none.
    """
    from torch._C._profiler import _EventType

    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
        # They let go of tensors some time after a waiter went on, and tell the profiler, which must not have gone.
        gloo_threads.wait_until_idle()
    found, pending = [], [(event, False) for event in profile.profiler.kineto_results.experimental_event_tree()]
    while pending:
        event, hidden = pending.pop()
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, hidden))
        else:
            hidden = hidden or event.name == without
        pending += [(child, hidden) for child in event.children]
    told, temporary = [], set()
    for _, address, size, hidden in sorted(found, key=lambda event: event[0]):
        if size > 0 and hidden:
            temporary.add(address)
        elif size < 0 and address in temporary:
            temporary.remove(address)
        else:
            told.append((address, size))
    return told


def allocations(run: Callable[[], object], without: str = "") -> list[int]:
    """Sizes of the CPU tensor allocations (positive) and frees (negative) of this thread during `run`, in order.

    Frees of memory from before are among them only where an earlier profiler saw it made."""
    return [size for _, size in _events(run, without)]


def held(run: Callable[[], object]) -> int:
    """Bytes of CPU tensors that this thread allocates during `run` and that are still there afterwards."""
    blocks = {}
    for address, size in _events(run):
        if size > 0:
            blocks[address] = size
        else:
            blocks.pop(address, None)
    return sum(blocks.values())


def peak_of(sizes: list[int]) -> int:
    """The highest running sum."""
    peak = running = 0
    for size in sizes:
        running += size
        peak = max(peak, running)
    return peak


def least_gradient_bytes(group) -> int:
    """Returns the bytes of a group's gradients in its flat buffer, counted from the parameters' shapes."""
    total = 0
    for param in (one.param for one in group.params):
        rows = math.ceil(param.shape[0] / group.ranks.world) * math.prod(param.shape[1:]) * param.element_size()
        total += math.ceil(rows / 64) * 64 * param.requires_grad
    return total


def run_stack(model) -> None:
    """Forward and backward of a `models.Stack`."""
    model(torch.randn(4, model.norm.normalized_shape[0])).float().square().mean().backward()
