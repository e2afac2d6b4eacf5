"""Declares behaviors. Has what their functions get: an engine, small models, and comparisons with one process."""

from __future__ import annotations

import copy
import functools
import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Behavior:
    """One behavior. ``run(context, *row)`` raises if the engine lacks it; its docstring is the contract's sentence."""

    run: Callable[..., None]
    rows: dict[str, tuple]
    ranks: int
    torch: tuple[int, int]
    newer: str
    mirrors: str
    lacks: dict[str, str]

    @property
    def contract(self) -> str:
        return " ".join((self.run.__doc__ or "").split())

    def why_skipped(self, engine: str, world: int) -> str | None:
        """Returns why the engine need not have the behavior on this number of ranks."""
        if world < self.ranks:
            return f"needs {self.ranks} ranks"
        if self.torch > TORCH:
            return f"needs torch {'.'.join(map(str, self.torch))}"
        if self.newer and engine.startswith("torch."):
            return f"torch {'.'.join(map(str, TORCH))} has no {self.newer}"
        return None

    def why_lacking(self, engine: str, row: str) -> str | None:
        """Returns why the engine is known not to have the behavior."""
        package = engine.partition(".")[0].partition(":")[0]
        return self.lacks.get(package) or self.lacks.get(f"{package}, {row}")


# (module, name) -> behavior, in the order of declaration.
BEHAVIORS: dict[tuple[str, str], Behavior] = {}


def behavior(
    *,
    rows: Iterable[Any] | dict[str, Any] = ((),),
    ranks: int = 1,
    torch: tuple[int, int] = (2, 6),
    newer: str = "",
    mirrors: str = "",
    lacks: dict[str, str] | None = None,
) -> Callable:
    """Declares a behavior.

    Args:
        rows: arguments of the cases, by name or with their names as text.
        ranks: the least number of ranks.
        torch: the first version whose FSDP2 has it.
        newer: what only torch's development version has; torch's own engines skip it.
        mirrors: the test of PyTorch that checks it too.
        lacks: package, or "package, row", of engines that fail, and why.
    """
    named = rows if isinstance(rows, dict) else {_text(row): row for row in rows}

    def declare(run: Callable[..., None]) -> Callable[..., None]:
        as_tuples = {name: row if isinstance(row, tuple) else (row,) for name, row in named.items()}
        BEHAVIORS[run.__module__, run.__name__] = Behavior(run, as_tuples, ranks, torch, newer, mirrors, lacks or {})
        return run

    return declare


MODULES = ("wrapping", "training", "precision", "states", "control", "newest")


def cases() -> Iterator[tuple[str, str, str]]:
    """Yields module, name, and row of all behaviors."""
    for name in MODULES:
        importlib.import_module(f"fsdp2x.conformance.{name}")
    for (module, name), found in BEHAVIORS.items():
        for row in found.rows:
            yield module, name, row


def _text(row: Any) -> str:
    return "-".join(str(value) for value in (row if isinstance(row, tuple) else (row,)))


@dataclass(frozen=True)
class Context:
    """What a behavior gets on its rank. ``folder`` is the same for all ranks."""

    rank: int
    world: int
    module: ModuleType
    engine: Callable[..., Any]
    options: dict[str, Any]
    folder: Path

    def shard(self, model: nn.Module, units: Iterable[str] = (), **options: Any) -> Any:
        """Shards the units, of which "a+b" is one of two modules, and then the model."""
        for unit in units:
            modules = [model.get_submodule(name) for name in unit.split("+")]
            self.engine(modules[0] if len(modules) == 1 else modules, **self.options, **options)
        return self.engine(model, **self.options, **options)

    def find(self, name: str) -> Any:
        """Returns a public name from the engine's module, or else from torch.distributed.fsdp."""
        for place in (self.module, torch_fsdp):
            if hasattr(place, name):
                return getattr(place, name)
        raise AttributeError(f"neither {self.module.__name__} nor torch.distributed.fsdp has {name}")

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Makes a mesh on CPU; -1 stands for the ranks that are left. The same arguments give the same mesh."""
        known = math.prod(size for size in shape if size > 0)
        return _mesh(tuple(size if size > 0 else self.world // known for size in shape), names)

    def all_equal(self, value: Any) -> bool:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return all(one == found[0] for one in found)

    def backward(self, plain: nn.Module, step: int = 0, scale: float = 1.0) -> None:
        """Adds to the unsharded model the mean of all ranks' gradients."""
        for rank in range(self.world):
            (scale * mean_square(plain, rank, step) / self.world).backward()

    def compare(
        self,
        plain: nn.Module,
        units: Iterable[str] = (),
        loss_of: Callable[[Any, int, int], torch.Tensor] | None = None,
        optimizer: Optimizers | None = None,
        steps: int = 3,
        set_up: Callable[[Any], None] = lambda model: None,
        **options: Any,
    ) -> Any:
        """Trains a sharded copy on this rank's data, and ``plain`` on everyone's. Losses and weights must agree."""
        loss_of = loss_of or mean_square
        optimizer = optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-2))
        model = self.shard(copy.deepcopy(plain), units, **options)
        set_up(model)
        optimizers = [optimizer([p for p in one.parameters() if p.requires_grad]) for one in (model, plain)]
        for step in range(steps):
            losses = [loss_of(plain, rank, step) for rank in range(self.world)]
            (sum(losses[1:], losses[0]) / self.world).backward()
            loss = loss_of(model, self.rank, step)
            loss.backward()
            close(loss, losses[self.rank], f"loss of step {step}")
            same_gradients(model, plain, f"step {step}")
            for one in optimizers:
                one.step()
                one.zero_grad()
        same_weights(model, plain)
        return model


@functools.cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# --- models ---


class Block(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, a norm, and a head of three rows. Most shards are uneven."""

    def __init__(self, num: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(num))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


UNITS = ("blocks.0", "blocks.1", "blocks.2")


def data(rank: int = 0, step: int = 0) -> torch.Tensor:
    """Returns another batch for each rank and step."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank + 1))


def mean_square(model: Any, rank: int, step: int = 0) -> torch.Tensor:
    return model(data(rank, step)).float().square().mean()


# --- comparisons ---


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def close(found: torch.Tensor, expected: torch.Tensor, what: str = "", rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Raises if the values differ. Compares full tensors; collective for DTensors."""
    torch.testing.assert_close(
        full(found), full(expected), rtol=rtol, atol=atol, check_dtype=False, msg=lambda text: f"{what}: {text}"
    )


def same_gradients(model: nn.Module, plain: nn.Module, what: str = "", **tolerance: float) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), f"{what}: gradient of {name} is {param.grad}"
        if param.grad is not None and expected.grad is not None:
            close(param.grad, expected.grad, f"{what}: gradient of {name}", **tolerance)


def same_weights(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(param, expected, name, **tolerance)


def is_sharded(module: nn.Module) -> bool:
    """Whether the module's own and nested parameters are all registered as DTensors."""
    return all(isinstance(param, DTensor) for param in module.parameters())


def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], text: str = ""
) -> None:
    """Raises AssertionError unless the call raises the kind of error, with the text in its message."""
    try:
        call()
    except kind as error:
        assert text.lower() in str(error).lower(), f"the message lacks {text!r}: {error}"
        return
    raise AssertionError(f"no {getattr(kind, '__name__', kind)} was raised")
