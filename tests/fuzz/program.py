"""A case as plain data: a model, how it is sharded, and operations. Its repr is Python that makes it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

WIDTH = 4  # every part maps rows of so many numbers to rows of so many numbers
ROWS = 3


class _Short:
    """A repr without what is the default: cases are read by people."""

    def __repr__(self) -> str:
        shown = []
        for one in fields(self):
            value = getattr(self, one.name)
            if repr(value) != repr(one.default):  # 0 and False are equal; here they mean different things
                shown.append(repr(value) if one.name in ("kind", "tree") else f"{one.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Part(_Short):
    """One module. `kind`: see parts.py. `takes`, `returns`: forms of input and output. `hooks`: what is registered."""

    kind: str
    size: int = 3
    takes: str = "rows"
    returns: str = "rows"
    hooks: tuple[str, ...] = ()
    frozen: bool = False
    unit: bool = False
    reshard: bool | int | None = None
    parts: tuple[Part, ...] = ()
    together: int = 0  # so many of the first parts that are no units form one unit (a list of modules)

    def walk(self) -> Iterator[Part]:
        """This part and all below, in the order in which the builder numbers them."""
        yield self
        for part in self.parts:
            yield from part.walk()


@dataclass(frozen=True, repr=False)
class Op(_Short):
    """One operation; what it does with `arguments` is the method `do_<kind>` of a machine."""

    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"op({', '.join([repr(self.kind), *(f'{key}={value!r}' for key, value in self.arguments.items())])})"


def op(kind: str, /, **arguments: Any) -> Op:
    return Op(kind, arguments)


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """A model, how it is cut, and what is done with it."""

    tree: Part
    ops: tuple[Op, ...] = ()
    seed: int = 0
    reshard: bool | int | None = None  # of the root
    policy: str = "full"  # mixed precision, see POLICIES
    mesh: str = "1d"  # "2d": two replicas
    input_grad: bool = False
    ties: bool = False  # Weights of one shape in one unit become one.
    columns: bool = False  # Parameters are sharded along dim 1 if that is even.
    late_hooks: bool = False  # Hooks are registered after sharding.
    meta: bool = False  # The model is sharded on the meta device and filled afterwards.
    grads: tuple[str, ...] = ()  # grad_dtype of the parameters, in turn; "": unset
    offload: tuple[str, ...] = ()  # modes of HostOffloadPolicy, in turn, for ours; "": not in the map

    def __str__(self) -> str:
        ops = "".join(f"    {one!r},\n" for one in self.ops)
        rest = ", ".join(
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)
            if one.name not in ("tree", "ops") and repr(getattr(self, one.name)) != repr(one.default)
        )
        return f"Program({self.tree!r}, ops=(\n{ops}), {rest})"


# The dtype of compute, of reduction, and of outputs; None: as it comes.
POLICIES = {
    "full": (None, None, None),
    "bf16": ("bfloat16", None, None),
    "bf16_fp32": ("bfloat16", "float32", None),
    "bf16_out": ("bfloat16", "float32", "float32"),
    "reduce": (None, "bfloat16", None),
    "fp16": ("float16", None, None),
    "fp16_reduce": ("float16", "float16", None),
}


def shard_dim(program: Program, shape: tuple[int, ...], shards: int) -> int:
    """The dim that a parameter of this shape is cut along."""
    return int(program.columns and len(shape) > 1 and shape[1] % shards == 0)


def parse(text: str) -> Program:
    """The program that a repr shows."""
    return eval(text, {"Program": Program, "Part": Part, "Op": Op, "op": op})
