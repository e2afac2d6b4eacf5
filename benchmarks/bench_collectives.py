"""Measures gather and reduction of one parameter over shared memory, against gloo's collectives and memcpy.

    python benchmarks/bench_collectives.py [--quick] [--world 2] [--steps 9] [--runs 1] [--json FILE]

Starts its own ranks. fp32, one thread a rank. Both sides start together and must end with equal results.

``all_gather``: ``unshard()`` of a model of one parameter against ``dist.all_gather_into_tensor`` of the same bytes.
Each rank of fsdp2x writes its rows and waits for the others. ``reduce_scatter``: backward of that model against the
same backward without a wrapper. Its gradient exists beforehand, so the time is that of packing, waiting, summing, and
attaching. ``dist.reduce_scatter_tensor`` gets the other gradient.

The floors are copies. A gather's floor copies the bytes that a rank writes. A reduction's floor copies the packed
bytes, and those that are read and written to sum. ``floor`` copies warm memory and does not wait, which no collective
can do. ``met`` is the lower bound here: it alternates with the others, so it starts as cold and as late as they do. It
ends when all ranks have copied, which each rank signals with a number in shared memory.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import harness

SIZES = [1 << shift for shift in (10, 14, 18, 20, 22, 24, 26, 28)]
QUICK_SIZES = [1 << shift for shift in (10, 18, 22)]


class _Give(torch.autograd.Function):
    """Its backward hands over a gradient that exists already: autograd neither computes nor copies it."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, x: torch.Tensor, ready: list, deliver: Callable) -> torch.Tensor:
        ctx.ready, ctx.deliver = ready, deliver
        return x * 1.0

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.deliver(ctx.ready.pop()), grad, None, None


class One(nn.Module):
    """A model of one parameter. ``deliver`` gets its gradient in backward and returns what autograd is to have."""

    def __init__(self, num_bytes: int, deliver: Callable = lambda gradient: gradient) -> None:
        super().__init__()
        self.deliver = deliver
        rows = num_bytes // 4
        self.weight = nn.Parameter(torch.arange(rows, dtype=torch.float32) % 1021)
        self.ready: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Give.apply(self.weight, x, self.ready, self.deliver)


def gradient_of(numel: int) -> torch.Tensor:
    """This rank's gradient; multiples of 1/8 whose sums are exact in any order."""
    return ((torch.arange(numel) % 509) + dist.get_rank()).float() / 8


class Meeting:
    """Ranks of this host wait for each other, at a number each in shared memory, and do nothing else."""

    def __init__(self) -> None:
        self._rank, self._world, self._count = dist.get_rank(), dist.get_world_size(), 0
        self._yields = self._world > len(os.sched_getaffinity(0))
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="fsdp2x-bench-") as file:
            file.truncate(64 * self._world)
            path = [file.name]
            dist.broadcast_object_list(path, src=0)
            with open(path[0], "r+b") as shared:
                self._numbers = memoryview(mmap.mmap(shared.fileno(), 64 * self._world)).cast("Q")
            dist.barrier()

    def __call__(self) -> None:
        self._count += 1
        self._numbers[8 * self._rank] = self._count
        while any(self._numbers[8 * rank] < self._count for rank in range(self._world)):
            if self._yields:
                os.sched_yield()


def memcpy_seconds(num_bytes: int, steps: int) -> float:
    """Copying ``num_bytes`` between warm buffers, all ranks at once: the median."""
    source, target = torch.ones(max(num_bytes // 4, 1)), torch.ones(max(num_bytes // 4, 1))
    seconds = []
    for _ in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def run_size(num_bytes: int, steps: int, meet: Meeting) -> dict:
    import fsdp2x

    world, rank = dist.get_world_size(), dist.get_rank()
    numel = num_bytes // 4
    model = fsdp2x.fully_shard(One(num_bytes), auto_wrap=False, transport="shm")
    shard = model.weight.to_local().detach().clone()
    whole = torch.empty(numel)
    gradient, summed = gradient_of(numel), torch.empty(numel // world)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    x = torch.ones(1, requires_grad=True)

    def ours(timer: harness.PhaseTimer) -> None:
        model.unshard()
        timer.mark("all_gather")
        if not torch.equal(model.weight, whole):
            raise AssertionError(f"gathers of {num_bytes} bytes differ on rank {rank}")
        model.ready.append(gradient.clone())
        loss = model(x)
        harness.start_together()
        timer.mark("between")
        loss.backward()
        timer.mark("reduce_scatter")
        torch.testing.assert_close(model.weight.grad.to_local(), summed, rtol=0.0, atol=0.0)
        model.reshard()
        model.zero_grad()
        x.grad = None

    unwrapped = One(num_bytes, deliver=lambda ready: reduce_scatter(summed, ready))  # returns None: no `.grad`

    def gloo(timer: harness.PhaseTimer) -> None:
        all_gather(whole, shard)
        timer.mark("all_gather")
        unwrapped.ready.append(gradient.clone())
        loss = unwrapped(x)
        harness.start_together()
        timer.mark("between")
        loss.backward()
        timer.mark("reduce_scatter")
        summed.div_(world)
        x.grad = None

    # Packed once; then the rows of all ranks are read, and their sum is written: half of that each way is a copy.
    traffic = num_bytes + (num_bytes + num_bytes // world) // 2
    sources, targets = torch.ones(traffic // 4), torch.ones(traffic // 4)

    def met(timer: harness.PhaseTimer) -> None:
        targets[: numel // world].copy_(shard)
        meet()
        timer.mark("all_gather")
        harness.start_together()
        timer.mark("between")
        targets.copy_(sources)
        meet()
        timer.mark("reduce_scatter")

    all_gather(whole, shard)
    reduce_scatter(summed, gradient)
    summed.div_(world)
    samples = harness.alternate({"shm": ours, "gloo": gloo, "met": met}, warmup=3, count=steps)
    result: dict[str, Any] = {name: sample.summary() for name, sample in samples.items()}
    result["floor"] = {
        "all_gather": {"median_ms": 1e3 * memcpy_seconds(num_bytes // world, steps)},
        "reduce_scatter": {"median_ms": 1e3 * memcpy_seconds(traffic, steps)},
    }
    return {"bytes": num_bytes, "world": world, **result}


def readable(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: medians, the ratio to gloo, and how far from the copies; results of before ``met`` are without it."""
    has_met = all("met" in result for result in results)
    floors = {"met": "copy and meeting, ms", "floor": "copy, ms"} if has_met else {"floor": "copy, ms"}
    rows = [["collective", "ranks", "bytes", "gloo, ms", "shared memory, ms", "ratio"]]
    for title in floors.values():
        rows[0] += [title, "times that" if title != "copy, ms" else "times the copy"]
    for phase in ("all_gather", "reduce_scatter"):
        for result in results:
            gloo, ours = (result[side][phase]["median_ms"] for side in ("gloo", "shm"))
            row = [phase, str(result["world"]), readable(result["bytes"])]
            row += [*(harness.spread(result[side][phase], 3) for side in ("gloo", "shm")), f"{gloo / ours:.1f}x"]
            for side in floors:
                row += [harness.spread(result[side][phase], 3), f"{ours / result[side][phase]['median_ms']:.1f}x"]
            rows.append(row)
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and steps")
    parser.add_argument("--sizes", nargs="+", type=int, default=None, help=f"bytes; default {SIZES}")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="default 9, quick 5")
    parser.add_argument("--runs", type=int, default=1, help="times that it is all done, in new processes; needs --json")
    args = parser.parse_args()
    if "RANK" not in os.environ and args.runs > 1:
        return harness.launch_runs(__file__, args.world, 1800, args.runs, args.json)
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=args.world, timeout_s=1800)
    rank = harness.start_group()
    sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    meet = Meeting()
    results = [run_size(size, args.steps or (5 if args.quick else 9), meet) for size in sizes]
    if rank == 0:
        print(harness.table(rows_of(results)), flush=True)
        harness.save(args.json, "collectives", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
