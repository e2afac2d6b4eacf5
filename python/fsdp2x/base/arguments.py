"""``checked``: checks arguments of public functions against their annotations and raises an error that names them.

Only the annotations define these types and the values of a ``Literal``. The function itself checks other conditions. A
call costs some microseconds more, so do not use it for functions that are called per tensor.

A dtype may be given by its name: ``"bf16"``, ``"bfloat16"``, and ``"torch.bfloat16"`` become ``torch.bfloat16``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def dtype_name(name: str) -> str:
    """Returns torch's name of a dtype: `bf16`, `bfloat16` and `torch.bfloat16` are the same."""
    name = name.removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)


def dtype_of(value: Any) -> Any:
    """Returns the floating-point dtype of a name, and any other value unchanged."""
    found = getattr(torch, dtype_name(value), None) if isinstance(value, str) else None
    return found if isinstance(found, torch.dtype) and found.is_floating_point else value


@contextlib.contextmanager
def with_memory() -> Iterator[None]:
    """Takes the CPU as default device where it is meta, because torch and transformers allocate without a device."""
    with torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext():
        yield


F = TypeVar("F", bound=Callable)
Accepts = Callable[[Any], bool]

_COLLECTIONS = (list, tuple, set, frozenset, Collection, Iterable, Iterator, Sequence)
# Examples for arguments where users often pass something similar.
_EXAMPLES = {
    "DeviceMesh": 'such as torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))',
    "MixedPrecisionPolicy": "such as fsdp2x.MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    "OffloadPolicy": "such as fsdp2x.HostOffloadPolicy(mode='gradients')",
    "ProcessGroup": "such as torch.distributed.new_group(ranks)",
    "FSDPModule": "that is, one that fsdp2x.fully_shard sharded",
    "dtype": "such as torch.bfloat16",
    "timedelta": "such as datetime.timedelta(minutes=5)",
}


def checked(function: F | None = None, *, own: Collection[str] = ()) -> F:
    """Decorates a function, a method, or a dataclass. It checks arguments named in ``own`` itself.

    Raises:
        TypeError: at a call, if an argument does not have the annotated type.
        ValueError: at a call, if an argument is not one of the values of a ``Literal``.
    """
    if function is None:
        return functools.partial(checked, own=own)  # type: ignore[return-value]
    if isinstance(function, type):
        function.__init__ = checked(function.__init__, own=own)  # type: ignore[misc]
        return function
    signature = inspect.signature(function)
    positional = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

    @functools.cache
    def accepted() -> dict[str, tuple[Accepts, Any, inspect.Parameter, Callable | None]]:
        hints = typing.get_type_hints(inspect.unwrap(function))
        return {
            name: (_accepts(hints[name]), hints[name], parameter, _converter(hints[name]))
            for name, parameter in signature.parameters.items()
            if name in hints and name not in own and parameter.kind not in variable
        }

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kinds = accepted()
        # Python itself reports missing, extra and unknown arguments.
        given = itertools.chain(zip(positional, args, strict=False), tuple(kwargs.items()))
        for place, (name, value) in enumerate(given):
            if name in kinds:
                accepts, hint, parameter, convert = kinds[name]
                if convert is not None and (converted := convert(value)) is not value:
                    value = converted
                    if place < len(args):
                        args = (*args[:place], value, *args[place + 1 :])
                    else:
                        kwargs[name] = value
                if value is not parameter.default and not accepts(value):
                    error = ValueError if isinstance(value, tuple(_kinds_of_values(hint))) else TypeError
                    raise error(f"{_name_of(function)}: {name} must be {_told(hint)}, got {_shown(value)}")
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _converter(hint: Any) -> Callable[[Any], Any] | None:
    """Returns the function that replaces names of dtypes in a value of this type. None if it contains no dtype."""
    options = (hint, *typing.get_args(hint))
    if torch.dtype in options:
        return dtype_of
    if MixedPrecisionPolicy in options:
        return _with_dtypes
    if any(typing.get_origin(one) is Mapping and torch.dtype in typing.get_args(one) for one in options):
        return lambda value: {k: dtype_of(v) for k, v in value.items()} if isinstance(value, Mapping) else value
    return None


def _with_dtypes(policy: Any) -> Any:
    if not isinstance(policy, MixedPrecisionPolicy):
        return policy
    fields = ("param_dtype", "reduce_dtype", "output_dtype")
    named = {name: getattr(policy, name) for name in fields if isinstance(getattr(policy, name), str)}
    found = {name: dtype_of(text) for name, text in named.items()}
    if wrong := next((name for name, dtype in found.items() if isinstance(dtype, str)), None):
        raise TypeError(f"MixedPrecisionPolicy: {wrong} must be a dtype such as torch.bfloat16, got {named[wrong]!r}")
    return dataclasses.replace(policy, **found) if found else policy


def _name_of(function: Callable) -> str:
    """Returns the name that users call: in the outermost package that exports it."""
    name = function.__qualname__.removesuffix(".__init__")
    first = name.partition(".")[0]
    for home, module in sorted(sys.modules.items()):
        if home.partition(".")[0] == "fsdp2x" and home.count(".") <= 1 and first in getattr(module, "__all__", ()):
            if getattr(getattr(module, first), "__module__", None) == function.__module__:
                return f"{home}.{name}"
    return f"fsdp2x.{name}"


# ---- types


def _accepts(hint: Any) -> Accepts:
    """Returns a test for values of this type. It takes anything for a TypeVar and for a protocol."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    kind = origin or hint
    if origin in (Union, types.UnionType):
        options = [_accepts(arg) for arg in args]
        return lambda value: any(option(value) for option in options)
    if origin is Literal:
        kinds = tuple(_kinds_of_values(hint))
        return lambda value: isinstance(value, kinds) and value in args
    if kind is Callable:
        return callable
    if kind in (int, float):
        number = Integral if kind is int else Real
        return lambda value: isinstance(value, number) and not isinstance(value, bool)
    if kind in (Path, os.PathLike):
        return lambda value: isinstance(value, os.PathLike)
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return lambda value: True
    if kind in _COLLECTIONS:
        return functools.partial(_is_collection, [_accepts(arg) for arg in args if arg is not Ellipsis])
    return lambda value: isinstance(value, kind)


def _is_collection(items: list[Accepts], value: Any) -> bool:
    if not hasattr(value, "__iter__") or isinstance(value, str | bytes | Mapping):
        return False  # a string is a collection of strings, but never meant as one
    can_be_read = isinstance(value, list | tuple | set | frozenset)  # an iterator may be read only once
    return not items or not can_be_read or all(any(item(one) for item in items) for one in value)


def _kinds_of_values(hint: Any) -> set[type]:
    """Returns the types of the values of each ``Literal`` in ``hint``."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return {type(arg) for arg in args}
    return {kind for arg in args for kind in _kinds_of_values(arg)}


# ---- descriptions


def _told(hint: Any) -> str:
    names = list(dict.fromkeys(_words(hint)))
    example = next((_EXAMPLES[name] for name in names if name in _EXAMPLES), None)
    listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return listed + (f" ({example})" if example else "")


def _words(hint: Any) -> list[str]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return [word for arg in args for word in _words(arg)]
    if origin is Literal:
        return [repr(arg) for arg in args]
    if hint is type(None):
        return ["None"]
    if origin is Callable or hint is Callable:
        return ["a function"]
    if origin is not None and args:
        if issubclass(origin, Mapping):
            return ["a mapping"]
        inner = " or ".join(word for arg in args if arg is not Ellipsis for word in _words(arg))
        return [f"a collection of {inner}"]
    if hint is Any:
        return ["anything"]
    return [getattr(hint, "__name__", str(hint))]


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = "an object"
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
