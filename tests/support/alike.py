"""One process as rank 0 of a world whose ranks are all alike. It needs only one device.

Torch's fake process group stands for the world. The other ranks would send the same bytes as this one. A group of one
rank moves them, with NCCL or gloo, so every byte passes through the library. Streams, plans, buffers, and launches are
those of many ranks. Full weights repeat this rank's rows, and a mean of gradients is this rank's rows of them. FSDP2
in the same world computes the same results, which tests compare.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2x.base import torch_private
from fsdp2x.sharding import transport

_GATHERS = ("all_gather_single", "all_gather_into_tensor")
_REDUCTIONS = ("reduce_scatter_single", "reduce_scatter_tensor")


def _copied(output: torch.Tensor, input: torch.Tensor, **_) -> None:
    output.copy_(input)


class Alike:
    """The collectives of such a world, over `alone`, a group of this rank only. None: by torch's copies."""

    def __init__(self, alone: dist.ProcessGroup | None) -> None:
        self.alone = alone
        self.counts = {"gather": 0, "gather of many": 0, "reduction": 0, "all-reduce": 0}
        self._gather = next(getattr(dist, name) for name in _GATHERS if hasattr(dist, name))
        self._reduce = next(getattr(dist, name) for name in _REDUCTIONS if hasattr(dist, name))
        self._all_reduce, self._gather_many = dist.all_reduce, torch_private.all_gather_group
        self._allocator = torch_private.comm_allocator
        if alone is None:
            self._gather = self._reduce = _copied
            self._gather_many = lambda group, outputs, sources: torch._foreach_copy_(outputs, sources)
            self._all_reduce = lambda tensor, **_: None
            self._allocator = lambda kind, group, device: None

    def gather(self, output: torch.Tensor, input: torch.Tensor, group=None, async_op: bool = False) -> None:
        self.counts["gather"] += 1
        for part in output.view(-1, input.numel()):
            self._gather(part, input.view(-1), group=self.alone)

    def gather_many(self, group, outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.counts["gather of many"] += 1
        pairs = zip(outputs, sources, strict=True)
        parts = [(part, source) for output, source in pairs for part in output.view(-1, source.numel())]
        self._gather_many(self.alone, [part for part, _ in parts], [source for _, source in parts])

    def reduce(self, output, input, op=dist.ReduceOp.SUM, group=None, async_op: bool = False) -> None:
        self.counts["reduction"] += 1
        self._reduce(output, input.view(-1, output.numel())[0].view_as(output), op=op, group=self.alone)
        if op == dist.ReduceOp.SUM:
            output.mul_(input.numel() // output.numel())

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, group=None, async_op: bool = False) -> None:
        parts = output.view(dist.get_world_size(group), -1)
        for part in parts:
            self._gather(part, input.view(parts.shape)[0], group=self.alone)

    def all_reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM, group=None, async_op: bool = False) -> None:
        self._all_reduce(tensor, op=op, group=self.alone)
        if group is not self.alone:
            self.counts["all-reduce"] += 1
            if op == dist.ReduceOp.SUM:
                tensor.mul_(dist.get_world_size(group))

    def allocator(self, kind, group, device):
        return self._allocator(kind, self.alone, device)


@contextlib.contextmanager
def instead(collectives) -> Iterator[None]:
    """Puts the methods of ``collectives``, named as ``Alike``'s, in the place of torch.distributed's functions."""
    replaced = {dist: {"all_reduce": collectives.all_reduce, "all_to_all_single": collectives.all_to_all}}
    replaced[dist] |= {name: collectives.gather for name in _GATHERS if hasattr(dist, name)}
    replaced[dist] |= {name: collectives.reduce for name in _REDUCTIONS if hasattr(dist, name)}
    replaced[torch_private] = {
        "all_gather_group": collectives.gather_many,
        "comm_allocator": collectives.allocator,
    }
    with contextlib.ExitStack() as stack:
        for owner, functions in replaced.items():
            stack.enter_context(mock.patch.multiple(owner, **functions))
        yield


@contextlib.contextmanager
def world_of(
    device: str, backend: str | None, sizes: tuple[int, ...], pack_below_bytes: int | None = 0
) -> Iterator[tuple]:
    """(mesh of `sizes`, Alike), in a process that may give up its world. Two sizes: replicas and shards.

    Parameters of less than `pack_below_bytes` are gathered packed, all of them with None.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

    if dist.is_initialized():
        dist.destroy_process_group()
    world = torch.Size(sizes).numel()
    options = {"store": dist.HashStore(), "rank": 0, "world_size": world, "timeout": timedelta(seconds=120)}
    dist.init_process_group("fake", **options)
    try:
        alone = backend and dist.new_group([0], backend=backend, use_local_synchronization=True)
        alike = Alike(alone)
        names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
        with instead(alike), mock.patch.object(transport, "pack_below_bytes", lambda gathers, ranks: pack_below_bytes):
            yield DeviceMesh(device, torch.arange(world).view(sizes), mesh_dim_names=names), alike
    finally:
        dist.destroy_process_group()
