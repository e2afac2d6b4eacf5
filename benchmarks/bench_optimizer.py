"""Measures clipping and AdamW of fsdp2x against torch's on FSDP2, alternating in one run.

    python benchmarks/bench_optimizer.py [--cases units large] [--steps 15] [--runs 1] [--json FILE]

Starts its own 2 ranks. All sides have the same weights, units, and gradients, before every step as backward left them.
fp32, one thread a rank. A row counts only if norms and parameters agree at the end.

    ours         fsdp2x.clip_grad_norm_ and fsdp2x.optim.AdamW on fsdp2x.fully_shard
    one step     the same with AdamW(max_grad_norm=...), whose step clips
    stock        torch's defaults on torch's fully_shard
    unsharded    torch's clip and foreach AdamW on one rank's plain copy
    units        case: 49 units of 11 small parameters
    large        case: 40 M parameters in 12 units

``floor`` is the time of 28 bytes per element, at the speed of an in-place multiplication measured in the same run. A
step reads parameter, gradient, and two moments, and writes all but the gradient.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor

import harness


@dataclass(frozen=True)
class Case:
    num_units: int
    num_params: int  # of a unit
    shape: tuple[int, ...]  # of a parameter


CASES = {
    "units": Case(num_units=49, num_params=11, shape=(16, 16)),
    "large": Case(num_units=12, num_params=13, shape=(512, 512)),
}


class Unit(nn.Module):
    """A bag of parameters."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(case.shape)) for _ in range(case.num_params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack([weight.square().mean() for weight in self.weights]).sum()


def build_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Unit(case) for _ in range(case.num_units)))


def set_gradients(model: nn.Module) -> None:
    """Gradients as backward leaves them: the same values on every side."""
    model(torch.ones(1)).sum().backward()
    for number, grad in enumerate(local_gradients(model)):
        grad.copy_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(number)))


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    grads = [param.grad for param in model.parameters()]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def make_step(model: nn.Module, clip, optimizer: torch.optim.Optimizer, norms: list[torch.Tensor]):
    params = list(model.parameters())

    def step(timer: harness.PhaseTimer) -> None:
        norm = None
        if clip is not None:
            norm = clip(params, 1.0)
            timer.mark("clip")
        optimizer.step()
        timer.mark("optimizer")
        norms.append(optimizer.grad_norm if norm is None else norm)

    return step


def memory_seconds_per_byte() -> float:
    """Returns the time to read and write the same lines, like an optimizer: the median of passes larger than caches."""
    values = torch.ones(1 << 24)
    seconds = []
    for _ in range(9):
        dist.barrier()
        start = time.perf_counter()
        values.mul_(1.0)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / (2 * values.numel() * 4)


def run_case(case: Case, steps: int) -> dict:
    import fsdp2x

    plain = build_model(case)
    ours, fused, stock = (copy.deepcopy(plain) for _ in range(3))
    for shard, model, options in (
        (fsdp2x.fully_shard, ours, {"auto_wrap": False}),
        (fsdp2x.fully_shard, fused, {"auto_wrap": False}),
        (stock_fully_shard, stock, {}),
    ):
        for unit in model:
            shard(unit, **options)
        shard(model, **options)
    norms: dict[str, list[torch.Tensor]] = {"fsdp2x": [], "one step": [], "stock": [], "unsharded": []}
    torch_clip = torch.nn.utils.clip_grad_norm_
    sides = {
        "fsdp2x": (ours, fsdp2x.clip_grad_norm_, fsdp2x.optim.AdamW(ours.parameters(), lr=1e-3)),
        "one step": (fused, None, fsdp2x.optim.AdamW(fused.parameters(), lr=1e-3, max_grad_norm=1.0)),
        "stock": (stock, torch_clip, torch.optim.AdamW(stock.parameters(), lr=1e-3)),
        "unsharded": (plain, torch_clip, torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=True)),
    }
    pairs = []  # of gradients, and their values before they are clipped
    for model, _, _ in sides.values():
        set_gradients(model)
        pairs += [(grad, grad.clone()) for grad in local_gradients(model)]

    def restore() -> None:
        for grad, value in pairs:
            grad.copy_(value)
        harness.start_together()

    samples = harness.alternate(
        {name: make_step(*side, norms[name]) for name, side in sides.items()}, warmup=3, count=steps, before=restore
    )
    for norm, other in zip(norms["fsdp2x"], norms["stock"], strict=True):
        torch.testing.assert_close(norm, other.full_tensor(), rtol=1e-5, atol=0.0)
    assert norms["one step"] == norms["fsdp2x"]
    for model in (ours, fused):
        for param, other in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(param.to_local(), other.to_local(), rtol=1e-5, atol=1e-6)
    result = {name: sample.summary() for name, sample in samples.items()}
    numel = sum(param.to_local().numel() for param in ours.parameters())
    result["floor"] = {"optimizer": {"median_ms": 1e3 * 28 * numel * memory_seconds_per_byte()}}
    return result


def rows_of(results: dict) -> list[list[str]]:
    """The table: medians of each phase, and what memory speed allows."""
    header = [
        "case",
        "phase",
        "stock FSDP2, ms",
        "unsharded foreach, ms",
        "fsdp2x, ms",
        "ratio to stock",
        "one step, ms",
    ]
    rows = [header]
    for name, result in results.items():
        for phase in ("step", "clip", "optimizer"):
            stock, plain, ours = (result[side][phase]["median_ms"] for side in ("stock", "unsharded", "fsdp2x"))
            fused = f"{result['one step']['step']['median_ms']:.2f}" if phase == "step" else ""
            rows.append([name, phase, f"{stock:.2f}", f"{plain:.2f}", f"{ours:.2f}", f"{stock / ours:.2f}x", fused])
        rows.append([name, "floor", "", "", f"{result['floor']['optimizer']['median_ms']:.2f}", "", ""])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--runs", type=int, default=1, help="times that it is all done, in new processes; needs --json")
    args = parser.parse_args()
    if "RANK" not in os.environ and args.runs > 1:
        return harness.launch_runs(__file__, 2, 1800, args.runs, args.json)
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=2, timeout_s=1800)
    rank = harness.start_group()
    results = {name: run_case(CASES[name], args.steps) for name in args.cases}
    if rank == 0:
        print(harness.table(rows_of(results)), flush=True)
        harness.save(args.json, "optimizer", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
