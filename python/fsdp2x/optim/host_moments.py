"""Keeps moments of a device's parameters in CPU memory, and brings them to the device for their part of a step.

    copy_in     block 0 -> buffer 0 | block 1 -> buffer 1 | ... wait left 0 | block 2 -> buffer 0 | ..
    compute     wait arrived 0 | step its parameters | wait arrived 1 | step ..
    copy_out                     wait stepped 0 | buffer 0 -> block 0 | left 0 | ..
    host        enqueue .......................................................... wait for the last copy

A block is the memory of all moments of one unit's parameters. It belongs to the moments, the buffers to the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp2x.base.native import _C
from fsdp2x.optim.local import cut_like, local_tensor
from fsdp2x.optim.moments import MomentTensor
from fsdp2x.sharding import transport
from fsdp2x.sharding.offload import HostState, host_state

_NUM_BUFFERS = 2


@dataclass(frozen=True)
class Wanted:
    """The moments of one parameter: the tensors of its state in CPU memory."""

    param: Tensor
    pieces: tuple[MomentTensor, ...]


@dataclass(frozen=True)
class _Moment:
    param: Tensor
    piece: MomentTensor
    tensor: Tensor  # in the block
    offset: int


def block_bytes(members: Iterable[Wanted]) -> int:
    """Returns the bytes of the block of these moments."""
    return sum(_C.align_up(_local_bytes(one.param, piece)) for one in members for piece in one.pieces)


def _local_bytes(param: Tensor, piece: MomentTensor) -> int:
    numel = local_tensor(param).numel() if piece.numel is None else piece.numel
    return numel * piece.dtype.itemsize


def buffer_bytes(sizes: list[int]) -> int:
    """Returns the device memory of a step for blocks of these sizes. The largest go first and make the buffers."""
    return sum(sorted(sizes, reverse=True)[:_NUM_BUFFERS])


def step_bytes(wanted: list[Wanted]) -> int:
    """Returns the device memory of a step for these moments."""
    return buffer_bytes([block_bytes(members) for members in _by_block(wanted).values()])


def _by_block(wanted: list[Wanted]) -> dict[HostState, list[Wanted]]:
    members: dict[HostState, list[Wanted]] = {}
    for one in wanted:
        mark = host_state(one.param)
        assert mark is not None, "only marked parameters keep moments on the host"
        members.setdefault(mark, []).append(one)
    return members


def _in_pool(pool: Tensor, offset: int, param: Tensor, piece: MomentTensor) -> Tensor:
    if piece.numel is not None:
        return _C.tensor_in_pool(pool, offset, [piece.numel], piece.dtype)
    return cut_like(param, _C.tensor_in_pool(pool, offset, list(local_tensor(param).shape), piece.dtype))


class _Block:
    """The moments of parameters that are copied together."""

    def __init__(self, mark: HostState, members: list[Wanted]) -> None:
        self.members = members
        self.memory = torch.zeros(
            max(block_bytes(members), 1), dtype=torch.uint8, pin_memory=mark.pin_memory, device="cpu"
        )
        self.steps = _C.DeviceSteps()  # plans refer to the memory they step
        self.moments: list[_Moment] = []
        offset = 0
        for one in members:
            for piece in one.pieces:
                tensor = _in_pool(self.memory, offset, one.param, piece)
                self.moments.append(_Moment(one.param, piece, tensor, offset))
                offset += _C.align_up(_local_bytes(one.param, piece))

    def is_of(self, members: list[Wanted]) -> bool:
        return len(members) == len(self.members) and all(
            one.param is other.param and one.pieces == other.pieces
            for one, other in zip(members, self.members, strict=True)
        )

    def take_in(self, states: dict[Tensor, dict[str, Any]], stepped: set[int]) -> None:
        """Moves the states of parameters that have one, and of ``stepped`` ones, into this block."""
        for moment in self.moments:
            state = states.get(moment.param)
            if not state and id(moment.param) not in stepped:
                continue
            if not state:
                state = states[moment.param]
            if "step" not in state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            value = state.get(moment.piece.name)
            own = local_tensor(moment.tensor)
            if value is None:
                own.zero_()
            elif self._holds(value, moment):
                continue
            else:
                own.copy_(local_tensor(value))
            state[moment.piece.name] = moment.tensor

    def _holds(self, value: Tensor, moment: _Moment) -> bool:
        if value is not moment.tensor:
            return False
        own = local_tensor(value)
        return own.numel() == 0 or own.data_ptr() == self.memory.data_ptr() + moment.offset

    def on_device(self, buffer: Tensor, states: dict[Tensor, dict[str, Any]], stepped: set[int]) -> dict:
        """Returns the states of the ``stepped`` parameters with their moments in ``buffer``."""
        found: dict[Tensor, dict[str, Any]] = {}
        for moment in self.moments:
            if id(moment.param) not in stepped:
                continue
            state = found.setdefault(moment.param, {"step": states[moment.param]["step"]})
            state[moment.piece.name] = _in_pool(buffer, moment.offset, moment.param, moment.piece)
        return found


def selection(is_chosen: Callable[[Tensor], bool]) -> Callable[[int, list[Tensor]], list[Tensor]]:
    """Replaces parameters that are not chosen by a tensor without a gradient. The others keep their numbers."""
    nobody = torch.empty(0, device="cpu")
    return lambda group, params: [param if is_chosen(param) else nobody for param in params]


class HostMoments:
    """All blocks of one optimizer, and the streams that copy them."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._layers: dict[torch.device, Any] = {}

    def take_in(self, states: dict[Tensor, dict[str, Any]], wanted: list[Wanted]) -> None:
        """Moves the moments of marked parameters to CPU memory after a state was loaded."""
        for block in self._blocks_of(wanted):
            block.take_in(states, set())

    def step(
        self,
        states: dict[Tensor, dict[str, Any]],
        wanted: list[Wanted],
        run: Callable[[Callable[[int, list[Tensor]], list[Tensor]], dict, Any], None],
    ) -> None:
        """Steps the marked parameters that have a gradient, block by block.

        ``run(select, states, device_steps)`` steps the parameters that ``select(group, params)``, a ``selection``,
        keeps.
        """
        stepped = {id(one.param) for one in wanted if one.param.grad is not None}
        blocks = []
        for block in self._blocks_of(wanted):
            if any(id(one.param) in stepped for one in block.members):
                block.take_in(states, stepped)
                blocks.append(block)
        for device in dict.fromkeys(_device_of(block) for block in blocks):
            those = [block for block in blocks if _device_of(block) == device]
            if transport.has_streams(device):
                self._step_on(device, those, states, stepped, run)
            else:  # the model was moved to the CPU, so everything is there
                ours = {id(one.param) for block in those for one in block.members} & stepped
                run(selection(lambda param, ours=ours: id(param) in ours), states, those[0].steps)

    def _blocks_of(self, wanted: list[Wanted]) -> list[_Block]:
        members = _by_block(wanted)
        for mark, group in members.items():
            known = self._blocks.get(mark.group)
            if known is None or not known.is_of(group):
                self._blocks[mark.group] = _Block(mark, group)
        return [self._blocks[mark.group] for mark in members]

    def _step_on(self, device, blocks: list[_Block], states, stepped: set[int], run) -> None:
        if device not in self._layers:
            make = transport.layer_maker(device)
            assert make is not None, "an accelerator"
            layer = make()
            events = {
                name: [layer.make_event(f"{name} {i}") for i in range(_NUM_BUFFERS)]
                for name in ("moments arrived", "moments stepped", "moments left")
            }
            self._layers[device] = layer, layer.make_event("step began"), events
        layer, began, events = self._layers[device]
        compute, copy_in, copy_out = _C.Lane.compute, _C.Lane.copy_in, _C.Lane.copy_out
        blocks = sorted(blocks, key=lambda block: block.memory.numel(), reverse=True)
        num_buffers = min(len(blocks), _NUM_BUFFERS)
        buffers = [
            torch.empty(block.memory.numel(), dtype=torch.uint8, device=device) for block in blocks[:num_buffers]
        ]
        layer.record(began, compute)  # memory is new in the order of the compute stream
        layer.wait(copy_in, began)
        try:
            for number, block in enumerate(blocks):
                k = number % _NUM_BUFFERS
                buffer = buffers[k][: block.memory.numel()]
                if number >= _NUM_BUFFERS:
                    layer.wait(copy_in, events["moments left"][k])
                layer.transfer(copy_in, buffer, block.memory)
                layer.record(events["moments arrived"][k], copy_in)
                layer.wait(compute, events["moments arrived"][k])
                ours = {id(one.param) for one in block.members} & stepped
                chosen = selection(lambda param, ours=ours: id(param) in ours)
                run(chosen, block.on_device(buffer, states, stepped), block.steps)
                layer.record(events["moments stepped"][k], compute)
                layer.wait(copy_out, events["moments stepped"][k])
                layer.transfer(copy_out, block.memory, buffer)
                layer.record(events["moments left"][k], copy_out)
        finally:
            # The moments may be read when the step returns, and the buffers are freed in the order of compute.
            for k in range(num_buffers):
                layer.wait(compute, events["moments arrived"][k])
                layer.wait(compute, events["moments left"][k])
                layer.synchronize(events["moments left"][k])


def _device_of(block: _Block) -> torch.device:
    return local_tensor(block.members[0].param).device
