"""Writes ``python/fsdp2x/_C.pyi``, what a type checker knows of the compiled module, from the module itself.

``make stub`` runs it after a build; ``tests/unit/project/test_stub.py`` fails where the file and the module differ.
"""

import ast
import enum
import inspect
import re
from pathlib import Path
from types import ModuleType

STUB = Path(__file__).resolve().parent.parent / "python/fsdp2x/_C.pyi"
HEAD = '''"""Written by `make stub` from the compiled module; not to be edited."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
'''
# How pybind11 spells types, in its versions from torch 2.11 to 2.15, and how people do.
SPELLINGS = [
    (r"typing\.SupportsInt \| typing\.SupportsIndex|typing\.SupportsInt", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex|typing\.SupportsFloat", "float"),
    (r"collections\.abc\.|typing\.", ""),
    (r"Tuple\[int, \.\.\.\]", "Sequence[int]"),
    (r"\b[\w.]*_C\.", ""),
    (r": (\w+) = None", r": \1 | None = None"),  # a null pointer
]
# Python objects that the engine keeps and calls: it says nothing of what they are.
ANY = r"(?<=[:>\[,] )object\b|(?<=\[)object\b"


class StubError(Exception):
    """A name of the module cannot be told in a stub: most often a type that is bound after its first use."""


def _is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum) or hasattr(kind, "__members__")


def _signatures(name: str, doc: str | None) -> list[str]:
    """``(self, ...) -> ...`` of each overload, as the first line or the numbered lines of a docstring tell them."""
    lines = re.findall(r"^(?:\d+\. )?\w*(\(.*\) -> .*)$", doc or "", flags=re.MULTILINE)
    if not lines:
        raise StubError(f"{name}: its docstring has no signature: {doc!r}")
    for pattern, plain in [*SPELLINGS, (ANY, "Any")]:
        lines = [re.sub(pattern, plain, line) for line in lines]
    for line in lines:
        try:
            ast.parse(f"def f{line}: ...")
        except SyntaxError as error:
            raise StubError(f"{name}{line}: a type has no Python name; bind it before what uses it") from error
    # Names that pybind11 made up are no names to call by.
    return [_positional(re.sub(r"\(self: \w+", "(self", line)) for line in lines]


def _positional(signature: str) -> str:
    if not re.search(r"\barg\d+:", signature):
        return signature
    arguments, returned = signature.rsplit(") -> ", 1)
    return f"{arguments}, /) -> {returned}"


def _function(name: str, function: object, indent: str = "") -> list[str]:
    return [f"{indent}def {name}{signature}: ..." for signature in _signatures(name, function.__doc__)]


def _property(name: str, member: property) -> list[str]:
    returned = _signatures(name, member.fget.__doc__)[0].rsplit(" -> ", 1)[1]
    if member.fset is not None:
        return [f"    {name}: {returned}"]
    return ["    @property", f"    def {name}(self) -> {returned}: ..."]


def _class(kind: type) -> list[str]:
    base = kind.__base__.__name__
    lines = [f"class {kind.__name__}{'' if base in ('object', 'pybind11_object') else f'({base})'}:"]
    if _is_enum(kind):
        lines += [f"    {name}: ClassVar[{kind.__name__}]" for name in kind.__members__]
        lines += [line for name in ("name", "value") for line in _property(name, kind.__dict__[name])]
        return lines
    for name, member in vars(kind).items():
        if isinstance(member, property):
            lines += _property(name, member)
        elif name in ("__init__", "__call__") or not name.startswith("_"):
            if not inspect.isroutine(member) and not callable(member):
                raise StubError(f"{kind.__name__}.{name}: neither a method nor a property")
            if type(member).__name__ != "wrapper_descriptor":  # object's own: it is not made from Python
                lines += _function(name, member, "    ")
    return lines if len(lines) > 1 else [f"{lines[0]} ..."]


def stub_of(module: ModuleType) -> str:
    """The text of the stub, not formatted."""
    lines = [HEAD]
    for name, member in vars(module).items():
        if name.startswith("_"):
            continue
        if isinstance(member, type):
            lines += _class(member)
        elif callable(member):
            lines += _function(name, member)
        else:
            lines.append(f"{name}: {type(member).__name__}")
    return "\n".join(lines) + "\n"


def main() -> None:
    from fsdp2x.base.native import _C

    STUB.write_text(stub_of(_C))


if __name__ == "__main__":
    main()
