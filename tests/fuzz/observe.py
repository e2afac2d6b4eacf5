"""Records of each operation: plain values that can be compared across sides."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fuzz.parts import Output

SKIPPED = "skipped"


@dataclass
class Raised:
    """An exception without its frames, which would keep graphs alive."""

    kind: str
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        lines = traceback.format_exception(error)
        return cls(type(error).__name__, str(error), "".join(lines[-12:]))

    def __repr__(self) -> str:
        return f"{self.kind}({self.text[:300]!r})"


@dataclass
class Observation:
    """One operation on one side. `state` is the state afterwards, and `taint` names its unknown parts."""

    raised: Raised | None = None
    result: Any = None
    log: list = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    taint: frozenset[str] = frozenset()


def local(value: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of this rank's rows."""
    if isinstance(value, DTensor):
        value = value.to_local()
    return None if value is None else value.detach().clone()


def describe(value: Any, x: torch.Tensor | None = None) -> Any:
    """Describes an output by its types and the visible properties of its tensors.

    `x`: the input, which a module may return unchanged. If it needs a gradient, a unit puts an autograd node after it.
    """
    if isinstance(value, nn.Parameter) or isinstance(value, DTensor):
        # Memory of a parameter may be gone when its unit has been left.
        return ("parameter", tuple(value.shape), value.requires_grad)
    if isinstance(value, torch.Tensor) and value.numel() and value.untyped_storage().nbytes() == 0:
        # FSDP2's parameter, seen after a hook. Reading it would crash.
        return ("freed", tuple(value.shape), value.requires_grad)
    if isinstance(value, torch.Tensor):
        facts = "input" if value is x and not x.requires_grad else "inference" if value.is_inference() else "tensor"
        return (facts, str(value.dtype), value.requires_grad, value.detach().clone())
    if isinstance(value, Output):
        return ("Output", describe(value.rows, x), value.note, describe(value.more, x))
    if isinstance(value, dict):
        return {key: describe(item, x) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(describe(item, x) for item in value))
    return value


def differences(got: Any, expected: Any, tolerance: float, where: str = "") -> list[str]:
    """Where two recorded values differ; tensors within a tolerance, everything else exactly."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        if got.dtype != expected.dtype or got.shape != expected.shape:
            return [f"{where}: {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"]
        if isinstance(got, DTensor) != isinstance(expected, DTensor):
            return [f"{where}: a {type(got).__name__}, expected a {type(expected).__name__}"]
        got, expected = local(got), local(expected)  # comparing DTensors would be collective
        if torch.equal(got, expected):  # quick, and the usual case
            return []
        if torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            return []
        return [f"{where}: {got.flatten().tolist()[:8]}, expected {expected.flatten().tolist()[:8]}"]
    if isinstance(expected, dict) and isinstance(got, dict):
        if list(got) != list(expected):
            return [f"{where}: keys {list(got)}, expected {list(expected)}"]
        return [one for key in expected for one in differences(got[key], expected[key], tolerance, f"{where}.{key}")]
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)) and len(got) == len(expected):
        pairs = enumerate(zip(got, expected, strict=True))
        return [one for i, (a, b) in pairs for one in differences(a, b, tolerance, f"{where}[{i}]")]
    if isinstance(expected, torch.Tensor) or isinstance(got, torch.Tensor):
        return [f"{where}: {_short(got)}, expected {_short(expected)}"]
    return [] if got == expected else [f"{where}: {_short(got)}, expected {_short(expected)}"]


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)[:300]
