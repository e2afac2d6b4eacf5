"""The cores that a rank's optimizer steps on: its share of the host's, in the order of NUMA nodes.

fsdp2x binds the threads of optimizer steps, never the process. torchrun starts ranks with ``OMP_NUM_THREADS=1``, so a
step on torch's threads leaves the other cores idle.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

OPTION = "FSDP2X_STEP_CORES"
_SYSTEM = Path("/sys/devices/system")
# A rank's number on its host, and how many there are, as torchrun, Open MPI, Intel MPI, and SLURM name them.
_LOCAL_RANKS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)  # fmt: skip
_BINDS_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class Host(NamedTuple):
    """The facts of the choice, besides the environment. Cores are numbers of hardware threads."""

    allowed: frozenset[int]  # where this process may run
    parent: frozenset[int]  # where the process that started it may run
    cores: tuple[int, ...]  # the first hardware thread of each core, node by node
    num_threads: int  # torch's
    quota: int = sys.maxsize  # as many cores' time a container may use


class StepCores(NamedTuple):
    """The cores of an optimizer's threads. Without ``cores``, it steps on torch's threads."""

    cores: tuple[int, ...]
    num_threads: int
    reason: str


def step_cores(environment: Mapping[str, str] = os.environ) -> StepCores:
    """Chooses the cores of this process.

    Raises:
        ValueError: ``FSDP2X_STEP_CORES`` is neither ``auto`` nor ``off``.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    try:
        parent = frozenset(os.sched_getaffinity(os.getppid()))
    except OSError:  # it has ended
        parent = allowed
    return choose(environment, Host(allowed, parent, read_cores(), torch.get_num_threads(), read_quota()))


def choose(environment: Mapping[str, str], host: Host) -> StepCores:
    """Chooses as ``step_cores`` does, on any host."""
    option = environment.get(OPTION, "auto")
    if option not in ("auto", "off"):
        raise ValueError(f"{OPTION}: got {option!r}, expected auto or off")
    binds = [name for name in _BINDS_OPENMP if environment.get(name, "false").lower() not in ("false", "disabled")]
    rank, num_ranks = _local_rank(environment)
    own = [core for core in host.cores if core in host.allowed]
    share = own[rank * len(own) // num_ranks : (rank + 1) * len(own) // num_ranks]
    if option == "off":
        reason = f"{OPTION}=off"
    elif binds:
        reason = f"{binds[0]} binds them"
    elif host.allowed != host.parent:
        reason = f"this process was bound to {len(host.allowed)} of {len(host.parent)} cores"
    elif num_ranks < 2:
        reason = "no other rank is known on this host"
    elif (num_cores := min(len(own), host.quota)) < 2 * num_ranks:
        reason = f"{num_cores} cores are fewer than two for each of {num_ranks} ranks"
    else:
        # torchrun sets 1 by default.
        is_chosen = host.num_threads > 1 or "TORCHELASTIC_RUN_ID" not in environment
        num_threads = min(len(share), host.quota // num_ranks, host.num_threads if is_chosen else len(share))
        names = ", ".join(map(str, share))
        reason = f"{num_threads} thread(s) on cores {names}: rank {rank} of {num_ranks} on this host"
        return StepCores(tuple(share), num_threads, reason)
    return StepCores((), host.num_threads, f"{host.num_threads} thread(s) of torch: {reason}")


def _local_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    for rank, size in _LOCAL_RANKS:
        # A batch script inherits the job's variables and is one process. srun sets the number of its step.
        if rank.startswith("SLURM") and not environment.get("SLURM_STEP_ID", "").isdigit():
            continue
        if environment.get(rank, "").isdigit() and environment.get(size, "").isdigit():
            return int(environment[rank]), max(int(environment[size]), 1)
    return 0, 1


@functools.cache
def read_cores(system: Path = _SYSTEM) -> tuple[int, ...]:
    """Reads the first hardware thread of each core, node by node; of one node where the kernel names none."""
    lists = sorted(system.glob("node/node*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    numbers = [number for path in lists or [system / "cpu/online"] for number in _numbers(path)]
    siblings = {number: _numbers(system / f"cpu/cpu{number}/topology/thread_siblings_list") for number in numbers}
    return tuple(number for number in numbers if number in (siblings[number] or [number])[:1])


def read_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Reads how many cores' time the control groups of this process allow: a container's, a job's, and those around."""
    try:
        groups = [line.split(":", 2)[1:] for line in own.read_text().splitlines()]
    except OSError:
        groups = []
    quotas = []
    for controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root  # version 1 has a folder for each controller
        group = top / path.lstrip("/")  # in a container it may be the host's path, which does not exist here
        quotas += [_quota_of(place) for place in (group, *group.parents) if place.is_relative_to(top)]
    return max(int(min(quotas, default=sys.maxsize)), 1)


def _quota_of(group: Path) -> float:
    """Reads the quota of a control group of version 2 or 1; without one, more cores than any host has."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            if quota > 0:
                return quota / period
    return sys.maxsize


def _numbers(path: Path) -> list[int]:
    """The numbers of a file of the kernel's: ``0-2,5``."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",") if part]
    except OSError:
        return []
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]
