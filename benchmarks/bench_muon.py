"""Measures a step of fsdp2x.optim.Muon against torch.optim.Muon over DTensors, and against full gathers on every rank.

    python benchmarks/bench_muon.py [--world 2] [--cases layers experts] [--sides SIDE ...] [--steps 7] [--json FILE]

Starts its own ranks. All sides alternately step the same matrices, sharded by rows, with the same gradients.

    layers    12 layers of width 256 with gated MLPs of 688: 84 matrices
    experts   64 experts of 128 x 256 in one layer, three matrices each
    torch     torch.optim.Muon on DTensors, whose products are DTensor's
    gather    common user code: full_tensor() of each update, the iterations on every rank, and this rank's rows
    stacks    fsdp2x with the experts as three stacks of 64
    float32   fsdp2x with ns_dtype=torch.float32
    gram      iterates on the Gram matrix

A CPU without bfloat16 products emulates them. ``--sides float32 float32-gram`` leaves them out there.

The error of a side is that of one update against the plain iteration in float64, as a share of the norm. The matrix has
singular values from 1 to 1e-4, and the largest error of all shapes counts. A row counts only if fsdp2x and ``gather``
agree bit for bit. Sent bytes are those of one rank in one step, counted by the inputs of collectives. An all-gather
sends its input to each other rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import harness

WIDTH, INNER, EXPERT = 256, 688, 128
LAYER = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER)]
CASES = {"layers": LAYER * 12, "experts": ([(EXPERT, WIDTH)] * 2 + [(WIDTH, EXPERT)]) * 64}
LR = 0.02
COEFFICIENTS = [(3.4445, -4.7750, 2.0315)] * 5
# Settings of ours by side; ``stacks`` are of experts only.
OURS = {
    "fsdp2x": {},
    "gram": {"ns_method": "gram"},
    "float32": {"ns_dtype": torch.float32},
    "float32-gram": {"ns_dtype": torch.float32, "ns_method": "gram"},
    "stacks": {},
    "float32-stacks": {"ns_dtype": torch.float32},
    "float32-stacks-gram": {"ns_dtype": torch.float32, "ns_method": "gram"},
}
SIDES = ("torch", "gather", *OURS)


class SentBytes(TorchDispatchMode):
    """Sums what this rank gives to collectives for others."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.total = world, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own collectives come through here
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            size = min(tensor.numel() * tensor.itemsize for tensor in tensors) if tensors else 0
            share = (self.world - 1) / self.world
            if "allgather" in name or "all_gather" in name:
                self.total += size * (self.world - 1)
            elif "alltoall" in name or "all_to_all" in name:
                self.total += round(args[1].numel() * share)
            elif "reduce_scatter" in name:
                self.total += round(args[0].numel() * args[0].itemsize * share)
            elif "all_reduce" in name or "allreduce" in name:
                self.total += round(2 * size * share)
        return func(*args, **(kwargs or {}))


class GatherEverything(torch.optim.Optimizer):
    """Gathers each update, orthogonalizes it on every rank, and shards it again. This is common user code."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure=None):
        from fsdp2x.optim.muon.newton_schulz import orthogonalize

        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
            momentum.lerp_(param.grad, 0.05)
            update = param.grad.lerp(momentum, 0.95).to(torch.bfloat16).full_tensor()
            whole = orthogonalize(update, COEFFICIENTS, 1e-7)
            rows, columns = param.shape
            local = whole.chunk(param.device_mesh.size())[param.device_mesh.get_rank()]
            param.to_local().mul_(1 - LR * 0.1).add_(local, alpha=-LR * max(1, rows / columns) ** 0.5)


def matrices(shapes: list[tuple[int, ...]], mesh: DeviceMesh) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        param = nn.Parameter(distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)]))
        param.grad = distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)])
        params.append(param)
    return params


def error_of(shapes: set[tuple[int, ...]], settings: dict) -> float:
    from fsdp2x.optim.muon.newton_schulz import orthogonalize

    worst = 0.0
    for shape in sorted(shapes):
        generator = torch.Generator().manual_seed(0)
        left, values, right = torch.linalg.svd(torch.randn(shape, generator=generator).double(), full_matrices=False)
        update = left * torch.logspace(0, -4, len(values), dtype=torch.float64) @ right
        given = update.to(settings.get("ns_dtype", torch.bfloat16))
        exact = orthogonalize(given.double(), COEFFICIENTS, 1e-7)
        result = orthogonalize(given, COEFFICIENTS, 1e-7, settings.get("ns_method", "standard"))
        worst = max(worst, ((result.double() - exact).norm() / exact.norm()).item())
    return worst


def run_case(name: str, mesh: DeviceMesh, steps: int, chosen: list[str]) -> dict:
    import fsdp2x
    from fsdp2x.base import torch_private

    shapes = CASES[name]
    stacks = [(len(shapes) // 3, *shape) for shape in shapes[:3]]
    of_side = {
        side: stacks if "stacks" in side else shapes for side in chosen if name == "experts" or "stacks" not in side
    }
    sides = {side: matrices(of_side[side], mesh) for side in of_side}
    others = {"gather": GatherEverything, "torch": lambda params: torch.optim.Muon(params, lr=LR)}
    optimizers = {
        side: others[side](params) if side in others else fsdp2x.optim.Muon(params, lr=LR, **OURS[side])
        for side, params in sides.items()
    }

    def make(optimizer):
        def step(timer: harness.PhaseTimer) -> None:
            optimizer.step()
            timer.mark("optimizer")

        return step

    samples = harness.alternate(
        {side: make(optimizer) for side, optimizer in optimizers.items()},
        warmup=1,
        count=steps,
        before=harness.start_together,
    )
    alike = (sides["fsdp2x"], sides["gather"]) if {"fsdp2x", "gather"} <= sides.keys() else ([], [])
    for ours, other in zip(*alike, strict=True):
        assert torch.equal(ours.to_local(), other.to_local()), "ours and gathering differ"
    result: dict = {side: sample.summary() for side, sample in samples.items()}
    for side, optimizer in optimizers.items():
        # Ours are hidden from modes, as frameworks count what they sent themselves.
        with mock.patch.object(torch_private, "unobserved", contextlib.nullcontext), SentBytes(mesh.size()) as sent:
            optimizer.step()
        result[side]["sent_bytes"] = sent.total
        result[side]["error"] = error_of(set(shapes), OURS.get(side, {}))
    return {"ranks": mesh.size(), "sides": result}


def rows_of(results: dict) -> list[list[str]]:
    rows = [["case", "ranks", "side", "step, ms", "range", "speedup", "error", "sent, MB"]]
    for name, result in results.items():
        for side, found in result["sides"].items():
            step = found["step"]
            first = result["sides"].get("torch", next(iter(result["sides"].values())))
            ratio = first["step"]["median_ms"] / step["median_ms"]
            error = f"{found['error']:.1e}" if "error" in found else ""
            spread = f"{step['min_ms']:.0f} to {step['max_ms']:.0f}"
            sent = f"{found['sent_bytes'] / 1e6:.1f}"
            median = f"{step['median_ms']:.1f}"
            rows.append([name, str(result["ranks"]), side, median, spread, f"{ratio:.2f}x", error, sent])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=args.world, timeout_s=1800)
    rank = harness.start_group()
    mesh = init_device_mesh("cpu", (args.world,))
    results = {name: run_case(name, mesh, args.steps, args.sides) for name in args.cases}
    if rank == 0:
        print(harness.table(rows_of(results)), flush=True)
        harness.save(args.json, "muon", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
