"""What a group calls in Python: the all-reduce over replicas, extensions, and the user's own collectives and hooks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.base import torch_private
from fsdp2x.base.collectives import Gather, all_gather, explained, gather_packed, reduce_scatter, wait
from fsdp2x.lifecycle import wire_formats
from fsdp2x.lifecycle.unit import CustomComms, ShardedUnit
from fsdp2x.sharding.mesh import reduction_group
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.sharded_param import unsharded_parameter
from fsdp2x.sharding.transport import device_reduction


def connect(group: ShardedParamGroup, mp_policy: MixedPrecisionPolicy) -> None:
    """Gives the engine's group its callables: when it is made, and when it moves to another root."""
    if any(param.extension is not None or param.is_alias for param in group.params):
        engine, slow = group.engine, _SlowGathers(group, mp_policy)
        assert engine is not None, "made before it is connected"
        engine.gather_slowly, engine.finish_slowly, engine.free_slowly = slow.begin, slow.finish, slow.free
        group.slow_gathers = slow


class _SlowGathers:
    """Extensions and aliases of one group. Holds its parameters weakly: the engine must not lead back to modules.

    Over a process group the extensions' inputs travel with the engine's segment, in one collective; over shared memory,
    and where the engine has nothing to gather, in one of their own.
    """

    def __init__(self, group: ShardedParamGroup, mp_policy: MixedPrecisionPolicy) -> None:
        self._group: Any = weakref.ref(group)  # which lives as long as the engine calls us
        self._mp_policy = mp_policy
        self._work: Any = None

    def _extended(self):
        for index, param in enumerate(self._group().params):
            if param.extension is not None:
                yield index, param

    def _begin(self, gather: Gather, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for _, param in self._extended():
            local = torch_private.local_tensor(param.param)
            pairs += param.extension.begin(local, param.owners[0][0], self._mp_policy)
        ranks = self._group().ranks
        self._work = gather_packed(gather, ranks.world, ranks.rank, pairs) if pairs else None

    @torch.no_grad()
    def all_gather(self, gather: Gather, output: torch.Tensor, source: torch.Tensor) -> Any:
        """The engine's gather of its segment, with the extensions' inputs packed beside it."""
        self._begin(gather, [(output, source)])
        if self._group().engine.has_streams:
            self._wait()  # what the engine enqueues next reads the output
        return self._work

    @torch.no_grad()
    def begin(self) -> bool:
        """Before the engine reads its pool."""
        group = self._group()
        group.refresh_aliases()
        if not (group.transport.is_collective and group.ranks.world > 1 and group.engine.slot_bytes > 0):
            self._begin(functools.partial(all_gather, group.ranks.group), [])
        return True

    def _wait(self) -> None:
        work, self._work = self._work, None
        group = self._group()
        with explained(group.ranks.group, f"all-gather of unit '{group.engine.name}'"):
            wait(work)

    def finish(self) -> bool:
        group = self._group()
        with torch.inference_mode(False), torch.no_grad():
            self._wait()
            for index, param in self._extended():
                dtype = self._mp_policy.param_dtype or param.param.dtype
                tensor = param.extension.finish(torch_private.local_tensor(param.param), dtype)
                if tensor is not None:
                    param.extension.parameter = unsharded_parameter(param, param.spec.wrap_unsharded(tensor))
                    group.engine.set_unsharded_param(index, param.extension.parameter)
        return True

    def free(self) -> bool:
        self._wait()
        for _, param in self._extended():
            param.extension.free()
        return True


def apply(state: ShardedUnit) -> None:
    """Hands the collectives and hooks that the user set to the engine's groups of ``state``."""
    wire_formats.check(state)
    custom = state.comms
    for group in state.groups:
        engine = group.engine
        assert engine is not None, "made before it is connected"
        hook, stream = custom.all_reduce_hook, custom.all_reduce_hook_stream
        engine.all_reduce_hook = hook and functools.partial(_call_hook, hook, stream)
        if group.is_replicated:
            continue
        gather = custom.all_gather and functools.partial(_custom_gather, custom.all_gather, group.ranks.group)
        if group.slow_gathers is not None:
            gather = gather or functools.partial(all_gather, group.ranks.group)
            gather = functools.partial(group.slow_gathers.all_gather, gather)
        engine.all_gather = gather
        engine.separate_reduce_scatter = None
        if engine.has_streams and custom.separate_reduction and custom.reduce_scatter is None:
            engine.reduce_scatter = None
            engine.separate_reduce_scatter = device_reduction(reduction_group(group.ranks))
        else:
            engine.reduce_scatter = _reduction_of(custom, group)


def _reduction_of(custom: CustomComms, group: ShardedParamGroup) -> Callable[..., Any] | None:
    """None: the transport's own."""
    ranks: Any = reduction_group(group.ranks) if custom.separate_reduction else group.ranks.group
    if custom.reduce_scatter is not None:
        return functools.partial(_custom_scatter, custom.reduce_scatter, ranks)
    return functools.partial(reduce_scatter, ranks) if custom.separate_reduction else None


def _call_hook(hook: Callable[[torch.Tensor], None], stream: Any, rows: torch.Tensor) -> bool:
    if stream is None:
        hook(rows)
        return True
    current = torch.accelerator.current_stream(rows.device)
    stream.wait_stream(current)
    with stream:
        hook(rows)
    current.wait_stream(stream)
    return True


# A custom object may demand memory of its own (`allocate`, for registered or symmetric buffers): the engine's staging
# is copied there and back.
def _custom_gather(comm: Any, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor):
    theirs = comm.allocate(tuple(output.shape), dtype=output.dtype, device=output.device)
    mine = theirs.narrow(0, group.rank() * source.numel(), source.numel())
    mine.copy_(source)
    work = comm(output_tensor=theirs, input_tensor=mine, group=group, async_op=False)
    wait(work)
    output.copy_(theirs)
    return None


def _custom_scatter(comm: Any, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, average: bool):
    theirs_in = comm.allocate(tuple(source.shape), dtype=source.dtype, device=source.device)
    theirs_in.copy_(source)
    theirs_out = comm.allocate(tuple(output.shape), dtype=output.dtype, device=output.device)
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    work = comm(output_tensor=theirs_out, input_tensor=theirs_in, group=group, op=op, async_op=False)
    wait(work)
    output.copy_(theirs_out)
    return None


def own_collective(caller: str, comm: Any) -> Any:
    """``comm``, if it is a collective of the user's or None. Raises TypeError."""
    if comm is not None and not (callable(comm) and hasattr(comm, "allocate")):
        raise TypeError(
            f"fsdp2x.FSDPModule.{caller}: comm must be a collective with __call__ and allocate, or None, got {comm!r}"
        )
    return comm
