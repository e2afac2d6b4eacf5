"""Applies communication settings beyond the transport: extensions, custom collectives and hooks, wire formats."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x.base.agreement import agreement_of
from fsdp2x.base.annotations import skips_checks
from fsdp2x.base.collectives import Gather, all_gather, all_to_all, explained, gather_packed, reduce_scatter, wait
from fsdp2x.base.native import _C
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.sharding.mesh import reduction_group
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.sharded_param import unsharded_parameter
from fsdp2x.sharding.transport import device_reduction

_CPU = torch.device("cpu")
_SUM, _AVERAGE = dist.ReduceOp.SUM, dist.ReduceOp.AVG  # enums are slow to look up


def connect(group: ShardedParamGroup) -> None:
    """Gives the engine's group its callables. Called when the group is made and when it moves to another root."""
    if not group.keeps_shards_apart and all(param.extension is None for param in group.params):
        return
    engine, gathers = group.engine, _ExtensionGathers(group)
    assert engine is not None, "the group is made before it is connected"
    engine.begin_extension_gather = gathers.begin
    engine.finish_extension_gather = gathers.finish
    engine.free_extension_gather = gathers.free
    group.extension_gathers = gathers


class _ExtensionGathers:
    """Extensions and aliases of one group. Holds parameters weakly, because the engine must not refer to modules.

    Over a process group the extensions' inputs travel with the engine's segment in one collective. With shared memory,
    or if the engine gathers nothing, they travel in a separate one. On a device, the engine calls ``prepare`` on the
    stream that casts shards, and gathers ``byte_pairs`` on the gather stream, together with its own.
    """

    def __init__(self, group: ShardedParamGroup) -> None:
        self._group: Any = weakref.ref(group)  # it lives as long as the engine calls this object
        self._policy = group.policy
        self._work: Any = None

    def _extended(self):
        for index, param in enumerate(self._group().params):
            if param.extension is not None:
                yield index, param

    @property
    def overlaps(self) -> bool:
        """Whether the engine gathers the inputs of extensions, on streams of a device."""
        group = self._group()
        return group.engine.has_streams and group.ranks.world > 1 and any(self._extended())

    @torch.no_grad()
    def prepare(self) -> bool:
        for _, param in self._extended():
            frozen = not param.param.requires_grad
            param.extension.prepare(param.local, param.owners[0][0], self._policy, is_frozen=frozen)
        return True

    @torch.no_grad()
    def byte_pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the outputs and inputs of the gathers, as bytes."""
        pairs = [pair for _, param in self._extended() for pair in param.extension.pairs() if pair[1].numel()]
        outputs, sources = zip(*pairs, strict=True) if pairs else ((), ())
        return [one.view(torch.uint8) for one in outputs], [one.view(torch.uint8) for one in sources]

    def _begin(self, gather: Gather, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.prepare()
        pairs += [pair for _, param in self._extended() for pair in param.extension.pairs()]
        ranks = self._group().ranks
        self._work = gather_packed(gather, ranks.world, ranks.rank, pairs) if pairs else None

    @torch.no_grad()
    def all_gather(self, gather: Gather, output: torch.Tensor, source: torch.Tensor) -> Any:
        """Gathers the engine's segment together with the extensions' inputs."""
        self._begin(gather, [(output, source)])
        return self._work

    @torch.no_grad()
    def begin(self) -> bool:
        """Runs before the engine reads its pool."""
        group = self._group()
        group.refresh_aliases()
        travel_with_ours = group.transport.is_collective and group.ranks.world > 1 and group.engine.slot_bytes > 0
        if not travel_with_ours and not self.overlaps:
            self._begin(skips_checks(all_gather, group.ranks.group), [])
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
                dtype = self._policy.param_dtype or param.param.dtype
                tensor = param.extension.finish(param.local, dtype)
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
    """Passes the user's collectives and hooks to the engine's groups of ``state``."""
    check_wire_formats(state)
    custom = state.comms
    for group in state.groups:
        engine = group.engine
        assert engine is not None, "the group is made before it is connected"
        hook = custom.all_reduce_hook
        engine.all_reduce_hook = hook and functools.partial(_call_hook, hook, custom.all_reduce_hook_stream)
        if group.is_replicated:
            continue
        ranks: Any = group.ranks.group
        works_in_theirs = not engine.has_streams and group.extension_gathers is None
        engine.gather_memory = _memory_of("all_gather", custom.all_gather) if works_in_theirs else None
        call = _custom_gather if works_in_theirs else _gather_copies
        gather = custom.all_gather and functools.partial(call, custom.all_gather, ranks)
        extensions = group.extension_gathers
        if extensions is not None and not engine.has_streams:
            gather = gather or skips_checks(all_gather, ranks)
            gather = functools.partial(extensions.all_gather, gather)
        engine.all_gather = gather
        overlaps = extensions is not None and extensions.overlaps
        engine.prepare_extensions = extensions.prepare if overlaps else None
        engine.extension_gathers = extensions.byte_pairs if overlaps else None
        reduction = separate = exchange = None  # the transport's own
        if custom.separate_reduction:
            ranks = reduction_group(group.ranks)
        engine.reduce_memory = None if engine.has_streams else _memory_of("reduce_scatter", custom.reduce_scatter)
        if custom.reduce_scatter is not None:
            call = _scatter_copies if engine.has_streams else _custom_scatter
            reduction = functools.partial(call, custom.reduce_scatter, ranks)
        elif custom.separate_reduction and engine.has_streams:
            separate = device_reduction(ranks)
        elif custom.separate_reduction:
            if (agreement := agreement_of(group.ranks.group)) is not None:
                agreement.separate_group = ranks
            separate = skips_checks(reduce_scatter, ranks)
            exchange = skips_checks(all_to_all, ranks)
        engine.reduce_scatter = reduction
        engine.separate_reduce_scatter, engine.separate_all_to_all = separate, exchange


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


# A custom object may demand its own memory (`allocate`, for registered or symmetric buffers). On a CPU the engine works
# in it. On a device, and with extensions, the engine's staging is copied there and back.
def _memory_of(name: str, comm: Any) -> tuple[Any, Callable] | None:
    """Returns what the engine needs to allocate memory of ``comm``, for ``set_custom_<name>``."""
    return None if comm is None else (comm, functools.partial(_check_memory, name))


def _allocate(name: str, comm: Any, like: torch.Tensor) -> torch.Tensor:
    memory = comm.allocate((like.numel(),), dtype=like.dtype, device=like.device)
    _check_memory(name, memory, like.numel(), like.dtype, like.device)
    return memory


def _check_memory(name: str, memory: Any, numel: int, dtype: torch.dtype, device: torch.device = _CPU) -> bool:
    if not isinstance(memory, torch.Tensor):
        found = repr(memory)
    elif memory.shape != (numel,) or memory.dtype != dtype or memory.device != device or not memory.is_contiguous():
        found = f"a {memory.dtype} tensor of shape {tuple(memory.shape)}, strides {memory.stride()} on {memory.device}"
    else:
        return True
    raise ValueError(
        f"fsdp2x.FSDPModule.set_custom_{name}: allocate must return a contiguous {dtype} tensor of shape ({numel},) on "
        f"{device}, got {found}"
    )


def _custom_gather(comm: Any, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor) -> Any:
    return comm(output_tensor=output, input_tensor=source, group=group, async_op=False)


def _custom_scatter(comm: Any, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, average: bool):
    op = _AVERAGE if average else _SUM
    return comm(output_tensor=output, input_tensor=source, group=group, op=op, async_op=False)


def _gather_copies(comm: Any, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor) -> None:
    theirs = _allocate("all_gather", comm, output)
    mine = theirs.narrow(0, group.rank() * source.numel(), source.numel())
    mine.copy_(source)
    wait(_custom_gather(comm, group, theirs, mine))
    output.copy_(theirs)


def _scatter_copies(comm: Any, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, average: bool):
    theirs_in = _allocate("reduce_scatter", comm, source)
    theirs_in.copy_(source)
    theirs_out = _allocate("reduce_scatter", comm, output)
    wait(_custom_scatter(comm, group, theirs_out, theirs_in, average))
    output.copy_(theirs_out)


def own_collective(caller: str, comm: Any) -> Any:
    """Returns ``comm`` if it is a collective or None, else raises TypeError."""
    if comm is not None and not (callable(comm) and hasattr(comm, "allocate")):
        raise TypeError(
            f"fsdp2x.FSDPModule.{caller}: comm must be a collective with __call__ and allocate, or None, got {comm!r}"
        )
    return comm


# --- wire formats: the dtypes in which weights and gradients travel ---

_PLAIN = _C.WireFormat.plain
WEIGHTS = {"int8": _C.WireFormat.int8, "fp8": _C.WireFormat.fp8}
GRADIENTS = {"int8": _C.WireFormat.int8, "bfloat16": _C.WireFormat.bf16}


def wire_formats_of(caller: str, weights: str | None, gradients: str | None) -> tuple[Any, Any]:
    """Returns the engine's formats for their names. None means the compute dtype, or the reduce dtype.

    Raises:
        ValueError: a name is unknown.
    """
    for what, name, known in (("weights", weights, WEIGHTS), ("gradients", gradients, GRADIENTS)):
        if name is not None and name not in known:
            raise ValueError(f"{caller}: {what} is {name!r}, expected {', '.join(map(repr, known))} or None")
    return WEIGHTS.get(weights or "", _PLAIN), GRADIENTS.get(gradients or "", _PLAIN)


def uses_wire_formats(options: _C.UnitOptions) -> bool:
    return options.wire_weights != _PLAIN or options.wire_gradients != _PLAIN


def wire_names_of(options: _C.UnitOptions) -> tuple[str | None, str | None]:
    """Returns the names of the formats of weights and gradients, as ``wire_formats_of`` takes them."""
    weights = next((name for name, format in WEIGHTS.items() if format == options.wire_weights), None)
    return weights, next((name for name, format in GRADIENTS.items() if format == options.wire_gradients), None)


def describe_wire_formats(options: _C.UnitOptions) -> tuple[str, ...]:
    """Describes in words what ranks must agree on. Empty without wire formats."""
    if not uses_wire_formats(options):
        return ()
    weights, gradients = (name or "they are" for name in wire_names_of(options))
    return (f"weights travel as {weights}, gradients as {gradients}",)


def check_wire_formats(state: ShardedUnit) -> None:
    """Checks that the wire formats of ``state`` work with its other settings.

    Raises:
        NotImplementedError: fsdp2x has no kernels for the device, or fewer ranks keep the weights after forward.
        ValueError: gradients are not summed in float32, or are summed by a custom collective.
    """
    options = state.options
    if not uses_wire_formats(options):
        return
    where = f"fsdp2x: wire formats of unit '{state.name}'"
    device = state.ranks.device
    if device.type != "cpu" and not _C.can_run_kernels(device):
        raise NotImplementedError(
            f"{where}: this build has no kernels that run on {device.type}. Run fsdp2x doctor for the reason, or do "
            "not call set_wire_dtype."
        )
    if options.wire_weights != _PLAIN and state.post_forward_world is not None:
        raise NotImplementedError(
            f"{where}: it reshards to {state.post_forward_world} ranks after forward, which keep plain weights. Use "
            "reshard_after_forward=True or False, or weights=None."
        )
    if options.wire_gradients == _PLAIN:
        return
    if state.comms.reduce_scatter is not None or state.comms.separate_reduction:
        raise ValueError(
            f"{where}: encoded gradients use an all-to-all of the shard group, not set_custom_reduce_scatter or "
            "set_separate_reduce_scatter_group. Use only one of them, or gradients=None."
        )
    for group in state.groups:
        for sharded, shape in zip(group.params, group.shapes(), strict=True):
            if sharded.param.requires_grad and shape.reduce != torch.float32:
                raise ValueError(
                    f"{where}: the gradient of {sharded.label!r} is reduced in {shape.reduce}, "
                    "but encoded gradients are summed in float32. Use MixedPrecisionPolicy(reduce_dtype=torch.float32)."
                )


def set_wire_formats(
    states: list[ShardedUnit],
    weights: _C.WireFormat,
    gradients: _C.WireFormat,
    apply_comms: Callable[[ShardedUnit], None],
) -> None:
    """Sets the formats of ``states``, all or none, by ``apply_comms``. Collective if they shared memory until now.

    Raises:
        RuntimeError: a forward or backward is running.
        NotImplementedError, ValueError: see ``check_wire_formats``.
    """
    if any(state.is_running for state in states):
        raise RuntimeError("wire formats cannot be set during forward or backward. Set them between two steps.")
    before = [(state, state.options.wire_weights, state.options.wire_gradients) for state in states]
    try:
        for state in states:
            _set_formats(state, weights, gradients)
            check_wire_formats(state)
        for state in states:
            apply_comms(state)
    except BaseException:
        for found in before:
            _set_formats(*found)
        raise


def _set_formats(state: ShardedUnit, weights: _C.WireFormat, gradients: _C.WireFormat) -> None:
    options = state.options
    options.wire_weights, options.wire_gradients = weights, gradients
