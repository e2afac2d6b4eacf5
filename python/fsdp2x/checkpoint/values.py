"""Plain values beside the tensors: equal or not, and whether they can be read back without executing anything."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from typing import Any

import torch

from .agree import CheckpointError


def same(one: Any, other: Any) -> bool:
    """Equality of plain values and tensors, containers of them too."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_loadable(values: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` naming the first value that `torch.load(weights_only=True)` would refuse."""
    for name, value in values.items():
        if not _is_plain(value) and not _loads(value):
            raise CheckpointError(
                f"{name} ({type(value).__name__}) holds more than tensors, numbers, strings and containers of them, so "
                "that reading it would execute code; save its plain values, or pass trusted=True here and when loading"
            )


def _is_plain(value: Any) -> bool:
    """Certainly loadable; tried first, because `torch.save` takes its time."""
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def _loads(value: Any) -> bool:
    try:
        torch.load(io.BytesIO(to_bytes(value)), weights_only=True)
    except (pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def to_bytes(value: Any) -> bytes:
    """As `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def why_refused(error: Exception) -> str | None:
    """What `torch.load(weights_only=True)` would have had to call; None for an error of another kind."""
    text = str(error)
    if "weights_only" not in text and "weights only" not in text.lower():
        return None
    named = re.search(r"GLOBAL ([\w.]+)", text)
    return named.group(1) if named else "code"


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
