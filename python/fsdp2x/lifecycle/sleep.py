"""``sleep`` and ``wake``: a model and its optimizer give their device memory away for a while and get it back.

For reinforcement learning, where training and generation take turns on one device. The values wait in pinned host
memory that is kept for the next time; parameters, gradients and optimizer state keep their Python objects. Torch's
allocator gives what is free to the driver, for whoever else uses the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.memory_file import collect_handed
from fsdp2x.base.native import _C
from fsdp2x.base.optimizer_hooks import refuse_swapped
from fsdp2x.lifecycle.tree import roots_of, unit_states
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.sharding.offload import host_state

_MESSAGE = "fsdp2x: this tensor's model is asleep: its memory was given away. Call fsdp2x.wake(model, optimizer) first."


# Of host memory; a power of two, because torch rounds page-locked memory up to one.
BLOCK_BYTES = 64 * 2**20


class _HostBytes:
    """Host memory that grows by blocks: bytes from 0 on, of which copies may lie in several blocks."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used = 0

    def take(self, memory: torch.Tensor) -> int:
        """Copies bytes behind those that are there, in the order of the current stream; returns where they begin."""
        offset = self._used
        self._used += _C.align_up(memory.numel())
        while len(self._blocks) * BLOCK_BYTES < self._used:
            is_pinned = memory.device.type == "cuda"
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=is_pinned))
        for host, part in self._pieces(memory, offset):
            host.copy_(part, non_blocking=host.is_pinned())
        return offset

    def give(self, memory: torch.Tensor, offset: int) -> None:
        """Copies the bytes from ``offset`` on to ``memory``, likewise."""
        for host, part in self._pieces(memory, offset):
            part.copy_(host, non_blocking=host.is_pinned())

    def forget(self) -> None:
        """Nothing is there any more; the blocks stay for the next bytes."""
        self._used = 0

    def _pieces(self, memory: torch.Tensor, offset: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        done = 0
        while done < memory.numel():
            block, begin = divmod(offset + done, BLOCK_BYTES)
            num = min(BLOCK_BYTES - begin, memory.numel() - done)
            yield self._blocks[block][begin : begin + num], memory[done : done + num]
            done += num


@dataclass
class _Parked:
    """One storage: a tensor over it, whose memory is away, and where its bytes are in the host's."""

    tensor: torch.Tensor
    offset: int
    num_bytes: int
    users: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # tensors in a pool, and their offsets


@dataclass
class _Sleeper:
    """What a model keeps between its sleeps."""

    parked: list[_Parked] = field(default_factory=list)
    host: _HostBytes = field(default_factory=_HostBytes)
    is_asleep: bool = False


_sleepers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@checked
def sleep(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Moves the shards of ``model`` and the state of ``optimizer`` to host memory and frees their device memory.

    Also frees the memory the engine keeps between steps: gather slots, reduction buffers, gradient pools. What torch's
    allocator has free then, goes to the driver: other processes and allocators can have it. Using a
    parameter meanwhile raises an error that says so. On a CPU mesh it works alike, and saves nothing.

    Every rank should call it. It is not collective, except that with torch 2.15 symmetric memory is given back by all
    ranks together (:meth:`FSDPModule.set_symm_mem_for_comm`).

    Two things stay. cuBLAS keeps a workspace for each thread and stream that computed, 32 MiB on Hopper.
    ``torch._C._cuda_clearCublasWorkspaces()`` frees them, unless a CUDA graph of this process was captured with them.
    Memory that a push handed to an engine stays while that engine has not let go of it, and as long as this process
    runs if the engine died before. The first call pins host memory, 64 MiB at a time, which takes seconds for tens of
    GiB and holds up all streams of the device. Later calls use the same memory.

    Args:
        model: sharded by ``fully_shard``; no forward or backward is running.
        optimizer: its state tensors on the model's device go, too; None: they stay.

    Returns:
        Bytes of shards and optimizer state that were freed; what the engine kept comes on top.

    Raises:
        ValueError: ``model`` is not sharded, has gradients, or is asleep.
        RuntimeError: a forward or backward is running; the averages of an ``EMA`` are swapped in.
        NotImplementedError: a parameter is a tensor subclass with memory of its own.
    """
    states = unit_states(model)
    refuse_swapped("fsdp2x.sleep", model.parameters())
    _check(model, states)
    sleeper = _sleepers.setdefault(model, _Sleeper())
    if sleeper.is_asleep:
        raise ValueError("fsdp2x.sleep: the model is asleep already; call fsdp2x.wake first")
    device = states[0].ranks.device
    for state in states:
        state.reshard()
    for root in roots_of(states):
        root.release_idle()
    with torch.no_grad():
        for state in states:
            for group in state.groups:
                if group.offloads:
                    continue  # its shards are in host memory as it is
                users = group.pooled_tensors()
                pool = group.pool
                assert pool is not None, "no parameter is on the meta device"
                _park(sleeper, pool, pool, users)
        for tensor in _state_tensors(optimizer, device):
            memory = torch.empty(0, dtype=torch.uint8, device=device).set_(tensor.untyped_storage())
            _park(sleeper, tensor, memory, [])
    _synchronize(device)
    freed = 0
    for parked in sleeper.parked:
        freed += parked.tensor.untyped_storage().nbytes()
        for user, _ in parked.users:
            _C.detach_memory(user, _MESSAGE)
        _C.detach_memory(parked.tensor, _MESSAGE)
    sleeper.is_asleep = True
    _give_to_driver(device)
    return freed


@checked
def wake(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Undoes :func:`sleep`: every tensor has its values and its memory on the device again, at another address.

    Args:
        model: as given to :func:`sleep`.
        optimizer: not used; what slept with the model wakes with it. Taken so that both calls read alike.

    Raises:
        ValueError: ``model`` is not asleep.
    """
    sleeper = _sleepers.get(model)
    if sleeper is None or not sleeper.is_asleep:
        raise ValueError("fsdp2x.wake: the model is not asleep")
    device = unit_states(model)[0].ranks.device
    with torch.no_grad():
        while sleeper.parked:
            parked = sleeper.parked.pop()
            memory = torch.empty(parked.num_bytes, dtype=torch.uint8, device=device)
            sleeper.host.give(memory, parked.offset)
            _C.attach_to_pool(parked.tensor, memory, 0)
            for user, offset in parked.users:
                _C.attach_to_pool(user, parked.tensor, offset)
    _synchronize(device)
    sleeper.host.forget()
    sleeper.is_asleep = False


def _check(model: nn.Module, states: list[ShardedUnit]) -> None:
    if not states:
        raise ValueError("fsdp2x.sleep: the model is not sharded; call fully_shard on it first")
    for state in states:
        if state.root is not None and (state.root.in_forward or state.root.in_backward):
            raise RuntimeError("fsdp2x.sleep: a forward or backward of the model is running")
        for param in state.params:
            if param.is_wrapper:
                raise NotImplementedError(
                    f"fsdp2x.sleep: parameter {param.fqn!r} is a tensor subclass with memory of its own; move it "
                    "yourself"
                )
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ValueError(
                f"fsdp2x.sleep: parameter {name!r} has a gradient, which would be lost; run the optimizer and "
                "zero_grad(set_to_none=True) first"
            )


def _state_tensors(optimizer: torch.optim.Optimizer | None, device: torch.device) -> Iterator[torch.Tensor]:
    """One tensor for each storage on ``device`` in the optimizer's state."""
    seen = set()
    for param, state in optimizer.state.items() if optimizer is not None else ():
        if host_state(param) is not None:
            continue  # in host memory as it is
        for value in state.values():
            if not isinstance(value, torch.Tensor):
                continue
            local = torch_private.local_tensor(value) if isinstance(value, DTensor) else value
            storage = local.untyped_storage()
            if local.device != device or storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            yield local


def _park(sleeper: _Sleeper, tensor: torch.Tensor, memory: torch.Tensor, users: list) -> None:
    sleeper.parked.append(_Parked(tensor, sleeper.host.take(memory), memory.numel(), users))


def _give_to_driver(device: torch.device) -> None:
    collect_handed()  # buckets of pushes to engines
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
