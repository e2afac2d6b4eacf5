"""The device that a benchmark trains on: its clock, memory counters, and process group. The CPU is for dry runs."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import harness


class Cuda:
    """The first CUDA device, or under torchrun that of this rank."""

    type = "cuda"
    is_dry_run = False

    def __init__(self) -> None:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        self.name = torch.cuda.get_device_name()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        """A point on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Between two marks that the device has passed."""
        return first.elapsed_time(second) / 1e3

    def free_bytes(self) -> int:
        """On the rank that has least."""
        free = torch.tensor(torch.cuda.mem_get_info()[0])
        if dist.is_initialized():
            dist.all_reduce(free, dist.ReduceOp.MIN)
        return int(free)

    def allocated_bytes(self) -> int:
        """Returns the bytes of all tensors, rounded up by the allocator."""
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """The most there was since `restart_peak`."""
        return torch.cuda.memory_stats()["allocated_bytes.all.peak"]

    def reserved_bytes(self) -> int:
        """The most that the allocator has held since `restart_peak`."""
        return torch.cuda.memory_stats()["reserved_bytes.all.peak"]

    def inactive_bytes(self) -> int:
        """The most that was free in blocks with memory in use since `restart_peak`: fragmentation."""
        return torch.cuda.memory_stats()["inactive_split_bytes.all.peak"]

    def num_retries(self) -> int:
        """How often the allocator has freed its cache to satisfy a request."""
        return torch.cuda.memory_stats()["num_alloc_retries"]

    def num_ooms(self) -> int:
        """How often the allocator could not satisfy a request."""
        return torch.cuda.memory_stats()["num_ooms"]

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def make_workspaces(self) -> None:
        """Makes memory that libraries keep, such as cuBLAS's workspace, so that no side pays for it."""
        ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
        (ones @ ones).float() @ torch.ones(64, 64, device="cuda")

    def clear(self) -> None:
        """Frees all unreferenced memory."""
        gc.collect()
        torch.cuda.empty_cache()


class Cpu:
    """Stands in for a device in a dry run: the host's clock, and no memory counters."""

    type = "cpu"
    is_dry_run = True
    name = "dry run on the CPU"

    def synchronize(self) -> None:
        """The host is the device."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def free_bytes(self) -> int:
        return 1 << 30

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reserved_bytes(self) -> int:
        return 0

    def inactive_bytes(self) -> int:
        return 0

    def num_retries(self) -> int:
        return 0

    def num_ooms(self) -> int:
        return 0

    def restart_peak(self) -> None:
        """There is no peak."""

    def make_workspaces(self) -> None:
        """The CPU's libraries keep none that is counted."""

    def clear(self) -> None:
        gc.collect()


Device = Cuda | Cpu


def open_device(kind: str) -> Device | None:
    """The device, or None after saying why there is none. Under torchrun the ranks meet."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl")
    if kind == "cpu":
        torch.set_num_threads(1)
        return Cpu()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return None
    return Cuda()


@contextmanager
def alone_in(device: Device, world: int) -> Iterator[DeviceMesh]:
    """This process as rank 0 of `world`: truly alone, or with torch's fake group in place of the others.

    Under torchrun `world` is the one that it made.
    """
    if dist.is_initialized():
        yield init_device_mesh(device.type, (dist.get_world_size(),))
        return
    options = {"store": dist.HashStore(), "rank": 0, "world_size": world, "timeout": timedelta(seconds=120)}
    if world > 1:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend "fake")

        dist.init_process_group("fake", **options)
    else:
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", **options)
    try:
        yield init_device_mesh(device.type, (world,))
    finally:
        dist.destroy_process_group()


class DeviceTimer:
    """Phases of a step by marks on the device's stream, and as "host" how long the host took to enqueue all of it."""

    def __init__(self, device: Device, samples: harness.Samples, counted: bool) -> None:
        self._device, self._samples, self._counted = device, samples, counted
        self._host_start = time.perf_counter()
        self._marks = [("", device.mark())]

    def mark(self, phase: str) -> None:
        self._marks.append((phase, self._device.mark()))

    def stop(self) -> None:
        host_seconds = time.perf_counter() - self._host_start
        self._device.synchronize()
        if not self._counted:
            return
        for (_, before), (phase, mark) in zip(self._marks, self._marks[1:], strict=False):
            self._samples.add(phase, self._device.seconds(before, mark))
        self._samples.add("step", self._device.seconds(self._marks[0][1], self._marks[-1][1]))
        self._samples.add("host", host_seconds)
