"""In how few bits weights and gradients travel: the names of the formats, and where they cannot be had."""

from __future__ import annotations

from typing import Any

import torch

from fsdp2x.base.native import _C
from fsdp2x.lifecycle.unit import ShardedUnit

_PLAIN = _C.WireFormat.plain
WEIGHTS = {"int8": _C.WireFormat.int8, "fp8": _C.WireFormat.fp8}
GRADIENTS = {"int8": _C.WireFormat.int8, "bfloat16": _C.WireFormat.bf16}


def formats_of(caller: str, weights: str | None, gradients: str | None) -> tuple[Any, Any]:
    """The engine's formats by their names; None: as they are computed, or reduced.

    Raises:
        ValueError: another name.
    """
    for what, name, known in (("weights", weights, WEIGHTS), ("gradients", gradients, GRADIENTS)):
        if name is not None and name not in known:
            raise ValueError(f"{caller}: {what} is {name!r}, expected {', '.join(map(repr, known))} or None")
    return WEIGHTS.get(weights or "", _PLAIN), GRADIENTS.get(gradients or "", _PLAIN)


def is_used(options: _C.UnitOptions) -> bool:
    return options.wire_weights != _PLAIN or options.wire_gradients != _PLAIN


def names_of(options: _C.UnitOptions) -> tuple[str | None, str | None]:
    """The names of the formats of weights and of gradients, as ``formats_of`` takes them."""
    weights = next((name for name, format in WEIGHTS.items() if format == options.wire_weights), None)
    return weights, next((name for name, format in GRADIENTS.items() if format == options.wire_gradients), None)


def told(options: _C.UnitOptions) -> tuple[str, ...]:
    """What ranks must agree about, in words; nothing where nothing is asked for."""
    if not is_used(options):
        return ()
    weights, gradients = (name or "they are" for name in names_of(options))
    return (f"weights travel as {weights}, gradients as {gradients}",)


def check(state: ShardedUnit) -> None:
    """Whether the formats that ``state`` asks for can be had with what else it is set to.

    Raises:
        NotImplementedError: on a device that fsdp2x has no kernels for, and for weights that fewer ranks keep after
            forward.
        ValueError: gradients that are not summed in float32, or by the user's collective.
    """
    options = state.live_options()
    if not is_used(options):
        return
    where = f"fsdp2x: wire formats of unit '{state.name}'"
    device = state.ranks.device
    if device.type != "cpu" and not _C.can_run_kernels(device):
        raise NotImplementedError(
            f"{where}: on {device.type} it takes kernels of fsdp2x, and this build has none that run there (fsdp2x "
            "doctor says why); leave set_wire_dtype out"
        )
    if options.wire_weights != _PLAIN and state.post_forward_world is not None:
        raise NotImplementedError(
            f"{where}: it reshards to {state.post_forward_world} ranks after forward, which keep whole numbers; use "
            "reshard_after_forward=True or False, or weights=None"
        )
    if options.wire_gradients == _PLAIN:
        return
    if state.comms.reduce_scatter is not None or state.comms.separate_reduction:
        raise ValueError(
            f"{where}: gradients travel in an all-to-all of the shard group, not by set_custom_reduce_scatter or "
            "set_separate_reduce_scatter_group; use one of them, or gradients=None"
        )
    policy = state.mp_policy
    for group in state.groups:
        shapes = group.shapes(policy.param_dtype, policy.reduce_dtype)
        for sharded, shape in zip(group.params, shapes, strict=True):
            if sharded.param.requires_grad and shape.reduce != torch.float32:
                raise ValueError(
                    f"{where}: the gradient of {sharded.fqn or sharded.owners[0][1]!r} is reduced in {shape.reduce}, "
                    "and what travels is summed in float32; use MixedPrecisionPolicy(reduce_dtype=torch.float32)"
                )
