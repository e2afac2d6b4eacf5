"""Builds the model of a program: modules that compute on rows, fail on request, and return their rows in any form.

Every module of a tree has the number of its `Part` in `tree.walk()`. All of them share a `Stage`, which selects the one
to raise and collects the values that hooks see.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuzz.program import ROWS, WIDTH, Part, Program

# Places where a part can raise.
FORWARD_FAULTS = ("before", "after", "pre", "post")
BACKWARD_FAULTS = ("gradient", "full_backward", "full_backward_pre", "accumulated")
HOOKS = ("pre", "post", "replace", "full_backward", "full_backward_pre")
TAKES = ("rows", "list", "dict", "dataclass", "named", "nested")
RETURNS = (
    "rows",
    "tuple",
    "list",
    "dict",
    "dataclass",
    "named",
    "nested",
    "none",
    "input",
    "view",
    "param",
    "detached",
)


class Injected(Exception):
    """The error of a part that raises on request."""


class Stage:
    """State that the modules of one model share, besides parameters."""

    def __init__(self) -> None:
        self.armed: tuple[int, str] | None = None
        self.log: list[tuple[str, Any]] = []

    def fail(self, number: int, where: str) -> None:
        if self.armed == (number, where):
            raise Injected(f"part {number}, {where}")

    def note(self, number: int, what: str, values: Any) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        check_memory(tensors)
        self.log.append((f"{what} of part {number}", [value.detach().clone() for value in tensors]))


@dataclass
class Output:
    rows: torch.Tensor
    note: str = "text"
    more: Any = None


Pair = namedtuple("Pair", ["rows", "more"])


def wrap(kind: str, out: torch.Tensor, x: torch.Tensor, module: nn.Module) -> Any:
    """The output of a part in the form `kind`."""
    if kind == "param":
        return out, next(module.parameters(), None)
    return {
        "rows": lambda: out,
        "tuple": lambda: (out, 2, x.detach()),
        "list": lambda: [out, None],
        "dict": lambda: {"rows": out, "none": None},
        "dataclass": lambda: Output(out, more=[out * 0.5]),
        "named": lambda: Pair(out, (x.detach(), "text")),
        "nested": lambda: {"deep": [(None, {"rows": out}), out * 0.5]},
        "none": lambda: None,
        "input": lambda: x,
        "view": lambda: out[:],
        "detached": lambda: out.detach(),
    }[kind]()


def give(kind: str, x: torch.Tensor) -> Any:
    """The input of a part in the form `kind`."""
    return {
        "rows": lambda: x,
        "list": lambda: [x, None],
        "dict": lambda: {"rows": x, "none": None},
        "dataclass": lambda: Output(x, more=(x,)),
        "named": lambda: Pair(x, "text"),
        "nested": lambda: {"deep": (x, [{"rows": x * 0.5}])},
    }[kind]()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nested value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Output):
        yield from tensors_in([value.rows, value.more])
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def check_memory(tensors: list[torch.Tensor]) -> None:
    """Raises for a parameter that a resharded unit returned: ours raises by itself, upstream's ends the process."""
    if any(value.numel() > 0 and value.untyped_storage().nbytes() == 0 for value in tensors):
        raise RuntimeError("the tensor's memory is freed")


def rows_of(value: Any, x: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the input of a part's computation: the mean of all rows in `value`, or `x` if it has none."""
    rows = [one for one in tensors_in(value) if one.shape == (ROWS, WIDTH) and not isinstance(one, nn.Parameter)]
    if not rows:
        return x
    check_memory(rows)
    # Autocast on the CPU can stack no fp16, but add it.
    return sum(one.to(rows[0].dtype) for one in rows) / len(rows) if len(rows) > 1 else rows[0]


class Unit(nn.Module):
    """Base of all parts. `compute` is the kind's own."""

    def __init__(self, part: Part, number: int, stage: Stage) -> None:
        super().__init__()
        self.part, self.number, self.stage = part, number, stage
        self.make(part)

    def make(self, part: Part) -> None:
        pass

    def compute(self, x: torch.Tensor, flag: bool) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, given: Any, flag: bool = True) -> Any:
        self.stage.fail(self.number, "before")
        x = rows_of(given)
        out = self.compute(x, flag)
        self.stage.fail(self.number, "after")
        # The input is a leaf only if no unit has put an autograd node after it.
        if out.requires_grad and not out.is_leaf and out is not x:
            weak = weakref.ref(self)
            out.register_hook(lambda grad: weak().stage.fail(weak().number, "gradient") if weak() is not None else None)
        return wrap(self.part.returns, out, x, self)

    def other(self, given: Any, flag: bool = True) -> Any:
        """A second method that computes: for register_fsdp_forward_method."""
        return self.forward(rows_of(given) * 0.5, flag)


class Mlp(Unit):
    def make(self, part):
        self.up, self.down = nn.Linear(WIDTH, part.size), nn.Linear(part.size, WIDTH, bias=False)

    def compute(self, x, flag):
        return x + self.down(torch.tanh(self.up(x)))


class Norm(Unit):
    def make(self, part):
        self.norm = nn.LayerNorm(WIDTH, eps=0.1)  # rows may be nearly constant: no division by a tiny spread

    def compute(self, x, flag):
        return self.norm(x)


class Table(Unit):
    """Rows of a table by position: some rows get zeros as gradient."""

    def make(self, part):
        self.table = nn.Embedding(part.size, WIDTH)

    def compute(self, x, flag):
        return x + self.table(torch.arange(x.shape[0]) * 2 % self.table.num_embeddings)


class Raw(Unit):
    """Parameters of the part itself, of few elements; the second one is used only when the flag is up."""

    def make(self, part):
        self.scale = nn.Parameter(torch.randn(1))
        self.shift = nn.Parameter(torch.randn(part.size, 1, 2))

    def compute(self, x, flag):
        x = x * (1 + 0.2 * torch.tanh(self.scale))
        return x + 0.1 * torch.tanh(self.shift.sum()) if flag else x


class Tied(Unit):
    """One weight in two modules, and once more below another name in the same one."""

    def make(self, part):
        self.up, self.again = nn.Linear(WIDTH, part.size), nn.Linear(WIDTH, part.size)
        self.again.weight = self.again.alias = self.up.weight

    def compute(self, x, flag):
        gate = torch.tanh(self.up(x) * self.again(x)).mean(dim=-1, keepdim=True)
        return x + gate * torch.tanh(self.again.alias.sum())


class Drop(Unit):
    """Random numbers, and a running average that is a buffer."""

    def make(self, part):
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def compute(self, x, flag):
        out = nn.functional.dropout(torch.tanh(self.linear(x)), 0.25, self.training)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(out.mean(dim=0))
        return x + 0.5 * out + 0.1 * self.average.to(out.dtype)


class Unused(Unit):
    """One of its layers is never called."""

    def make(self, part):
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(part.size, 2)

    def compute(self, x, flag):
        return x + torch.tanh(self.used(x))


class Container(Unit):
    """Runs other parts: one after another, or as its kind says."""

    def compute(self, x, flag):
        kind = self.part.kind
        if kind == "checkpoint":
            return checkpoint(self.chain, x, flag, use_reentrant=False)
        if kind == "reentrant":
            return checkpoint(self.chain, x, flag, use_reentrant=True)
        if kind == "sum":
            return sum(rows_of(part(give(part.part.takes, x), flag=flag), x) for part in self.parts) / len(self.parts)
        if kind == "twice":
            return self.chain(torch.tanh(self.chain(x, flag)), flag)
        if kind == "gate":
            return self.chain(x, flag, self.parts[:1] if flag else self.parts[1:])
        if kind == "no_grad":
            with torch.no_grad():
                return self.chain(x, flag)
        return (x if kind == "residual" else 0) + self.chain(x, flag)

    def chain(self, x, flag, parts=None):
        for part in self.parts if parts is None else parts:
            x = rows_of(part(give(part.part.takes, x), flag=flag), x)
        return x


class Odd(Unit):
    """Parameters of any shape and dtype, drawn from `size` and the part's number, of which bytes are frozen.

    FSDP2 wants one dtype in a unit, so the grammar draws none.
    """

    def make(self, part):
        random = Random(100 * part.size + self.number)
        for number in range(random.randint(1, 4)):
            shape, dtype = random.choice(ODD_SHAPES), random.choice(ODD_DTYPES)
            value = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)
            self.register_parameter(f"odd{number}", nn.Parameter(value, requires_grad=dtype.is_floating_point))

    def compute(self, x, flag):
        for param in self.parameters(recurse=False):
            weights = torch.linspace(-1, 1, param.numel() + 1)[1:].view(param.shape)
            x = x * (1 + 0.2 * torch.tanh((param.to(x.dtype) * weights).sum()))
        return x


# Dims below the number of ranks leave ranks without a row; a parameter may also have no element at all.
ODD_SHAPES = ((1,), (2,), (5,), (7,), (2, 1), (1, 4), (4, 3), (6, 2), (3, 2, 2), (1, 2, 3), (5, 1, 1), (0, 3))
ODD_DTYPES = (torch.float32,) * 5 + (torch.bfloat16, torch.float64, torch.uint8)
LEAVES = {"mlp": Mlp, "norm": Norm, "table": Table, "raw": Raw, "tied": Tied, "drop": Drop, "unused": Unused}
CONTAINERS = ("sequence", "residual", "sum", "twice", "gate", "checkpoint", "reentrant", "no_grad")


def _module(part: Part, numbers: Iterator[int], stage: Stage) -> Unit:
    module = {**LEAVES, "odd": Odd}.get(part.kind, Container)(part, next(numbers), stage)
    if part.kind in CONTAINERS:
        # A plain list of names would do; a ModuleList is what models have.
        module.parts = nn.ModuleList(_module(child, numbers, stage) for child in part.parts)
    if part.frozen:
        module.requires_grad_(False)
    return module


def register_hooks(model: nn.Module) -> None:
    """The hooks that a program asks for."""
    for module in parts_of(model):
        for hook in module.part.hooks:
            _register(hook, module)


def _register(hook: str, module: Unit) -> None:
    number, stage = module.number, module.stage

    def note(what, values):
        stage.fail(number, what)
        stage.note(number, what, values)

    if hook == "pre":
        module.register_forward_pre_hook(lambda _, args: note("pre", args))
    elif hook == "post":
        module.register_forward_hook(lambda _, args, output: note("post", tensors_in(output)))
    elif hook == "replace":
        module.register_forward_hook(lambda _, args, output: output * 1.5 if type(output) is torch.Tensor else None)
    elif hook == "full_backward":
        module.register_full_backward_hook(lambda _, inputs, outputs: note("full_backward", (*inputs, *outputs)))
    elif hook == "full_backward_pre":
        module.register_full_backward_pre_hook(lambda _, outputs: note("full_backward_pre", outputs))


def build(program: Program, on_meta: bool = False) -> Unit:
    """The unsharded model of a program, the same on every rank and side."""
    torch.default_generator.manual_seed(program.seed)
    stage = Stage()
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = _module(program.tree, itertools.count(), stage)
    if program.ties:
        _tie(program, model)
    # The frozen ones as well: they may train later.
    for param, name in zip(model.parameters(), itertools.cycle(program.grads), strict=False):
        if name:
            param.grad_dtype = getattr(torch, name)
    if not program.late_hooks:
        register_hooks(model)
    return model


def parts_of(model: nn.Module) -> list[Unit]:
    """The parts of a model by their numbers."""
    return sorted((one for one in model.modules() if isinstance(one, Unit)), key=lambda one: one.number)


def units_of(program: Program, model: Unit) -> list[tuple[list[nn.Module], bool | int | None]]:
    """Lists the modules to call fully_shard on, in this order: the children first, the root last."""

    def visit(module: Unit) -> Iterator[tuple[list[nn.Module], bool | int | None]]:
        children = list(module.parts) if module.part.parts else []
        for child in children:
            yield from visit(child)
        together = [child for child in children if not child.part.unit][: module.part.together]
        if len(together) > 1:
            yield together, module.part.reshard
        if module.part.unit and module is not model:
            yield [module], module.part.reshard

    return [*visit(model), ([model], program.reshard)]


def _tie(program: Program, model: Unit) -> None:
    taken: set[int] = set()
    for modules, _ in units_of(program, model):
        first: dict[tuple, nn.Parameter] = {}
        for module in (below for one in modules for below in one.modules() if id(below) not in taken):
            taken.add(id(module))
            for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                known = first.setdefault((param.shape, param.dtype, param.requires_grad), param)
                if known is not param:
                    setattr(module, name, known)
