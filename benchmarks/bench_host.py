"""Measures host time of a unit's forward and backward, with empty collectives on both sides.

    python benchmarks/bench_host.py [--quick] [--steps 40] [--json FILE]

One process acts as rank 0 of 2, 8, 64, or 512. The process group is torch's fake one, and empty functions replace
torch.distributed's gathers and reductions. The remaining time is a rank's CPU work for a module: hooks, parameter
swaps, packing, and autograd nodes. The unsharded model is timed alternately and subtracted, so a row is the cost of
sharding one unit.

Most units only sum their parameters. "Qwen3 block" is a decoder layer of transformers, with empty collectives or with
custom ones (``set_custom_all_gather`` and ``set_custom_reduce_scatter``), which call the empty functions.

Before that, gathers and reductions act as if all ranks were alike. Losses and gradients of both sides must agree, or
there is no row. fp32, one thread. The first case is not counted, because it includes one-time work of the process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard

import harness


@dataclass(frozen=True)
class Case:
    question: str  # what varies: units, params, world, or the kind of unit
    world: int = 2
    num_units: int = 8
    num_params: int = 11
    numel: int = 64  # of a parameter
    is_block: bool = False  # a decoder layer of Qwen3
    is_custom: bool = False  # custom collectives

    @property
    def name(self) -> str:
        return f"W={self.world}, {self.num_units} units of {self.num_params}"


CASES = [
    *(Case("units", num_units=count) for count in (2, 8, 32, 64)),
    *(Case("params", num_params=count, num_units=4) for count in (1, 11, 100, 1000)),
    *(Case("world", world=count) for count in (2, 8, 64, 512)),
    Case("Qwen3 block", is_block=True),
    Case("Qwen3 block, custom", is_block=True, is_custom=True),
]
QUICK_CASES = [
    *(Case("units", num_units=count) for count in (2, 16)),
    *(Case("params", num_params=count, num_units=2) for count in (11, 200)),
    *(Case("world", world=count) for count in (2, 64)),
    Case("Qwen3 block, custom", num_units=2, is_block=True, is_custom=True),
]

HIDDEN = 8  # elements of the input

_NAMES = {
    "gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce": ("reduce_scatter_single", "reduce_scatter_tensor"),
}


class Unit(nn.Module):
    """Uses all its parameters in two operations, so that the model's own time stays small."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(case.numel)) for _ in range(case.num_params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.cat(list(self.weights)).mean()


class Block(nn.Module):
    """A decoder layer of Qwen3 with 11 parameters, on one token of ``HIDDEN`` elements."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": HIDDEN // 2}
        config = Qwen3Config(hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=1, **heads)
        config._attn_implementation = "sdpa"
        self.layer = Qwen3DecoderLayer(config, layer_idx=0)
        self.register_buffer("rotation", torch.ones(1, 1, HIDDEN // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(1, 1, HIDDEN), position_embeddings=(self.rotation, self.rotation))


def build_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() if case.is_block else Unit(case) for _ in range(case.num_units)))


class CustomCollective:
    """A collective in the sense of FSDP2 that calls torch.distributed's by name, in memory of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False, **more: Any
    ) -> Any:
        return getattr(dist, self._name)(output_tensor, input_tensor, group=group, async_op=async_op, **more)


@contextmanager
def collectives(gather: Callable | None, reduce: Callable) -> Iterator[None]:
    """Puts the functions in place of torch.distributed's, which both sides look up at each call. None: not replaced."""
    replaced = {"gather": gather, "reduce": reduce}
    kinds = {name: kind for kind, names in _NAMES.items() for name in names if hasattr(dist, name) and replaced[kind]}
    saved = {name: getattr(dist, name) for name in kinds}
    for name, kind in kinds.items():
        setattr(dist, name, replaced[kind])
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(dist, name, function)


def nothing(*args: Any, **kwargs: Any) -> None:
    """A collective that takes no time."""


def gather_alike(output: torch.Tensor, input: torch.Tensor, **kwargs: Any) -> None:
    """Every rank has this rank's rows."""
    output.view(-1, input.numel()).copy_(input.clone().view(-1))


def reduce_alike(output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> None:
    """Every rank has this rank's gradients."""
    world = input.numel() // output.numel()
    output.copy_(input.view(world, -1)[0].view_as(output))
    if op == dist.ReduceOp.SUM:
        output.mul_(world)


def input_of(device: str) -> torch.Tensor:
    return torch.ones(HIDDEN, device=device, requires_grad=True)


def check(ours: nn.Module, stock: nn.Module, device: str) -> None:
    """One step of both with ranks that are alike: equal losses and gradients."""
    with collectives(gather_alike, reduce_alike):
        losses = []
        for model in (ours, stock):
            loss = model(input_of(device)).square().sum()
            loss.backward()
            losses.append(loss.item())
    if losses[0] != losses[1]:
        raise AssertionError(f"losses differ: fsdp2x {losses[0]}, stock {losses[1]}")
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local(), theirs.grad.to_local(), rtol=1e-6, atol=0.0)
        mine.grad = theirs.grad = None


def make_step(model: nn.Module, device: str) -> Callable[[harness.PhaseTimer], None]:
    x = input_of(device)
    params = list(model.parameters())

    def step(timer: harness.PhaseTimer) -> None:
        loss = model(x).sum()
        timer.mark("forward")
        loss.backward()
        timer.mark("backward")
        for param in params:
            param.grad = None
        x.grad = None

    return step


def make_sides(case: Case, mesh: DeviceMesh, **options: Any) -> dict[str, nn.Module]:
    """The same model sharded by fsdp2x and by stock FSDP2, which have been checked against each other, and unsharded.

    ``options`` are those of both calls of fully_shard.
    """
    import fsdp2x

    options = {"mesh": mesh, **options}
    plain = build_model(case).to(mesh.device_type)
    ours, stock = copy.deepcopy(plain), copy.deepcopy(plain)
    for unit in ours:
        fsdp2x.fully_shard(unit, auto_wrap=False, transport="process_group", **options)
    fsdp2x.fully_shard(ours, auto_wrap=False, transport="process_group", **options)
    for unit in stock:
        stock_fully_shard(unit, **options)
    stock_fully_shard(stock, **options)
    if case.is_custom:
        for unit in (*ours, *stock):
            unit.set_custom_all_gather(CustomCollective("all_gather_into_tensor"))
            unit.set_custom_reduce_scatter(CustomCollective("reduce_scatter_tensor"))
    check(ours, stock, mesh.device_type)
    return {"fsdp2x": ours, "stock": stock, "unsharded": plain}


def time_sides(
    case: Case,
    models: dict[str, nn.Module],
    device: str,
    steps: int,
    before: Callable[[], None] = harness.start_together,
) -> dict:
    """Times of the host, by side and phase, and what a unit costs above the unsharded model. ``before`` each step."""
    timed = {name: make_step(model, device) for name, model in models.items()}
    with collectives(nothing, nothing):
        samples = harness.alternate(timed, warmup=3, count=steps, before=before)
    result: dict[str, Any] = {name: sample.summary() for name, sample in samples.items()}
    for name in ("fsdp2x", "stock"):
        result[name]["us_per_unit"] = {
            phase: 1e3 * (result[name][phase]["median_ms"] - result["unsharded"][phase]["median_ms"]) / case.num_units
            for phase in ("forward", "backward")
        }
    return {"case": asdict(case), **result}


def run_case(case: Case, steps: int) -> dict:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=case.world)
    try:
        models = make_sides(case, init_device_mesh("cpu", (case.world,)))
        return time_sides(case, models, "cpu", steps)
    finally:
        dist.destroy_process_group()


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: microseconds of a unit above the unsharded model."""
    rows = [["varied", "world", "units", "parameters", "phase", "stock FSDP2, µs", "fsdp2x, µs", "ratio"]]
    for result in results:
        case = result["case"]
        for phase in ("forward", "backward"):
            stock, ours = (result[side]["us_per_unit"][phase] for side in ("stock", "fsdp2x"))
            head = [case["question"], str(case["world"]), str(case["num_units"]), str(case["num_params"])]
            ratio = f"{stock / ours:.1f}x" if ours > 0 else "within noise"
            rows.append([*head, phase, f"{stock:.0f}", f"{ours:.0f}", ratio])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases and steps")
    parser.add_argument("--steps", type=int, default=None, help="default 40, quick 5")
    args = parser.parse_args()
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend "fake")

    torch.set_num_threads(1)
    steps = args.steps or (5 if args.quick else 40)
    run_case(QUICK_CASES[0], steps)
    results = [run_case(case, steps) for case in (QUICK_CASES if args.quick else CASES)]
    print(harness.table(rows_of(results)), flush=True)
    harness.save(args.json, "host", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
