"""The context of a test body on its rank, and how processes name, find, and report a body."""

import ast
import functools
import importlib.util
import marshal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

# Functions to call after the running body has passed.
at_end: list[Callable[[], None]] = []
# One operation of a process group may take this long before gloo stops waiting for a rank.
GROUP_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Context:
    """First argument of every body. `impl` is "fsdp2x" or "torch": which fully_shard a parity test exercises."""

    rank: int
    world: int
    impl: str = "fsdp2x"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Body:
    """A function that every rank can find: its file and its code, its module's name, and its name in the module."""

    path: str
    code: bytes = field(repr=False)
    module: str
    qualname: str

    @classmethod
    def of(cls, function: Callable) -> "Body":
        path = str(Path(function.__code__.co_filename).resolve())
        return cls(path, _compiled(path), function.__module__, function.__qualname__)

    def load(self) -> Callable:
        target: Any = self._load_module()
        for part in self.qualname.split("."):
            target = getattr(target, part)
        return getattr(target, "distributed_body", target)

    def _load_module(self) -> ModuleType:
        """The file under the name that pytest gave it."""
        if self.module in sys.modules:
            return sys.modules[self.module]
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(self.module, self.path))
        sys.modules[self.module] = module
        try:
            exec(marshal.loads(self.code), module.__dict__)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


@functools.cache
def _compiled(path: str) -> bytes:
    """Compiles a file with pytest's readable assertions, once for all ranks."""
    from _pytest.assertion.rewrite import rewrite_asserts

    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path)
    return marshal.dumps(compile(tree, path, "exec", dont_inherit=True))


def run_body(function: Callable, ctx: Context, arguments: tuple, keywords: dict) -> tuple[str, Any]:
    """("ok", value), ("skip", reason) or ("fail", traceback). The state a body inherits is the same for each."""
    import pytest
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if (failures := sys.modules.get("fsdp2x.base.failures")) is not None:
        failures._num_units.clear()  # ranks may have made other models in the bodies before
    try:
        if any(isinstance(value, str) and value == "streams" for value in (*arguments, *keywords.values())):
            import reference

            reference.install_streams()
        value = function(ctx, *arguments, **keywords)
        for check in at_end:
            check()
        return "ok", value
    except pytest.skip.Exception as skipped:
        return "skip", str(skipped)
    except BaseException as error:
        # The first two frames are this function and the body's caller.
        return "fail", "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next))
    finally:
        at_end.clear()
        mock.patch.stopall()
