"""The arrangements of a sharded model that the engine knows, each with a small model to train in it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from models import STACK_UNITS, Branches, Stack, inputs
from one_gpu import POLICIES

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


class StackedExperts(nn.Module):
    """Two experts in each parameter: fewer than ranks, so that they are cut along another dim."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(2, 16, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(2, WIDTH, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.up.mT).relu() @ self.down.mT).sum(0)


def stack(dtype: torch.dtype = torch.float32) -> Callable[[], nn.Module]:
    return lambda: Stack(width=WIDTH, hidden=96).to(dtype)


def partly_frozen() -> nn.Module:
    model = Stack(width=WIDTH, hidden=96)
    model.blocks[1].up.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


def branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches(WIDTH)


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


def optimizer_in_backward(model: nn.Module, lr: float = 1e-2) -> None:
    optimizers = {param: torch.optim.SGD([param], lr=lr) for param in model.parameters()}

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
    "stacked experts": Case(make=StackedExperts, units=(), options={"shard_placement_fn": last_dim}),
    "stacked experts, packed": Case(
        make=StackedExperts, units=(), options={"shard_placement_fn": last_dim}, pack_below=None
    ),
    "many parameters": Case(make=Many, units=()),
    "many parameters, packed": Case(make=Many, units=(), pack_below=1 << 20),
    "frozen": Case(make=partly_frozen),
    "missing gradients": Case(make=branches, units=BRANCHES, call=another),
    "missing gradients of a unit": Case(make=branches, units=(), call=another),
    "optimizer in backward": Case(set_up=optimizer_in_backward),
    "divided": Case(set_up=lambda model: model.set_force_sum_reduction_for_comms(True)),
}


def run(model: nn.Module, case: Case, device: str, num: int = STEPS, rank: int = 0) -> list[torch.Tensor | None]:
    """Losses, gradients and in the end parameters of this rank."""
    case.set_up(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    results = []
    for step in range(num):
        x = inputs(rank, step, rows=16, width=WIDTH).to(device, next(model.parameters()).dtype)
        loss = case.call(model, x, step).double().square().mean()
        loss.backward()
        results.append(loss.detach())
        results += [None if param.grad is None else param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(param.detach().to_local().clone() for param in model.parameters())]
