"""Training a sharded model computes what one process computes on the data of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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


@behavior()
def gradients_are_added(t: Context) -> None:
    """Without zero_grad, a second backward adds to the same gradient tensors."""
    model, plain = t.shard(Net(), UNITS), Net()
    before: list[Any] = []
    for step in range(2):
        for rank in range(t.world):
            (mean_square(plain, rank, step) / t.world).backward()
        mean_square(model, t.rank, step).backward()
        before.append([param.grad for param in model.parameters()])
    assert all(one is other for one, other in zip(*before, strict=True))
    same_gradients(model, plain)


# Whether each of three micro-batches is reduced, and all-reduced.
ACCUMULATIONS = {
    "every": ((True, True), (True, True), (True, True)),
    "last": ((False, True), (False, True), (True, True)),
    "scatter": ((True, False), (True, False), (True, True)),
    "mixed": ((False, False), (True, False), (True, True)),
}


def _accumulate(t: Context, how: str, units: tuple[str, ...] = UNITS, **options: Any) -> None:
    plain = Net()
    model = t.shard(copy.deepcopy(plain), units, **options)
    for step in range(2):
        for number, (sync, all_reduce) in enumerate(ACCUMULATIONS[how]):
            model.set_requires_gradient_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            model.set_is_last_backward(number == 2)
            mean_square(model, t.rank, 3 * step + number).backward()
            for rank in range(t.world):
                (mean_square(plain, rank, 3 * step + number) / t.world).backward()
        same_gradients(model, plain, f"step {step}")
        for one in (model, plain):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
    same_weights(model, plain)


@behavior(rows=[(how, reshard) for how in ACCUMULATIONS for reshard in (True, False)])
def accumulates_gradients(t: Context, how: str, reshard: bool) -> None:
    """Micro-batches add up, whichever of them are reduced."""
    _accumulate(t, how, reshard_after_forward=reshard)


@behavior(ranks=2, rows=[(how, shape) for how in ACCUMULATIONS for shape in ((1, -1), (2, -1))])
def accumulates_in_hybrid_sharding(t: Context, how: str, shape: tuple[int, int]) -> None:
    """The same on meshes of replicas, which may leave the all-reduce to the last micro-batch."""
    _accumulate(t, how, mesh=t.mesh(*shape, names=("replicate", "shard")))


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
    for rank in range(t.world):
        ((mean_square(plain, rank) + mean_square(plain, rank, 1)) / t.world).backward()
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


@behavior(torch=(2, 13), ranks=2)
def unused_parameters_get_zeros(t: Context) -> None:
    """With set_reduce_scatter_unused_params(True), parameters without a gradient get zeros."""
    model = t.shard(Choosing(), ("blocks.0", "blocks.1+blocks.2"))
    model.set_reduce_scatter_unused_params(True)
    model(data(t.rank), (0, 1)).sum().backward()
    for param in model.blocks[2].parameters():
        close(param.grad, torch.zeros(param.shape), "unused")


@dataclass
class Result:
    first: torch.Tensor
    rest: dict[str, Any]


class Structured(nn.Module):
    """Takes and returns nested structures."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair: tuple, *, scale: dict) -> Result:
        y = self.linear(pair[0]) * scale["by"]
        return Result(y, {"list": [y * 2, pair[1]], "none": None})


@behavior()
def nested_inputs_and_outputs(t: Context) -> None:
    """Inputs and outputs may be nested in tuples, keyword arguments, dicts, lists, and dataclasses."""

    def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
        result = model((data(rank, step), "text"), scale={"by": 2.0})
        return (result.first + result.rest["list"][0]).square().mean()

    t.compare(nn.Sequential(Structured())[0], (), loss_of)


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
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "parameter list": lambda: _Lists(),
}


class _Adapter(nn.Module):
    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner, x)


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
        for rank in range(t.world):
            (mean_square(plain, rank, number) / t.world).backward()
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
    for rank in range(t.world):
        (10 * mean_square(plain, rank) / t.world).backward()
    (10 * mean_square(model, t.rank)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    close(found, expected, "norm")
    same_gradients(model, plain)


@behavior(rows=(True, False))
def clips_gradient_values(t: Context, foreach: bool) -> None:
    """clip_grad_value_ clips each element of the reduced gradient."""
    plain, model = Net(), t.shard(Net(), UNITS)
    for rank in range(t.world):
        (10 * mean_square(plain, rank) / t.world).backward()
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
    for rank in range(t.world):
        (mean_square(plain, rank) / t.world).backward()
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
