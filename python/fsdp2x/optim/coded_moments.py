"""Moments in 8 bits: their values in float32 instead of codes and scales, as state dicts have them, and the way back.

A state holds ``exp_avg_codes``, cut like its parameter, and ``exp_avg_scales``, a plain tensor with a scale for each
256 local elements, in place of ``exp_avg``. What codes say has these codes again, so that the way there and back at
one world size changes nothing; at another one blocks begin elsewhere, and values are rounded again.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2x.base.native import _C
from fsdp2x.optim.local import cut_like, local_tensor
from fsdp2x.optim.moments import CODES, INT8, SCALES

_SIGNED = {"exp_avg"}


def widened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with values in float32 in place of codes and scales; what has no codes stays the same object."""
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key.endswith(CODES):
            name = key.removesuffix(CODES)
            result[name] = _decoded(value, state[name + SCALES], name in _SIGNED)
        elif not (key.endswith(SCALES) and key.removesuffix(SCALES) + CODES in state):
            result[key] = value
    return result


@contextlib.contextmanager
def widened_states(optimizer: Any) -> Iterator[None]:
    """Within, the states of ``optimizer`` have values in float32 in place of codes and scales, if it keeps those."""
    if optimizer.moments_dtype != INT8:
        yield
        return
    narrow = optimizer.state
    optimizer.state = defaultdict(dict, {param: widened(state) for param, state in narrow.items()})
    try:
        yield
    finally:
        optimizer.state = narrow


def narrowed(param: Tensor, state: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The state with codes and scales in place of the values under ``names``, where it has them.

    Raises:
        ValueError: values that are not of the shape of ``param``.
    """
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key in names:
            result[key + CODES], result[key + SCALES] = _encoded(param, key, value)
        else:
            result[key] = value
    return result


def _decoded(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    local = local_tensor(codes)
    return cut_like(codes, _C.decode_moments(local.cpu(), scales.cpu(), is_signed).to(local.device))


@torch.no_grad()
def _encoded(param: Tensor, name: str, value: Tensor) -> tuple[Tensor, Tensor]:
    own = local_tensor(param).detach()
    if isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements != param.placements:
        value = value.redistribute(param.device_mesh, param.placements)
    local = local_tensor(value)
    if local.shape != own.shape:
        raise ValueError(
            f"fsdp2x.optim.AdamW: {name} of a parameter of shape {tuple(param.shape)} has local shape "
            f"{tuple(local.shape)}, expected {tuple(own.shape)}; load a state that is cut like the parameter"
        )
    values = torch.empty_like(own, dtype=torch.float32, device="cpu").copy_(local)
    codes, scales = _C.encode_moments(values, name in _SIGNED)
    return cut_like(param, codes.to(own.device)), scales.to(own.device)
