"""The device transport on the CPU. It records lanes and events, and checks them for the races of a real device.

On an accelerator the lanes are streams that run at any speed, and only events order them. The recorder runs
everything in host order and notes which operation touches which bytes, so the check does not depend on timing. If two
operations touch the same bytes and one of them writes, a chain of events must order them.
"""

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fsdp2x import FSDPModule
from fsdp2x.base import agreement
from fsdp2x.base.native import _C
from fsdp2x.lifecycle import api, comms, transport_choice
from fsdp2x.optim.adamw import AdamW
from fsdp2x.optim.host_moments import HostMoments
from fsdp2x.optim.local import local_tensor
from fsdp2x.sharding import transport
from models import Stack, inputs
from testing_extension import testing

# The engine's lanes, the host, and user streams other than the first one.
LANES = ("compute", "copy_in", "gather", "reduce", "all_reduce", "copy_out", "host", "compute1", "compute2")
KINDS = ("read", "write")
# Bytes that count as one. The smallest alignment of anything two lanes touch.
BLOCK = 16


def install(
    pack_below_bytes: int = 0,
    grouped: bool = True,
    with_kernels: bool = True,
    pieces: tuple[int, int] = _C.PIECES,
):
    """Device transports over gloo until the test body ends; returns the recorder of all of them.

    Parameters of less than `pack_below_bytes` are gathered packed, all of them without `grouped`. Plans run through the
    reference kernels, or through what stands in for these where the extension was built without nvcc. Reductions of
    more than `pieces[0]` bytes are cut into pieces of at most `pieces[1]`.
    """
    if isinstance(transport.layer_maker, mock.Mock):
        return transport.layer_maker.return_value()
    recorder = testing.RecordingLayer(with_kernels)
    mock.patch.object(transport, "layer_maker", mock.Mock(return_value=lambda: recorder)).start()
    check = api.check_transport
    as_group = {"streams": "process_group"}
    mock.patch.object(api, "check_transport", lambda name: check(as_group.get(name, name))).start()
    pack_below = pack_below_bytes if grouped else None
    mock.patch.object(transport, "pack_below_bytes", lambda gathers, world: pack_below).start()
    mock.patch.object(transport, "pieces", lambda: pieces).start()
    # After a failure, ranks that have used a device cannot use their group again. Later tests of these processes do.
    mock.patch.object(agreement, "_agreements", weakref.WeakKeyDictionary()).start()
    _defer_collectives(recorder)
    _note_collectives(recorder)
    _note_moments(recorder)
    users = Users(recorder)
    mock.patch.dict(torch_module._global_forward_pre_hooks, {"users": users.before_forward}).start()
    _after(torch.autograd, "backward", users.after_backward)
    _after(_C.Root, "finalize_backward", users.after_finalization)
    return recorder


def _after(owner: Any, name: str, note: Callable) -> None:
    """Calls ``note`` with the arguments of a function after it has returned."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args, **keywords):
        result = original(*args, **keywords)
        note(*args, **keywords)
        return result

    mock.patch.object(owner, name, call).start()


def _as_now(argument: Any) -> Any:
    """Tensors where they lie now: as on a device, their memory may be that of others when the work runs."""
    if isinstance(argument, list):
        return [_as_now(one) for one in argument]
    if not isinstance(argument, torch.Tensor) or argument.nbytes == 0:
        return argument
    memory = (ctypes.c_byte * argument.nbytes).from_address(argument.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(argument.dtype).view(argument.shape)


def _defer_collectives(recorder) -> None:
    """Runs collectives when it is their lane's turn, which is late after `recorder.delay`.

    The user's collectives and hooks may do anything on their lane, so all late work comes before them.
    """
    for owner, names in {
        transport: ("_all_gather_now", "_all_gather_group", "_reduce_scatter_now", "_all_to_all_now"),
        transport_choice: ("_all_reduce",),
    }.items():
        for name in names:
            original = getattr(owner, name)

            @functools.wraps(original)
            def call(*args, original=original) -> bool:
                recorder.defer(functools.partial(original, *map(_as_now, args)))
                return True

            mock.patch.object(owner, name, call).start()
    for owner, name in ((comms, "_call_hook"), (comms, "_gather_copies"), (comms, "_scatter_copies")):
        original = getattr(owner, name)

        @functools.wraps(original)
        def in_turn(*args, original=original):
            recorder.finish()
            return original(*args)

        mock.patch.object(owner, name, in_turn).start()


def _note_collectives(recorder) -> None:
    """Notes what the process groups' collectives, the user's, and hooks read and write."""

    def gather(*args) -> None:
        *_, output, source = args
        recorder.note_work("all_gather", [source], [output])

    def scatter(*args) -> None:
        *_, output, source, average = args
        recorder.note_work(f"reduce_scatter ({'average' if average else 'sum'})", [source], [output])

    _after(transport, "_all_gather_now", gather)
    _after(comms, "_gather_copies", gather)
    _after(
        transport, "_all_gather_group", lambda _, outputs, sources: recorder.note_work("all_gather", sources, outputs)
    )
    _after(transport, "_reduce_scatter_now", scatter)
    _after(comms, "_scatter_copies", scatter)
    _after(transport, "_all_to_all_now", lambda _, output, source: recorder.note_work("all_to_all", [source], [output]))
    _after(transport_choice, "_all_reduce", lambda *args: recorder.note_work("all_reduce", [args[2]], [args[2]]))
    _note_extensions(recorder)
    _after(comms, "_call_hook", lambda *args: recorder.note_work("hook", [args[2]], [args[2]]))


def _note_extensions(recorder) -> None:
    """Notes the memory of all-gather extensions, and what they read and write themselves."""

    def memory_of(gathers, name: str) -> list[torch.Tensor]:
        tensors = [one for _, param in gathers._extended() for one in getattr(param.extension, name)]
        return [one for one in tensors if one.untyped_storage().size()]

    def prepared(gathers) -> None:
        recorder.note_work("take", [], memory_of(gathers, "_sources"))
        recorder.note_work("pre_all_gather", [], memory_of(gathers, "_sources"))

    original = comms._ExtensionGathers.free

    def free(gathers) -> bool:
        recorder.note_work("give_back", [], memory_of(gathers, "_outputs"))
        return original(gathers)

    _after(comms._ExtensionGathers, "prepare", prepared)
    _after(comms._ExtensionGathers, "byte_pairs",
           lambda gathers: recorder.note_work("take", [], memory_of(gathers, "_outputs")))  # fmt: skip
    _after(comms._ExtensionGathers, "finish",
           lambda gathers: recorder.note_work("post_all_gather", memory_of(gathers, "_outputs"), []))  # fmt: skip
    mock.patch.object(comms._ExtensionGathers, "free", free).start()


def _note_moments(recorder) -> None:
    """Notes steps over moments from host memory, and that users may write to those between steps."""
    known: weakref.WeakSet = weakref.WeakSet()
    step_on = HostMoments._step_on

    def begin(self, device, blocks, *args) -> None:
        memory = [block.memory for block in blocks if block in known]
        recorder.note_work("moments", memory, memory, on_host=True)
        known.update(blocks)
        step_on(self, device, blocks, *args)

    def stepped(optimizer, grad_scale, select, states, on_device) -> None:
        if states is not optimizer.state:
            moments = [local_tensor(value) for state in states.values() for value in state.values()]
            recorder.note_work("step", moments, moments)

    mock.patch.object(HostMoments, "_step_on", begin).start()
    _after(AdamW, "_run", stepped)


class Users:
    """Notes that users read and write shards and gradients before a root's forward, and gradients after a backward.

    With manual finalization, users must not touch gradients from a backward on until it is finalized.
    """

    def __init__(self, recorder) -> None:
        self._recorder = recorder
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def before_forward(self, module: nn.Module, args: tuple) -> None:
        if not isinstance(module, FSDPModule):
            return
        root = module._get_fsdp_state().root
        if root is None:  # it becomes one
            self._roots.add(module)
        elif not (root.in_forward or root.in_backward):
            self._roots.add(module)
            self._note([module], with_shards=True)

    def after_backward(self, *args, **keywords) -> None:
        if torch._C._current_graph_task_id() == -1:  # not in a backward around it
            self._note(self._roots, with_shards=False)

    def after_finalization(self, root) -> None:
        self._note([one for one in self._roots if one._get_fsdp_state().root is root], with_shards=False)

    def _note(self, modules, with_shards: bool) -> None:
        states = {each._get_fsdp_state() for one in modules for each in one.modules() if isinstance(each, FSDPModule)}
        memory: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        for state in states:
            for group in state.groups if state.unit is not None else ():
                touched = memory[bool(group.offloads)]
                # A user who starts a gather ahead of forward must not write to its shards before it has ended.
                if with_shards and state.unit.param_state != "GATHERING":
                    touched.append(group.engine.pool)
                if not state.root.awaits_finalization:
                    grads = [param.param.grad for param in group.params]
                    touched += [local_tensor(grad) for grad in grads if grad is not None]
        for on_host, touched in memory.items():
            if touched:
                self._recorder.note_work("optimizer", touched, touched, on_host=on_host)


class Accesses:
    """The time of each lane's last read and last write of every block that a record touches."""

    def __init__(self, entries: list[tuple]) -> None:
        ranges = {one for entry in entries for kind in entry[3:5] for one in kind if one[1]}
        spans = [np.arange(start // BLOCK, (start + size - 1) // BLOCK + 1) for start, size in ranges]
        self._blocks = np.unique(np.concatenate(spans)) if spans else np.empty(0, dtype=np.int64)
        self._last = {kind: np.zeros((len(LANES), len(self._blocks)), dtype=np.int64) for kind in KINDS}
        self._slices: dict[tuple[int, int], slice] = {}

    def _slice(self, one: tuple[int, int]) -> slice:
        if one not in self._slices:
            address, size = one
            ends = np.searchsorted(self._blocks, [address // BLOCK, (address + size - 1) // BLOCK + 1])
            self._slices[one] = slice(*ends.tolist())
        return self._slices[one]

    def latest(self, kind: str, ranges: list[tuple[int, int]]) -> list[int]:
        """When each lane last did `kind` to any of these bytes; 0: never."""
        last = self._last[kind]
        times = [last[:, self._slice(one)].max(axis=1) for one in ranges if one[1]]
        return np.max(times, axis=0).tolist() if times else [0] * len(LANES)

    def forget(self, ranges: list[tuple[int, int]]) -> None:
        """Memory that is taken has no past: what it was used for before was judged when it was given back."""
        for last in self._last.values():
            for one in ranges:
                if one[1]:
                    last[:, self._slice(one)] = 0

    def set(self, kind: str, lane: str, ranges: list[tuple[int, int]], time: int) -> None:
        row = self._last[kind][LANES.index(lane)]
        for one in ranges:
            if one[1]:
                row[self._slice(one)] = time


class Capture:
    """A graph capture. Its streams must first wait for the captured stream, which must wait for them at the end."""

    def __init__(self, lane: str, clocks: dict[str, dict[str, int]]) -> None:
        self._lane = lane
        latest = {other: clocks[other][other] for other in LANES}
        for clock in clocks.values():  # torch waits for the device before a capture
            clock.update(latest)
        clocks[lane][lane] += 1
        self._begin = clocks[lane][lane]
        self._last: dict[str, int] = {}

    def fault_of(self, operation: str, lane: str, clock: dict[str, int]) -> str | None:
        """Returns what is wrong with work on a lane. The lane's clock has the work that it has waited for."""
        if lane == "host":
            return f"the host waits for {operation} while a graph is captured" if operation == "wait" else None
        self._last[lane] = clock[lane]
        left_out = lane != self._lane and clock[self._lane] < self._begin
        return f"{operation} on {lane} runs while a graph is captured, and is not in it" if left_out else None

    def faults_at_end(self, clocks: dict[str, dict[str, int]]) -> list[str]:
        late = [lane for lane, time in self._last.items() if clocks[self._lane][lane] < time]
        return [f"{lane} is not joined to {self._lane} when its capture ends" for lane in late]


def races(entries: list[tuple]) -> list[str]:
    """Pairs of operations on different lanes that touch the same bytes and are not ordered; by vector clocks.

    And work that a capture would lose. Memory that was given back while another lane holds it waits for that one.
    """
    clocks = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
    names: dict[str, list[str]] = {lane: [""] for lane in LANES}  # by time
    events: dict[str, dict[str, int]] = {}
    holds: dict[tuple[int, int], list[str]] = {}
    accesses = Accesses(entries)
    capture: Capture | None = None
    found = []

    def join(clock: dict[str, int], other: dict[str, int]) -> None:
        for lane, time in other.items():
            clock[lane] = max(clock[lane], time)

    for operation, lane, subject, reads, writes in entries:
        clock = clocks[lane]
        if operation == "begin_capture":
            capture = Capture(lane, clocks)
            names[lane].append("the beginning of a capture")
        elif operation == "end_capture":
            found.extend(capture.faults_at_end(clocks))
            capture = None
        elif operation == "record":
            events[subject] = dict(clock)
        elif operation == "wait":
            join(clock, events.get(subject, {}))
            if capture is not None and lane == "host":
                found.append(capture.fault_of("wait", lane, clock))
        elif operation == "hold":
            for one in reads:
                holds.setdefault(one, []).append(lane)
        if operation in NO_WORK:
            continue
        if lane != "host":
            # Work that the host enqueues comes after all that it has done and waited for.
            join(clock, clocks["host"])
        clock[lane] += 1
        names[lane].append(f"{operation} {subject}")
        known = dict(clock)
        if operation == "take":
            accesses.forget(writes)
        elif operation == "give_back":
            for one in writes:
                for holder in holds.pop(one, ()):
                    join(known, clocks[holder])
        elif capture is not None and (fault := capture.fault_of(operation, lane, clock)):
            found.append(fault)
        for kind, ranges, against in (("read", reads, ("write",)), ("write", writes, ("read", "write"))):
            for before in against:
                for other, time in zip(LANES, accesses.latest(before, ranges), strict=True):
                    if other != lane and time > known[other]:
                        found.append(
                            f"{operation} {subject} on {lane} {kind}s what {names[other][time]} on {other} {before}s, "
                            "and nothing orders them"
                        )
        accesses.set("read", lane, reads, clock[lane])
        accesses.set("write", lane, writes, clock[lane])
    return found


def without_waits(entries: list[tuple], lane: str, event: str) -> list[tuple]:
    """The record of an engine that forgot to let `lane` wait for events whose name holds `event`."""
    return [entry for entry in entries if not (entry[0] == "wait" and entry[1] == lane and event in entry[2])]


def every_wait_is_needed(entries: list[tuple], kinds: dict[tuple[str, str], str]) -> None:
    """Without any one kind of wait, (lane, event): what would go wrong, the record has a race."""
    for (lane, event), why in kinds.items():
        broken = without_waits(entries, lane, event)
        assert len(broken) < len(entries), (lane, event)
        assert races(broken), f"not found: {why}"


# Entries that touch no memory: for records of order only. "skip": a wait across the border of a capture, which is none.
NO_WORK = ("record", "wait", "skip", "hold", "begin_capture", "end_capture")
# Entries that are no work of a lane.
MARKS = (*NO_WORK, "take", "give_back", "read plan")


def on(entries: list[tuple], *lanes: str) -> list[tuple]:
    """The operations on some lanes, without marks: (operation, lane, subject)."""
    return [entry[:3] for entry in entries if entry[1] in lanes and entry[0] not in MARKS]


# The model that tests of the transport train.
WIDTH = 16  # rows of 64 bytes: chunks are aligned wherever ranks cut them


def wide(num: int = 3) -> Stack:
    return Stack(num=num, width=WIDTH, hidden=20)


class Experts(nn.Module):
    """Each rank uses one of three experts in a step: the others get no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](x)


def step(model, ctx, number: int = 0, optimizer=None) -> None:
    model(inputs(ctx.rank, number, width=WIDTH)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def results_of_steps(ctx, model, around=contextlib.nullcontext) -> list[torch.Tensor]:
    """Losses and gradients of three steps with SGD, of two forwards each, `around` which a context may be."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, held = [], []
    for number in range(3):
        with around():
            losses = [model(inputs(ctx.rank, number + part, width=WIDTH)).float().square().mean() for part in range(2)]
        for loss in reversed(losses):
            loss.backward()
        held += [param.grad for param in model.parameters()]  # work that is late may write to them
        found += [*losses, *(param.grad.to_local().clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    install().finish()
    return [one.detach() for one in found]


def same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def record_of_steps(ctx, recorder, model, num: int = 3) -> list[tuple]:
    """The record of `num` steps with an optimizer, all of them after the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, ctx, 0, optimizer)
    recorder.clear()
    for number in range(1, num + 1):
        step(model, ctx, number, optimizer)
    return recorder.entries
