"""Random module trees for property tests: what a case is, how it is drawn, built and cut into units.

A `Case` is plain data: hypothesis draws it in the parent, every rank builds the same model from it. Each module maps
rows of `WIDTH` numbers to rows of `WIDTH` numbers, so that any tree of them is a model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
from hypothesis import strategies as st
from torch import nn

WIDTH = 3
# Dims below the number of ranks leave ranks without a row; a parameter may also have no element at all.
_SHAPES = ((1,), (2,), (5,), (7,), (2, 1), (1, 4), (4, 3), (6, 2), (3, 2, 2), (1, 2, 3), (5, 1, 1), (0, 3))
_DTYPES = (torch.float32,) * 5 + (torch.bfloat16, torch.float64, torch.uint8)


@dataclass(frozen=True, repr=False)
class Node:
    """One module. `kind`: "residual", which has children, or a leaf: mlp, norm, table, odd, tied.

    `unit`: fully_shard is applied to it.
    """

    kind: str
    size: int = 1
    shapes: tuple = ()
    dtypes: tuple = ()
    frozen: bool = False
    children: tuple["Node", ...] = ()
    unit: bool = False
    reshard: bool | int | None = None
    together: int = 0  # so many of the first children form one unit (a list of modules)

    def __repr__(self) -> str:
        """Python code without what is the default: trees are large."""
        given = [(one, getattr(self, one.name)) for one in fields(self)[1:]]
        # 0, 1 and bools are equal to each other; here they mean different things.
        shown = [f"{one.name}={value!r}" for one, value in given if repr(value) != repr(one.default)]
        return f"Node({', '.join([repr(self.kind), *shown])})"


@dataclass(frozen=True)
class Case:
    """A model, its cutting, and what is done with it."""

    tree: Node
    seed: int
    root_reshard: bool | int | None
    ties: bool  # parameters of one shape and dtype in one unit become one
    micro_batches: int
    dtype: torch.dtype  # of activations and of all parameters but those of odd leaves
    options: dict = field(default_factory=dict)


def divisors(world: int) -> list[int]:
    return [size for size in range(1, world + 1) if world % size == 0]


def reshards(world: int) -> st.SearchStrategy:
    return st.sampled_from([True, False, None, *divisors(world)])


def leaves() -> st.SearchStrategy[Node]:
    frozen = st.sampled_from([False, False, True])
    odd = st.lists(st.tuples(st.sampled_from(_SHAPES), st.sampled_from(_DTYPES)), min_size=1, max_size=4)
    return st.one_of(
        st.builds(Node, st.just("mlp"), size=st.integers(1, 7), frozen=frozen),
        st.builds(Node, st.just("norm"), frozen=frozen),
        st.builds(Node, st.just("table"), size=st.integers(1, 7), frozen=frozen),
        st.builds(Node, st.just("tied"), size=st.integers(1, 5)),
        odd.map(lambda pairs: Node("odd", shapes=tuple(s for s, _ in pairs), dtypes=tuple(d for _, d in pairs))),
    )


@st.composite
def nodes(draw: st.DrawFn, world: int, depth: int) -> Node:
    """A leaf, or a container of one to four nodes of less depth."""
    children, together = (), 0
    if depth == 0 or draw(st.sampled_from([False, False, True])):
        node = draw(leaves())
    else:
        node = Node("residual")
        children = tuple(draw(st.lists(nodes(world, depth - 1), min_size=1, max_size=4)))
        if len(children) > 1 and draw(st.sampled_from([False, False, True])):
            together = draw(st.integers(2, len(children)))
    values = {**vars(node), "children": children, "together": together}
    return Node(**{**values, "unit": draw(st.booleans()), "reshard": draw(reshards(world))})


@st.composite
def cases(draw: st.DrawFn, world: int, depth: int = 2) -> Case:
    children = tuple(draw(st.lists(nodes(world, depth), min_size=1, max_size=3)))
    return Case(
        tree=Node("residual", children=children),
        seed=draw(st.integers(0, 999)),
        root_reshard=draw(reshards(world)),
        ties=draw(st.booleans()),
        micro_batches=draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float64])),
    )


class _Mlp(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, size), nn.Linear(size, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class _Table(nn.Module):
    """Like an embedding of positions; rows that no position reaches get zeros as gradient."""

    def __init__(self, size: int):
        super().__init__()
        self.table = nn.Embedding(size, WIDTH)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[0]) * 2 % self.table.num_embeddings)


class _Odd(nn.Module):
    """Parameters of any shape and dtype: each scales the rows by a weighted sum of its elements. Bytes are frozen."""

    def __init__(self, shapes: tuple, dtypes: tuple):
        super().__init__()
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            if dtype == torch.uint8:
                param = nn.Parameter(torch.randint(0, 255, shape, dtype=dtype), requires_grad=False)
            else:
                param = nn.Parameter(torch.randn(shape).to(dtype))
            self.register_parameter(f"odd{number}", param)

    def forward(self, x):
        for param in self._parameters.values():
            values = param.to(x.dtype) / (255 if param.dtype == torch.uint8 else 1)
            weights = torch.linspace(-1, 1, values.numel() + 1)[1:].view(values.shape)
            x = x * (1 + 0.2 * torch.tanh((values * weights).sum()))
        return x


class _Tied(nn.Module):
    """One weight in two modules, and once more below another name in the same one."""

    def __init__(self, size: int):
        super().__init__()
        self.up, self.again = nn.Linear(WIDTH, size), nn.Linear(WIDTH, size)
        self.again.weight = self.again.alias = self.up.weight

    def forward(self, x):
        gate = torch.tanh(self.up(x) * self.again(x)).mean(dim=-1, keepdim=True)
        return x + gate * torch.tanh(self.again.alias.sum())


class _Residual(nn.Module):
    """Runs each child once, in order, on the output of the previous one, as the planner takes it. Returns a separate
    tensor, or its unit's backward would begin together with its last child's.
    """

    def __init__(self, children: list[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(children)

    def forward(self, x):
        out = x
        for part in self.parts:
            out = part(out)
        return x + out


def _module(node: Node) -> nn.Module:
    if node.children:
        return _Residual([_module(child) for child in node.children])
    made = {
        "mlp": lambda: _Mlp(node.size),
        "norm": lambda: nn.LayerNorm(WIDTH, eps=0.1),  # rows may be nearly constant: no division by a tiny spread
        "table": lambda: _Table(node.size),
        "tied": lambda: _Tied(node.size),
        "odd": lambda: _Odd(node.shapes, node.dtypes),
    }[node.kind]()
    return made.requires_grad_(False) if node.frozen else made


def units_of(case: Case, model: nn.Module) -> list[tuple[list[nn.Module], bool | int | None]]:
    """Lists the modules to call fully_shard on, in this order: the children first, the root last."""

    def visit(node: Node, module: nn.Module) -> Iterator[tuple[list[nn.Module], bool | int | None]]:
        parts = list(module.parts) if node.children else []
        for child, part in zip(node.children, parts, strict=True):
            yield from visit(child, part)
        # A module has one unit: those of a list must not be units themselves.
        together = [part for child, part in zip(node.children, parts, strict=True) if not child.unit][: node.together]
        if len(together) > 1:
            yield together, node.reshard
        if node.unit:
            yield [module], node.reshard

    return [*visit(case.tree, model), ([model], case.root_reshard)]


def build(case: Case) -> nn.Module:
    """The unsharded model of the case, the same on every rank."""
    torch.manual_seed(case.seed)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        model = _module(case.tree)
    finally:
        torch.set_default_dtype(usual)
    if case.ties:
        _tie(case, model)
    return model


def _tie(case: Case, model: nn.Module) -> None:
    """Makes one parameter of those that have the same shape and kind within a unit, the first two of each."""
    taken: set[int] = set()
    for modules, _ in units_of(case, model):
        first: dict[tuple, nn.Parameter] = {}
        done: set[tuple] = set()
        for module in (below for one in modules for below in one.modules()):
            if id(module) in taken:
                continue
            taken.add(id(module))
            for name, param in list(module._parameters.items()):
                if param is None:
                    continue
                key = (param.shape, param.dtype, param.requires_grad)
                if key not in first:
                    first[key] = param
                elif key not in done and first[key] is not param:
                    setattr(module, name, first[key])
                    done.add(key)
