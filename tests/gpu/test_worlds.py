"""One GPU: steps of rank 0 of a world of ranks alike are stock FSDP2's, in every arrangement that the engine knows.

Collectives go through NCCL, a part of each rank at a time (tests/alike.py). The rehearsal on the CPU is the same body
over gloo, and its record has no races.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import alike
import fsdp2x
from harness import distributed
from models import STACK_UNITS, Branches, Stack, inputs
from one_gpu import CLOSE, POLICIES, device_of, each_backend
from reference import full, only_fsdp2x, same, shard, shard_stock

WIDTH, WORLD, STEPS = 64, 4, 3
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
# More than a launch's table of parameters holds.
MANY = 700


class Many(nn.Module):
    """One unit of very many parameters, as experts that are not fused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.ParameterList(torch.randn(8, 3) for _ in range(MANY))
        self.head = nn.Linear(3 * 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x[:, : 3 * 8] * torch.stack([row.flatten() for row in self.rows]).mean(0))


def stack(dtype: torch.dtype = torch.float32) -> Callable[[], nn.Module]:
    return lambda: Stack(width=WIDTH, hidden=96).to(dtype)


def partly_frozen() -> nn.Module:
    model = Stack(width=WIDTH, hidden=96)
    model.blocks[1].up.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = field(default_factory=stack)
    units: tuple[str, ...] = STACK_UNITS
    sizes: tuple[int, ...] = (WORLD,)  # two: replicas and shards
    options: dict = field(default_factory=dict)  # of fully_shard
    pack_below: int | None = 0
    close: str = "fp32"
    call: Callable = lambda model, x, step: model(x)
    set_up: Callable[[nn.Module], object] = lambda model: None


def optimizer_in_backward(model: nn.Module) -> None:
    optimizers = {param: torch.optim.SGD([param], lr=1e-2) for param in model.parameters()}

    def update(param: nn.Parameter) -> None:
        optimizers[param].step()
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)


def another(model: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
    """Layers that a step leaves out have no gradient in it."""
    return model(x, ((0, 1, 2), (1, 3), (4, 2, 0))[step % 3])


def last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


BRANCHES = tuple(f"layers.{i}" for i in range(3))
CASES = {
    "fp32": Case(),
    "bf16": Case(options={"mp_policy": POLICIES["bf16"]}, close="bf16"),
    "bf16 reduced": Case(options={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}, close="bf16"),
    "fp16": Case(options={"mp_policy": FP16}, close="bf16"),
    "f64": Case(make=stack(torch.float64)),
    "all packed": Case(pack_below=None),
    "small packed": Case(pack_below=8000, options={"mp_policy": POLICIES["bf16"]}, close="bf16"),
    "kept after forward": Case(options={"reshard_after_forward": False}),
    "kept in a smaller world": Case(options={"reshard_after_forward": 2}),
    "replicas": Case(sizes=(2, 2)),
    "replicas, bf16": Case(sizes=(2, 2), options={"mp_policy": POLICIES["bf16"]}, close="bf16"),
    "last dim": Case(options={"shard_placement_fn": last_dim}),
    "many parameters": Case(make=Many, units=()),
    "many parameters, packed": Case(make=Many, units=(), pack_below=1 << 20),
    "frozen": Case(make=partly_frozen),
    "missing gradients": Case(make=lambda: Branches(WIDTH), units=BRANCHES, call=another),
    "missing gradients of a unit": Case(make=lambda: Branches(WIDTH), units=(), call=another),
    "optimizer in backward": Case(set_up=optimizer_in_backward),
    "divided": Case(set_up=lambda model: model.set_force_sum_reduction_for_comms(True)),
}


def run(model: nn.Module, case: Case, device: str, num: int = STEPS) -> list[torch.Tensor | None]:
    """Losses, gradients and in the end parameters of this rank."""
    case.set_up(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    results = []
    for step in range(num):
        x = inputs(0, step, rows=16, width=WIDTH).to(device, next(model.parameters()).dtype)
        loss = case.call(model, x, step).double().square().mean()
        loss.backward()
        results.append(loss.detach())
        results += [None if param.grad is None else param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(param.detach().to_local().clone() for param in model.parameters())]


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.parametrize("name", CASES)
@pytest.mark.shows("worlds")
def test_steps_are_stocks(ctx, place, backend, name):
    only_fsdp2x(ctx)
    case, device = CASES[name], device_of(place)
    with alike.world_of(device, backend, case.sizes, case.pack_below) as (mesh, world):
        options = {"mesh": mesh, **case.options}
        model = case.make()
        stock = shard_stock(copy.deepcopy(model), case.units, **options)
        ours = shard(ctx, model, case.units, transport=place if place == "streams" else "auto", **options)
        expected = run(stock, case, device)
        world.counts = dict.fromkeys(world.counts, 0)
        got = run(ours, case, device)
        same(got, expected, name, **CLOSE[case.close])
        gathers = world.counts["gather of many"] + (world.counts["gather"] if case.pack_below != 0 else 0)
        assert gathers >= STEPS and world.counts["reduction"] >= STEPS, world.counts
        assert (world.counts["all-reduce"] > 0) == (len(case.sizes) == 2)
        del stock, ours, model


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.parametrize("kind", ["process_group", "symmetric"])
@pytest.mark.shows("communication memory")
def test_steps_in_memory_for_collectives(ctx, place, backend, kind):
    """Slots and buffers from the backend's allocator, and from torch's pool of symmetric memory."""
    only_fsdp2x(ctx)
    if kind == "symmetric" and place != "cuda":
        pytest.skip("the CPU has no symmetric memory")
    device, case = device_of(place), CASES["bf16"]
    with alike.world_of(device, backend, case.sizes) as (mesh, _):
        options = {"mesh": mesh, "transport": place if place == "streams" else "auto", **case.options}
        plain = shard(ctx, case.make(), case.units, **options)
        ours = shard(ctx, case.make(), case.units, **options)
        if kind == "process_group":
            ours.set_allocate_memory_from_process_group_for_comm(True)
        else:
            ours.set_symm_mem_for_comm("NCCL")
            for model in (plain, ours):  # its symmetric reductions sum only
                model.set_force_sum_reduction_for_comms(True)
        same(run(ours, case, device), run(plain, case, device), kind)


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.shows("worlds")
def test_several_roots_take_turns(ctx, place, backend):
    """A policy and its critic: two models whose steps interleave share the device's lanes."""
    only_fsdp2x(ctx)
    device, case = device_of(place), CASES["bf16"]
    with alike.world_of(device, backend, case.sizes) as (mesh, _):
        options = {"mesh": mesh, **case.options}

        def results(make: Callable) -> list:
            models = [make(Stack(width=WIDTH, hidden=96, seed=seed), case.units, **options) for seed in (0, 1)]
            found = []
            for step in range(STEPS):
                x = inputs(0, step, rows=16, width=WIDTH).to(device)
                first, second = (model(x).double().square().mean() for model in models)
                second.backward()  # the last forward is not the first to go back
                first.backward()
                for model in models:
                    found += [param.grad.to_local().clone() for param in model.parameters()]
                    model.zero_grad()
            return found

        def ours(model, units, **options):
            return shard(ctx, model, units, transport=place if place == "streams" else "auto", **options)

        same(results(ours), results(shard_stock), "gradients", **CLOSE["bf16"])


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.shows("optimizers")
def test_our_adamw_with_clipping(ctx, place, backend, name):
    """Against torch's over stock's shards; states of torch's fused one are taken over in the middle."""
    only_fsdp2x(ctx)
    case, device = CASES[name], device_of(place)
    with alike.world_of(device, backend, case.sizes) as (mesh, _):
        options = {"mesh": mesh, **case.options}
        model = case.make()
        stock = shard_stock(copy.deepcopy(model), case.units, **options)
        ours = shard(ctx, model, case.units, transport=place if place == "streams" else "auto", **options)
        torchs = torch.optim.AdamW(stock.parameters(), lr=1e-2, fused=True)
        mine = fsdp2x.optim.AdamW(ours.parameters(), lr=1e-2)
        results: list[list] = [[], []]
        for step in range(2 * STEPS):
            if step == STEPS:
                mine.load_state_dict(copy.deepcopy(torchs.state_dict()))
            x = inputs(0, step, rows=16, width=WIDTH).to(device)
            waits = never_waiting(place) if step > STEPS + 1 else contextlib.nullcontext()
            for found, sharded, optimizer in zip(results, (stock, ours), (torchs, mine), strict=True):
                loss = sharded(x).double().square().mean()
                loss.backward()
                with waits if optimizer is mine else contextlib.nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        results[0] += [full_local(param) for param in stock.parameters()]
        results[1] += [full_local(param) for param in ours.parameters()]
        same(results[1], results[0], "losses and weights", **CLOSE["bf16"])


def full_local(param: nn.Parameter) -> torch.Tensor:
    return full(param.detach().to_local())


@contextlib.contextmanager
def never_waiting(place: str):
    """On a device: an operation for which the host waits is an error."""
    if place == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if place == "cuda":
            torch.cuda.set_sync_debug_mode("default")
