"""Makes a program that shows something smaller, as long as it shows the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace

from fuzz.program import Op, Part, Program, op


def reduced(program: Program, shows: Callable[[Program], bool], seconds: float = 120.0) -> Program:
    """The smallest program found in the time given, by single steps that keep `shows` true."""
    deadline = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for candidate in _smaller(program):
            if time.monotonic() > deadline:
                return program
            if shows(candidate):
                program, again = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Large steps first."""
    num = len(program.ops)
    size = num // 2
    while size:
        for start in range(0, num, size):
            yield replace(program, ops=program.ops[:start] + program.ops[start + size :])
        size //= 2
    for tree in _smaller_parts(program.tree):
        yield replace(program, tree=tree)
    for i, one in enumerate(program.ops):
        for other in _smaller_op(one):
            yield replace(program, ops=(*program.ops[:i], other, *program.ops[i + 1 :]))
    yield from _defaults(program, ("tree", "ops"))


def _smaller_parts(part: Part) -> Iterator[Part]:
    for i, child in enumerate(part.parts):
        if len(part.parts) > 1:
            yield replace(part, parts=part.parts[:i] + part.parts[i + 1 :])
        if child.parts:
            yield replace(part, parts=(*part.parts[:i], *child.parts, *part.parts[i + 1 :]))
    if part.parts and part.kind != "sequence":
        yield replace(part, kind="sequence")
    if not part.parts and part.kind not in ("raw", "mlp"):
        yield replace(part, kind="mlp")
    for i, child in enumerate(part.parts):
        for smaller in _smaller_parts(child):
            yield replace(part, parts=(*part.parts[:i], smaller, *part.parts[i + 1 :]))
    yield from _defaults(part, ("kind", "parts"))


def _smaller_op(one: Op) -> Iterator[Op]:
    for key in one.arguments:
        if key not in ("name", "value", "fault"):
            yield op(one.kind, **{other: value for other, value in one.arguments.items() if other != key})
    number, where = one.arguments.get("fault", (0, ""))
    if number:
        yield op(one.kind, **{**one.arguments, "fault": (number - 1, where)})


def _defaults(value, besides: tuple[str, ...]) -> Iterator:
    for one in fields(value):
        if one.name in besides or one.default is MISSING:
            continue
        if repr(getattr(value, one.name)) != repr(one.default):
            yield replace(value, **{one.name: one.default})
