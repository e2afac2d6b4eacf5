"""Machines as a few numbers, each with its source: links, collectives by latency and bandwidth, memory, compute, host.

Collectives follow the model with which NCCL itself chooses (``src/graph/tuning.cc`` and ``topo.h`` of
github.com/NVIDIA/nccl): latency of each step times the steps, and bytes over the bandwidth of the bus. A ring over W
ranks on N nodes has W - 1 steps for a gather or a reduce-scatter, N - 1 of which cross nodes; a tree, for all-reduces
alone, 2 log2(N). Every GPU has a network adapter of its own, so that a group with L ranks in a node crosses at L times
one adapter's bandwidth. NVLink SHARP, InfiniBand SHARP and what other jobs take from the network are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALL_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Protocol:
    """One way to send: seconds before anything moves, of a step inside a node and across, and the bandwidth's share."""

    base_s: float
    inside_s: float
    across_s: float
    share: float
    kinds: tuple[str, ...] = ALL_KINDS


@dataclass(frozen=True)
class Axis:
    """The ranks of one group: how many, and how many of them in one node."""

    world: int
    local: int

    @property
    def num_nodes(self) -> int:
        return self.world // self.local


@dataclass(frozen=True)
class Machine:
    """Nodes of one kind. Bandwidths in bytes per second, of one rank and direction.

    Its ring has a protocol for each kind of collective that is asked for.
    """

    name: str
    ranks_per_node: int
    inside_bytes_per_s: float  # of a ring inside a node
    across_bytes_per_s: float  # of one rank's network adapter
    ring: tuple[Protocol, ...]
    tree: Protocol | None
    memory_bytes_per_s: float
    flops_per_s: float  # the peak
    launch_s: float  # of the host, for a kernel
    collective_s: float  # of the host, for a launch of collectives
    module_s: float  # of the host, for a module's own operations, in forward and again in backward
    grouped_s: float = 0.0  # of the host, for each further collective of a launch
    is_device: bool = True  # the host runs ahead of the compute
    is_blocking: bool = False  # collectives are the host's own work

    def axis(self, world: int, stride: int = 1) -> Axis:
        """A group of every ``stride``-th rank."""
        if world * stride <= self.ranks_per_node:
            return Axis(world, world)
        return Axis(world, math.gcd(world, max(self.ranks_per_node // stride, 1)))

    def collective_s_of(self, kind: str, num_bytes: float, axis: Axis) -> float:
        """Seconds of ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``, of all ranks' bytes together."""
        if axis.world == 1:
            return 0.0
        passes = 2 if kind == "all_reduce" else 1
        bus = self.inside_bytes_per_s
        if axis.num_nodes > 1:
            across = self.across_bytes_per_s * axis.local
            bus = min(bus, across) if axis.local > 1 else across
        moved = passes * num_bytes * (axis.world - 1) / axis.world
        num_across = passes * (axis.num_nodes - 1)
        num_inside = passes * (axis.world - 1) - num_across
        times = [
            one.base_s + num_inside * one.inside_s + num_across * one.across_s + moved / (bus * one.share)
            for one in self.ring
            if kind in one.kinds
        ]
        if self.tree is not None and kind == "all_reduce":
            steps_s = (axis.local - 1) * self.tree.inside_s + math.log2(axis.num_nodes) * self.tree.across_s
            times.append(self.tree.base_s + 2 * steps_s + 2 * num_bytes / (bus * self.tree.share))
        return min(times)

    def copy_s(self, num_bytes: float) -> float:
        """Seconds that a copy of so many bytes takes of the memory: read once and written once."""
        return 2 * num_bytes / self.memory_bytes_per_s


# NCCL's tables for NVLink and networks, in seconds: the protocol that is called Simple, LL128, and trees.
_RING = (Protocol(8.4e-6, 3.4e-6, 14.0e-6, 1.0), Protocol(10.0e-6, 1.9e-6, 4.0e-6, 0.92))
_TREE = Protocol(8.4e-6, 4.0e-6, 14.0e-6, 0.92)
# Of the host no GPU's figures are known yet. A launch: 4 us; a collective through torch.distributed: 25 us, and 5
# for each further one in its launch; a module of a HuggingFace model: 8 operations of 8 us. Assumptions.
_HOST = {"launch_s": 4e-6, "collective_s": 25e-6, "grouped_s": 5e-6, "module_s": 64e-6}

# NVLink: 18 links of 20.6 GB/s and of 40.1, NCCL's figures for sm_90 and sm_100. Network: ConnectX-7, 400 Gb/s for each
# GPU of a DGX H100 and of a DGX B200. Memory and dense bf16 peaks: NVIDIA's data sheets of H100 SXM and DGX B200. A100:
# 12 links of 20 GB/s, 200 Gb/s, its data sheet.
MACHINES = {
    "h100": Machine("h100", 8, 370.8e9, 50e9, _RING, _TREE, 3.35e12, 989e12, **_HOST),
    "b200": Machine("b200", 8, 721.8e9, 50e9, _RING, _TREE, 7.7e12, 2250e12, **_HOST),
    "a100": Machine("a100", 8, 240e9, 25e9, _RING, _TREE, 2.04e12, 312e12, **_HOST),
}
