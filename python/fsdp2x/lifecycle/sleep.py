"""``sleep`` and ``wake``: move a model and its optimizer to CPU memory and back, to free the device for other work.

Reinforcement learning uses them to alternate training and generation on one device. The values wait in pinned CPU
memory that is kept for the next time. Parameters, gradients and optimizer state keep their Python objects. Torch's
allocator returns its free memory to the driver.
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
from fsdp2x.lifecycle.tree import roots_of, unit_states, units_of
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.sharding.offload import host_state

_MESSAGE = "fsdp2x: this tensor's model is asleep, so it has no memory. Call fsdp2x.wake(model, optimizer) first."


# Size of a block of CPU memory. A power of two, because torch rounds page-locked memory up to one.
BLOCK_BYTES = 64 * 2**20


class _HostBytes:
    """CPU memory that grows by blocks, addressed from byte 0 on. A copy may span several blocks."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used = 0

    def take(self, memory: torch.Tensor) -> int:
        """Appends a copy of ``memory``, in the order of the current stream. Returns its offset."""
        offset = self._used
        self._used += _C.align_up(memory.numel())
        while len(self._blocks) * BLOCK_BYTES < self._used:
            is_pinned = memory.device.type == "cuda"
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=is_pinned, device="cpu"))
        for host, part in self._pieces(memory, offset):
            host.copy_(part, non_blocking=host.is_pinned())
        return offset

    def give(self, memory: torch.Tensor, offset: int) -> None:
        """Copies the bytes from ``offset`` on to ``memory``, in the order of the current stream."""
        for host, part in self._pieces(memory, offset):
            part.copy_(host, non_blocking=host.is_pinned())

    def forget(self) -> None:
        """Forgets all bytes. The blocks stay for the next ones."""
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
    """One storage without memory: a tensor over it, and the offset of its bytes in CPU memory."""

    tensor: torch.Tensor
    offset: int
    num_bytes: int
    users: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # tensors in a pool, and their offsets


@dataclass
class _Sleeper:
    """State that a model keeps between its sleeps."""

    parked: list[_Parked] = field(default_factory=list)
    host: _HostBytes = field(default_factory=_HostBytes)
    is_asleep: bool = False


_sleepers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@checked
def sleep(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Moves parameters and optimizer state to CPU memory to free the GPU. ``wake`` moves them back.

    It also frees the memory that the engine keeps between steps (gather, reduction and gradient buffers), and torch's
    allocator returns its free memory to the driver. Using a parameter of a sleeping model raises an error. On a CPU
    mesh it works too, but saves nothing.

    Call it on every rank. It is collective only with symmetric memory of torch 2.15
    (:meth:`FSDPModule.set_symm_mem_for_comm`). The first call pins CPU memory, which takes seconds for tens of GiB and
    blocks all streams of the device. Later calls reuse that memory.

    Two kinds of memory stay: cuBLAS workspaces (``torch._C._cuda_clearCublasWorkspaces()`` frees them), and
    memory that an engine still has from a push.

    Args:
        model: a module sharded by ``fully_shard``, not in forward or backward.
        optimizer: an optimizer whose state on the model's device moves too. None: its state stays.

    Returns:
        Bytes of shards and optimizer state that were freed. The engine's buffers are not included.

    Raises:
        ValueError: ``model`` is not sharded, has gradients, or is asleep.
        RuntimeError: a forward or backward is running, or the averages of an ``EMA`` are swapped in.
        NotImplementedError: a parameter is a tensor subclass with its own memory.
    """
    states = units_of(model, "sleep")
    refuse_swapped("fsdp2x.sleep", model.parameters())
    _check(model, states)
    sleeper = _sleepers.setdefault(model, _Sleeper())
    if sleeper.is_asleep:
        raise ValueError("fsdp2x.sleep: the model is already asleep. Call fsdp2x.wake first.")
    device = states[0].ranks.device
    for state in states:
        state.reshard()
    for root in roots_of(states):
        root.release_idle()
    with torch.no_grad():
        for state in states:
            for group in state.groups:
                if group.offloads:
                    continue  # its shards already are in CPU memory
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
    collect_handed()  # buckets that were pushed to engines
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    return freed


@checked
def wake(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Undoes :func:`sleep`: every tensor has its values and its memory on the device again, at a new address.

    Args:
        model: the model that :func:`sleep` got.
        optimizer: not used, because what slept with the model wakes with it. Accepted so that both calls look alike.

    Raises:
        ValueError: ``model`` is not asleep.
    """
    sleeper = _sleepers.get(model)
    if sleeper is None or not sleeper.is_asleep:
        raise ValueError("fsdp2x.wake: the model is not asleep. Call fsdp2x.sleep first.")
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
    for state in states:
        if state.is_running:
            raise RuntimeError(
                "fsdp2x.sleep: a forward or backward of the model is running. Call sleep between two steps."
            )
        for param in state.params:
            if param.is_wrapper:
                raise NotImplementedError(
                    f"fsdp2x.sleep: parameter {param.fqn!r} is a tensor subclass with its own memory. Move it yourself."
                )
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ValueError(
                f"fsdp2x.sleep: parameter {name!r} has a gradient, which would be lost. Run the optimizer and "
                "zero_grad(set_to_none=True) first."
            )


def _state_tensors(optimizer: torch.optim.Optimizer | None, device: torch.device) -> Iterator[torch.Tensor]:
    """Yields one tensor for each storage on ``device`` in the optimizer's state."""
    seen = set()
    for param, state in optimizer.state.items() if optimizer is not None else ():
        if host_state(param) is not None:
            continue  # already in CPU memory
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


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
