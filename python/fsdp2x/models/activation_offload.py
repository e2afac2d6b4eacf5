"""``offload_activations``: keeps what forward saves for backward in CPU memory, and brings it back before its use.

    compute     forward 0 | forward 1 | wait left 0, forward 2 | forward 3 | backward 3 | backward 2 | wait here 1, ...
    copy_out              | group 0 -> host | group 1 -> host  | group 2 -> host
    copy_in                                                                             | host -> group 1 | ...

A group is all that one forward saves from the beginning of a unit to that of the next one. It leaves when the next unit
begins, and its device memory is free one unit later. So the last two groups are on the device when backward begins. In
backward a group arrives while the one after it is used. Saved tensors own their group, which only knows them weakly.
So autograd frees all of it with its graph.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.native import _C
from fsdp2x.lifecycle.tree import running_step, units_of
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.sharding import transport

_ATTRIBUTE = "_fsdp2x_activation_offload"


@checked
def offload_activations(model: nn.Module, min_bytes: int = 1 << 16) -> int:
    """Keeps the activations of ``model`` in pinned CPU memory between forward and backward.

    It acts at every later forward of ``model``. Copies run on separate streams while other units compute. Results are
    the same bits as without it. Call it after ``fully_shard``; a second call changes ``min_bytes``. With activation
    checkpointing, only the inputs that checkpoints save are offloaded. On CPU ranks there is nothing to offload, and
    the call changes nothing.

    Args:
        model: a module with units of ``fully_shard``.
        min_bytes: smaller tensors stay on the device.

    Returns:
        The number of units whose activations are offloaded, 0 on CPU ranks.

    Raises:
        ValueError: nothing in ``model`` is sharded, or ``min_bytes`` is negative.
        RuntimeError: a forward or backward is running. Later, in forward, if a tensor is modified in place after
            autograd has saved it.
    """
    if min_bytes < 0:
        raise ValueError(f"fsdp2x.offload_activations: min_bytes must be at least 0, got {min_bytes}")
    states = units_of(model, "offload_activations")
    if running_step(model) is not None:
        raise RuntimeError(
            "fsdp2x.offload_activations: a forward or backward of this model is running. Call it between two steps."
        )
    device = states[0].ranks.device
    make_layer = transport.layer_maker(device)
    if make_layer is None:
        return 0
    offload = getattr(model, _ATTRIBUTE, None)
    if offload is None:
        # The streams are not those of the engine, whose gathers would wait for activations there.
        offload = _Offload(device, make_layer())
        setattr(model, _ATTRIBUTE, offload)
        model.register_forward_pre_hook(torch_private.outside_graphs(offload.begin), with_kwargs=True)
        model.register_forward_hook(torch_private.outside_graphs(offload.end), always_call=True)
    offload.min_bytes = min_bytes
    for state in states:
        offload.watch(state)
    return len(states)


class _Phase(enum.Enum):
    OPEN = "on the device, forward adds to it"
    LEAVING = "on its way to the host, and still on the device"
    AWAY = "on the host"
    ARRIVING = "on its way back"
    HERE = "on the device until its last use, and on the host"


class _Saved:
    """The memory of one or several tensors that autograd has saved."""

    __slots__ = ("__weakref__", "group", "host", "memory", "num_uses", "source", "version")

    def __init__(self, group: _Group, source: Tensor, version: int | None) -> None:
        self.group, self.num_uses = group, 0
        self.source: Tensor | None = source  # until it leaves
        self.version = version  # None: it is a copy, which no user modifies
        storage = source.untyped_storage()
        self.memory: Tensor | None = _tensor_in(storage, torch.uint8, 0, (storage.nbytes(),), (1,))  # on the device
        self.host: Tensor | None = None

    def check_version(self) -> None:
        if self.source is not None and self.version is not None:
            _check_version(self.source, self.version)


class _View:
    """A tensor that autograd has saved, with its strides, because kernels may round otherwise with others."""

    __slots__ = ("place", "saved")

    def __init__(self, saved: _Saved, tensor: Tensor) -> None:
        self.saved = saved
        self.place = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        saved.num_uses += 1

    def unpack(self) -> Tensor:
        saved = self.saved
        memory = saved.group.give(saved)
        saved.num_uses -= 1
        if saved.host is None:
            saved.check_version()
        elif saved.num_uses <= 0:
            saved.memory = None
        return _tensor_in(memory.untyped_storage(), *self.place)


class _Group:
    """What one forward has saved in one unit."""

    def __init__(self, layer: Any, before: _Group | None, pins: bool) -> None:
        self.phase = _Phase.OPEN
        self._layer, self._pins = layer, pins
        self._before = None if before is None else weakref.ref(before)
        self._saved: list[weakref.ref[_Saved]] = []
        self._known: dict[tuple, tuple[int, weakref.ref[_Saved]]] = {}  # by storage, or its part, with its version
        self._in_flight: list[Tensor] = []  # device memory that a copy reads or writes
        self._landed = layer.make_event("activations")

    def __del__(self) -> None:
        if self._in_flight:
            self._land(_Phase.HERE)

    @property
    def is_empty(self) -> bool:
        return not self._saved

    def add(self, tensor: Tensor) -> _View:
        """Returns the record of a tensor. Views of one tensor, and an input of several operations, are copied once."""
        storage = tensor.untyped_storage()
        key: tuple = (storage._cdata,)
        is_part = storage.nbytes() > 2 * tensor.nbytes
        if is_part:
            key = (*key, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        version, saved = self._known.get(key, (None, None))
        found = None if saved is None or version != tensor._version else saved()
        if found is None:
            source = tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor
            found = _Saved(self, source, None if is_part else tensor._version)
            self._known[key] = tensor._version, weakref.ref(found)
            self._saved.append(weakref.ref(found))
        assert found.source is not None, "the group has not left"
        return _View(found, found.source if is_part else tensor)

    def leave(self) -> None:
        """Begins to copy the tensors to the host."""
        pairs = [(one, one.memory) for one in self._alive() if one.memory is not None]
        sizes = [_C.align_up(memory.nbytes) for _, memory in pairs]
        host = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=self._pins)
        self._follow_compute(_C.Lane.copy_out)
        for (one, memory), part in zip(pairs, host.split(sizes), strict=True):
            one.check_version()
            one.host, one.source = part[: memory.nbytes], None
            self._layer.transfer(_C.Lane.copy_out, one.host, memory)
            self._in_flight.append(memory)
        self._layer.record(self._landed, _C.Lane.copy_out)
        self._known.clear()
        self.phase = _Phase.LEAVING

    def release(self) -> None:
        """Frees the device memory once the copies to the host have ended."""
        if self.phase is _Phase.LEAVING:
            self._land(_Phase.AWAY)
            for one in self._alive():
                one.memory = None

    def fetch(self) -> None:
        """Begins to copy the tensors back to the device if they are not there."""
        if self.phase is not _Phase.AWAY:
            return
        self._upload(self._alive())
        self.phase = _Phase.ARRIVING

    def give(self, saved: _Saved) -> Tensor:
        """Returns memory in the order of the current stream, and begins to fetch the group before."""
        self.fetch()
        if self.phase in (_Phase.LEAVING, _Phase.ARRIVING):
            self._land(_Phase.HERE)
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        if saved.memory is None:  # a graph that is kept for another backward
            self._upload([saved])
            self._land(_Phase.HERE)
        assert saved.memory is not None, "it has arrived"
        return saved.memory

    def _upload(self, saved: list[_Saved]) -> None:
        pairs = [(one, one.host) for one in saved if one.host is not None]
        for one, host in pairs:
            one.memory = torch.empty(host.numel(), dtype=torch.uint8, device=self._layer.device)
            self._in_flight.append(one.memory)
        self._follow_compute(_C.Lane.copy_in)
        for one, host in pairs:
            self._layer.transfer(_C.Lane.copy_in, one.memory, host)
        self._layer.record(self._landed, _C.Lane.copy_in)

    def _alive(self) -> list[_Saved]:
        return [saved for weak in self._saved if (saved := weak()) is not None]

    def _follow_compute(self, lane: Any) -> None:
        # Device memory is taken and given back in the order of the compute stream.
        event = self._layer.make_event("activations begin")
        self._layer.record(event, _C.Lane.compute)
        self._layer.wait(lane, event)

    def _land(self, phase: _Phase) -> None:
        """Lets the compute stream wait for the copies, whose device memory others may use then."""
        self._layer.wait(_C.Lane.compute, self._landed)
        self._in_flight.clear()
        self.phase = phase


class _Offload:
    """The hooks of one model. They hold no module."""

    min_bytes = 0

    def __init__(self, device: torch.device, layer: Any) -> None:
        self._device, self._layer = device, layer
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None  # while its forward runs
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._states: list[weakref.ref[ShardedUnit]] = []
        self._units: list[int] = []  # the root's number, and that of the unit that runs
        self._weights: set[int] = set()  # storages of their gathered parameters
        self._group: _Group | None = None
        self._leaving: deque[weakref.ref[_Group]] = deque()

    def watch(self, state: ShardedUnit) -> None:
        """Begins a group when a module of the unit does."""
        number = len(self._states)  # Dynamo mistakes a weak reference in a closure for its object
        self._states.append(weakref.ref(state))
        for module in state.modules:
            if module not in self._watched:
                self._watched.add(module)
                begin = torch_private.outside_graphs(lambda *_: self._begin_unit(number))
                module.register_forward_pre_hook(begin, with_kwargs=True)

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        # A checkpoint around the model, and hooks of the user, decide what is saved.
        if self._hooks is None and torch.is_grad_enabled() and not torch_private.has_saved_tensors_hooks():
            self._units, self._group = self._units[:1], None
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()

    def end(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._hooks is not None:
            hooks, self._hooks, self._group = self._hooks, None, None
            hooks.__exit__()

    def _begin_unit(self, number: int) -> None:
        if self._hooks is None:
            return
        before = self._group
        if before is not None and not before.is_empty:
            before.leave()
            self._leaving.append(weakref.ref(before))
        while len(self._leaving) > 1:
            earlier = self._leaving.popleft()()
            if earlier is not None:
                earlier.release()
        self._units, self._weights = [*self._units[:1], number], set()
        if before is None or not before.is_empty:
            self._group = _Group(self._layer, before, self._device.type != "cpu")

    @torch_private.never_compiled
    def _pack(self, tensor: Tensor) -> _View | tuple[Tensor, int | None]:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor, None
        if self._group is None or tensor.device != self._device or tensor.nbytes < max(self.min_bytes, 1):
            return tensor, tensor._version
        if not self._weights:
            states = [self._states[number]() for number in self._units]
            self._weights = {storage for state in states if state is not None for storage in _weights_of(state)}
        if tensor.untyped_storage()._cdata in self._weights:
            return tensor, None  # gathers write to them
        return self._group.add(tensor)


@torch_private.never_compiled
def _unpack(packed: _View | tuple[Tensor, int | None]) -> Tensor:
    if isinstance(packed, _View):
        return packed.unpack()
    tensor, version = packed
    if version is not None:
        _check_version(tensor, version)
    return tensor


def _check_version(tensor: Tensor, version: int) -> None:
    """Autograd itself does not check what hooks have packed."""
    if tensor._version != version:
        raise RuntimeError(
            f"fsdp2x.offload_activations: a tensor of shape {tuple(tensor.shape)} was modified in place after autograd "
            "had saved it for backward. Use the operation that is not in place."
        )


def _weights_of(state: ShardedUnit) -> set[int]:
    """Returns the storages of the gathered parameters. They live in the engine's memory, which has its own rules."""
    owners = [owner for group in state.groups for param in group.params for owner in param.owners]
    tensors = [module._parameters.get(name) for module, name in owners]
    gathered = [tensor for tensor in tensors if tensor is not None and not isinstance(tensor, DTensor)]
    return {tensor.untyped_storage()._cdata for tensor in gathered}


def _tensor_in(storage: Any, dtype: torch.dtype, offset: Any, shape: Any, strides: Any) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
