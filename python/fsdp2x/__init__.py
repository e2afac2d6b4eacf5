"""Shards HuggingFace models over ranks: FSDP2's ``fully_shard`` on a C++ engine.

``import fsdp2x`` starts nothing: no process group, no thread, no device context. It waits with its own imports, torch
among them, until a name is used, so that commands such as ``fsdp2x --help`` answer at once.
"""

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from fsdp2x.base import (
    built,  # noqa: F401, says what to do without a build, or with one for another torch
    gloo_threads,  # noqa: F401, at the end of the process it waits for gloo
)

if TYPE_CHECKING:
    from fsdp2x._public import *  # noqa: F403

__version__ = _version("fsdp2x")


def __getattr__(name: str) -> Any:
    """Defines all public names when the first one is used. ``checkpoint``, ``rl``, and others come one by one."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = importlib.import_module("fsdp2x._public")
    for one in ["__all__", *(one for one in public.__all__ if one in vars(public))]:
        globals().setdefault(one, getattr(public, one))
    if name in public.__all__ and name not in globals():
        return importlib.import_module(f"fsdp2x.{name}")
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return ["__version__", *__getattr__("__all__")]
