"""Training a sharded model computes what one process computes on the data of all ranks."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2x.conformance.behavior import (
    UNITS,
    Block,
    Context,
    Net,
    Optimizers,
    behavior,
    close,
    data,
    is_sharded,
    mean_square,
    raises,
    same_gradients,
    same_weights,
)

CUTS = {"root": (), "blocks": UNITS, "lists": ("blocks.0", "blocks.1+blocks.2", "norm+head")}
RESHARDS = (None, True, False)


@behavior(rows={f"{cut}, {reshard}": (CUTS[cut], reshard) for cut in CUTS for reshard in RESHARDS})
def equals_unsharded_training(t: Context, units: tuple[str, ...], reshard: bool | None) -> None:
    """However a model is cut and resharded, losses, gradients, and weights are those of unsharded training."""
    model = t.compare(Net(), units, reshard_after_forward=reshard)
    assert is_sharded(model)


@behavior(rows=("adamw", "adamw foreach", "adamw fused", "sgd momentum", "adagrad"))
def optimizers_step(t: Context, name: str) -> None:
    """torch's optimizers step sharded parameters as plain ones."""
    made: dict[str, Optimizers] = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
        "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
        "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
        "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    }
    t.compare(Net(), UNITS, optimizer=made[name])


@behavior()
def gradients_are_dtensors(t: Context) -> None:
    """Gradients are DTensors placed like their parameters; inputs that need gradients get them."""
    model, x = t.shard(Net(), UNITS), data(t.rank).requires_grad_()
    model(x).sum().backward()
    for param in model.parameters():
        assert isinstance(param.grad, DTensor) and param.grad.placements == param.placements
    assert x.grad is not None


@behavior(rows={"own": False, "of other code": True})
def gradients_are_added(t: Context, is_foreign: bool) -> None:
    """Without zero_grad, a backward adds to the gradient tensors that are there, whoever made them."""
    model, plain, before = t.shard(Net(), UNITS), Net(), []
    for step in range(2):
        if is_foreign and step == 0:
            for param in (*model.parameters(), *plain.parameters()):
                param.grad = torch.ones_like(param)
        else:
            t.backward(plain, step)
            mean_square(model, t.rank, step).backward()
        before = [param.grad for param in model.parameters()] if step == 0 else before
    assert all(one is param.grad for one, param in zip(before, model.parameters(), strict=True))
    same_gradients(model, plain)


# Whether each of three micro-batches is reduced, and all-reduced.
ACCUMULATIONS = {
    "every": ((True, True), (True, True), (True, True)),
    "last": ((False, True), (False, True), (True, True)),
    "scatter": ((True, False), (True, False), (True, True)),
    "mixed": ((False, False), (True, False), (True, True)),
}


def _variant(kind: str) -> tuple[Net, tuple[str, ...]]:
    if kind == "tied":
        return Tied(), ("blocks.0+blocks.1", "blocks.2")
    model = Net()
    if kind == "frozen":
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.bias.requires_grad_(False)
    return model, UNITS


def _accumulate(t: Context, how: str, kind: str = "plain", **options: Any) -> None:
    plain, units = _variant(kind)
    model = t.shard(copy.deepcopy(plain), units, **options)
    for step in range(2):
        for number, (sync, all_reduce) in enumerate(ACCUMULATIONS[how]):
            model.set_requires_gradient_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            model.set_is_last_backward(number == 2)
            mean_square(model, t.rank, 3 * step + number).backward()
            t.backward(plain, 3 * step + number)
        same_gradients(model, plain, f"step {step}")
        for one in (model, plain):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
    same_weights(model, plain)


@behavior(rows=[(how, reshard) for how in ACCUMULATIONS for reshard in (True, False)])
def accumulates_gradients(t: Context, how: str, reshard: bool) -> None:
    """Micro-batches add up, whichever of them are reduced."""
    _accumulate(t, how, reshard_after_forward=reshard)


@behavior(ranks=2, rows=[(how, kind) for how in ACCUMULATIONS for kind in ("plain", "frozen", "tied")])
def accumulates_in_hybrid_sharding(t: Context, how: str, kind: str) -> None:
    """The same on meshes of replicas, which may leave the all-reduce to the last micro-batch."""
    _accumulate(t, how, kind, mesh=t.mesh(2, -1, names=("replicate", "shard")))


@behavior(ranks=2, rows=((1, -1), (2, -1)))
def trains_in_hybrid_sharding(t: Context, *shape: int) -> None:
    """HSDP computes the same as sharding over all ranks."""
    t.compare(Net(), UNITS, mesh=t.mesh(*shape, names=("replicate", "shard")))


@behavior(ranks=2)
def no_sync_keeps_gradients_local(t: Context) -> None:
    """Without gradient sync, sharded parameters get no gradient; the next synced backward reduces all."""
    model = t.shard(Net(), UNITS)
    model.set_requires_gradient_sync(False)
    mean_square(model, t.rank).backward()
    model.reshard()
    for block in model.blocks:
        block.reshard()
    assert is_sharded(model) and all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    mean_square(model, t.rank, 1).backward()
    plain = Net()
    for step in range(2):
        t.backward(plain, step)
    same_gradients(model, plain)


@behavior(ranks=2)
def syncs_without_recursion(t: Context) -> None:
    """set_requires_gradient_sync(False, recurse=False) concerns one unit only."""
    model = t.shard(Net(), UNITS)
    model.blocks[1].set_requires_gradient_sync(False, recurse=False)
    mean_square(model, t.rank).backward()
    model.blocks[1].reshard()
    assert model.blocks[1].up.weight.grad is None and model.blocks[0].up.weight.grad is not None


@behavior(rows=("block", "all but the head", "biases", "first", "between steps"))
def frozen_parameters(t: Context, which: str) -> None:
    """Frozen parameters get no gradients and do not change; the others train as without sharding."""
    plain = Net()
    for name, param in plain.named_parameters():
        frozen = {
            "block": "blocks.1" in name,
            "all but the head": "head" not in name,
            "biases": name.endswith("bias"),
            "first": "blocks.0" in name,
        }
        param.requires_grad_(not frozen.get(which, False))
    model = t.compare(copy.deepcopy(plain), UNITS)
    if which != "between steps":
        return
    for step in range(2):
        for one in (model, plain):
            one.blocks[0].requires_grad_(step == 1)
            one.zero_grad()
        mean_square(model, t.rank, step).backward()
        assert (model.blocks[0].up.weight.grad is not None) == (step == 1)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


@behavior()
def shared_parameters_add_up(t: Context) -> None:
    """A parameter that two modules share gets the sum of their gradients."""
    t.compare(Tied(), ("blocks.0+blocks.1", "blocks.2"))


class Twice(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.blocks[1](self.blocks[0](x)))) + 0 * self.norm(self.blocks[2](x)).sum()


@behavior(rows=RESHARDS)
def units_run_twice(t: Context, reshard: bool | None) -> None:
    """A unit may run several times in one forward."""
    t.compare(Twice(), UNITS, reshard_after_forward=reshard)


@behavior(rows=RESHARDS)
def forwards_before_backward(t: Context, reshard: bool | None) -> None:
    """Several forwards may come before one backward of their sum."""

    def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
        return mean_square(model, rank, step) + mean_square(model, rank, step + 10)

    t.compare(Net(), UNITS, loss_of, reshard_after_forward=reshard)


@behavior(rows=RESHARDS)
def forwards_without_backward(t: Context, reshard: bool | None) -> None:
    """Forwards under no_grad between steps change nothing."""

    def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
        with torch.no_grad():
            model.eval()(data(rank, step + 10))
        return mean_square(model.train(), rank, step)

    t.compare(Net(), UNITS, loss_of, reshard_after_forward=reshard)


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@behavior(rows=[(reentrant, reshard) for reentrant in (False, True) for reshard in (True, False)])
def activation_checkpointing(t: Context, reentrant: bool, reshard: bool) -> None:
    """Units may be recomputed in backward, by either kind of torch's checkpointing."""
    t.compare(Checkpointed(reentrant), UNITS, reshard_after_forward=reshard)


class Choosing(Net):
    def forward(self, x: torch.Tensor, chosen: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        for index in chosen:
            x = self.blocks[index](x)
        return self.head(x)


@behavior(rows={"in all steps": "never", "in some steps": "alternately"})
def unused_parameters(t: Context, how: str) -> None:
    """Parameters that a step does not use keep no gradient, and may be used in the next step."""

    def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(data(rank, step), (0, 2) if how == "alternately" and step % 2 else (0, 1)).square().mean()

    t.compare(Choosing(), UNITS, loss_of)


class Aside(Net):
    """A unit runs without grad on some ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, x: torch.Tensor, rank: int = -1) -> torch.Tensor:
        with torch.set_grad_enabled(rank not in self.ranks):
            y = self.blocks[0](x)
        return self.head(x + y)


@behavior(torch=(2, 13), ranks=2, rows={"one rank": ((0,),), "all ranks": ((0, 1, 2, 3),)})
def unused_parameters_get_zeros(t: Context, without: tuple[int, ...]) -> None:
    """With set_reduce_scatter_unused_params(True), parameters without a gradient on a rank count as zeros there."""
    model, plain = t.shard(Aside(without), UNITS), Aside(without)
    model.set_reduce_scatter_unused_params(True)
    model(data(t.rank), t.rank).square().mean().backward()
    for rank in range(t.world):
        (plain(data(rank), rank).square().mean() / t.world).backward()
    for param, expected in zip(model.blocks[0].parameters(), plain.blocks[0].parameters(), strict=True):
        close(param.grad, torch.zeros(param.shape) if expected.grad is None else expected.grad, "unused")


@dataclass
class Record:
    value: torch.Tensor
    note: str = ""
    more: dict | None = None


Pair = namedtuple("Pair", ["first", "second"])
# How tensors are nested, and how they are found again.
PACKS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dict": (lambda x: {"value": x, "number": 3}, lambda v: v["value"]),
    "nested": (lambda x: {"deep": [{"value": (x, None)}, "text"]}, lambda v: v["deep"][0]["value"][0]),
    "named tuple": (lambda x: Pair(x, (x * 2, 1)), lambda v: v.first + v.second[0]),
    "ordered dict": (lambda x: OrderedDict(value=x), lambda v: v["value"]),
    "list": (lambda x: [x, [x * 2]], lambda v: v[0] + v[1][0]),
    "dataclass": (lambda x: Record(x, "note", {"again": x * 2}), lambda v: v.value + v.more["again"]),
}


class Packed(nn.Module):
    """Takes its input nested, by keyword, and returns its output nested."""

    def __init__(self, pack: Callable, unpack: Callable) -> None:
        super().__init__()
        self.block, self.pack, self.unpack = Block(), pack, unpack

    def forward(self, *, packed: Any) -> Any:
        x = self.unpack(packed)
        self.seen = x.dtype
        return self.pack(self.block(x))


@behavior(rows=PACKS, torch=(2, 12))
def nested_inputs_and_outputs(t: Context, pack: Callable, unpack: Callable) -> None:
    """Tensors may be nested in inputs and outputs: they are cast, and gradients flow through them."""

    def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
        return unpack(model[1](packed=pack(model[0](data(rank, step))))).square().mean()

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), Packed(pack, unpack))
    t.compare(copy.deepcopy(plain), ("0", "1"), loss_of, reshard_after_forward=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    unit = t.shard(plain[1], mp_policy=policy)
    assert unpack(unit(packed=pack(data()))).dtype == torch.float32 and unit.seen == torch.bfloat16


@behavior()
def detached_outputs(t: Context) -> None:
    """A backward may start from one of several outputs."""

    class Two(Net):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.blocks[0](x)
            return self.head(y), y.detach(), self.norm(self.blocks[1](y))

    t.compare(Two(), UNITS, lambda model, rank, step: model(data(rank, step))[0].square().mean())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: _Adapter(nn.LSTM(6, 6, batch_first=True), lambda m, x: m(x[:, None])[0][:, 0]),
    "attention": lambda: _Adapter(nn.MultiheadAttention(6, 2, batch_first=True), lambda m, x: m(x, x, x)[0]),
    "convolution": lambda: _Adapter(nn.Conv1d(1, 3, 3, padding=1), lambda m, x: m(x[:, None]).mean(1)),
    "embedding": lambda: _Adapter(nn.Embedding(11, 6), lambda m, x: m(x.abs().long().clamp(max=10)[:, 0])),
    "encoder layer": lambda: _Adapter(
        nn.TransformerEncoderLayer(6, 2, 5, dropout=0.0, batch_first=True), lambda m, x: m(x[:, None])[:, 0]
    ),
    "complex": lambda: _Complex(),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "parameter list": lambda: _Lists(),
}


class _Adapter(nn.Module):
    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner, x)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class _Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.ones(1, 6), torch.ones(2, 6)])
        self.named = nn.ParameterDict({"one": torch.ones(1), "cube": torch.ones(3, 2, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.named["one"] * self.named["cube"].mean((0, 1)) + self.rows[0] + self.rows[1].mean(0)


@behavior(rows=list(KINDS))
def kinds_of_modules(t: Context, kind: str) -> None:
    """Modules that treat their parameters in their own way train as without sharding."""
    torch.manual_seed(0)
    t.compare(nn.Sequential(nn.Linear(6, 6), KINDS[kind](), nn.Linear(6, 3)), ("1",))


@behavior()
def optimizer_in_backward(t: Context) -> None:
    """A post-accumulate-grad hook of a sharded parameter may step it while backward continues."""
    plain, model = Net(), t.shard(Net(), UNITS)

    def step(param: nn.Parameter) -> None:
        torch.optim.SGD([param], lr=0.1).step()
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for number in range(2):
        mean_square(model, t.rank, number).backward()
        t.backward(plain, number)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        plain.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    same_weights(model, plain)


@behavior(rows=("forward", "backward"))
def module_hooks_run(t: Context, kind: str) -> None:
    """Hooks of modules run once a step, and forward hooks see gathered weights."""
    model, seen = t.shard(Net(), UNITS), []
    register = "register_forward_hook" if kind == "forward" else "register_full_backward_hook"
    shapes = {"forward": lambda module: type(module.weight).__name__ == "Parameter", "backward": lambda module: True}
    for module in (model.blocks[0].up, model.head):
        getattr(module, register)(lambda module, *_: seen.append(shapes[kind](module)))
    for step in range(2):
        mean_square(model, t.rank, step).backward()
    assert seen == [True] * 4


@behavior(rows=(2.0, float("inf"), 1.0))
def clips_gradient_norms(t: Context, norm_type: float) -> None:
    """clip_grad_norm_ returns a DTensor whose full_tensor() is the norm over all ranks, and scales gradients by it."""
    plain, model = Net(), t.shard(Net(), UNITS)
    t.backward(plain, scale=10)
    (10 * mean_square(model, t.rank)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    close(found, expected, "norm")
    same_gradients(model, plain)


@behavior(rows=(True, False))
def clips_gradient_values(t: Context, foreach: bool) -> None:
    """clip_grad_value_ clips each element of the reduced gradient."""
    plain, model = Net(), t.shard(Net(), UNITS)
    t.backward(plain, scale=10)
    (10 * mean_square(model, t.rank)).backward()
    for one in (plain, model):
        nn.utils.clip_grad_value_(one.parameters(), 0.01, foreach=foreach)
    same_gradients(model, plain)


@behavior(ranks=2)
def ranks_take_different_losses(t: Context) -> None:
    """Ranks may scale their losses differently, as for token counts; gradients are the mean over ranks."""
    plain, model = Net(), t.shard(Net(), UNITS)
    for rank in range(t.world):
        ((rank + 1) * mean_square(plain, rank) / t.world).backward()
    ((t.rank + 1) * mean_square(model, t.rank)).backward()
    same_gradients(model, plain)


@behavior(torch=(2, 14))
def recovers_from_an_error(t: Context) -> None:
    """After an exception in forward or backward and reset_iter_state(), training goes on."""
    plain, model = Net(), t.shard(Net(), UNITS)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for register in (model.norm.register_forward_hook, model.blocks[1].down.register_full_backward_hook):
        handle = register(fail)
        raises(ZeroDivisionError, lambda: mean_square(model, t.rank).backward())
        handle.remove()
        model.reset_iter_state()
    model.zero_grad()
    dist.barrier()
    mean_square(model, t.rank).backward()
    t.backward(plain)
    same_gradients(model, plain)


@behavior()
def independent_roots(t: Context) -> None:
    """Two sharded models, such as a policy and a critic, train in turn and together."""
    first, second = t.shard(Net(), UNITS), t.shard(nn.Sequential(Block(3), Block(3)), ("0", "1"))
    plains = Net(), nn.Sequential(Block(3), Block(3))
    for one, param in zip(plains[1].parameters(), second.parameters(), strict=True):
        one.data = param.full_tensor().detach().clone()
    for rank in range(t.world):
        (plains[1](plains[0](data(rank))).square().mean() / t.world).backward()
    second(first(data(t.rank))).square().mean().backward()
    for model, plain in zip((first, second), plains, strict=True):
        same_gradients(model, plain)
