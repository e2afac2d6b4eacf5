"""Measures grouped GEMM against the loop over experts, and tiled MLPs against untiled ones: step time and peak memory.

    python benchmarks/bench_moe.py [--quick] [--cases experts tiled] [--steps 7] [--world 2] [--json FILE]

Starts its own ranks. fsdp2x shards all sides, and they run alternately in one process group. fp32, one thread a rank.

``experts``: a Qwen3-MoE, once with few experts and once with many small ones. The losses of both sides must agree.
``tiled``: a Qwen3 with one wide MLP per layer on a long sequence. Besides the time, it reports by how much the rank's
largest resident set rises during a step. This is memory of activations and of backward. The kernel's high-water mark is
reset before each step.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import harness
from bench_step import qwen3_sizes


@dataclass(frozen=True)
class Experts:
    num_experts: int
    width: int  # of an expert
    hidden: int = 256
    layers: int = 2
    tokens: int = 512


@dataclass(frozen=True)
class Tiled:
    hidden: int = 256
    intermediate: int = 4096
    layers: int = 2
    tokens: int = 2048


EXPERTS = {"8 experts of 512": Experts(8, 512), "64 experts of 64": Experts(64, 64)}
TILED = {"2048 tokens, 256 -> 4096": Tiled()}
QUICK_EXPERTS = {"32 experts of 32": Experts(32, 32, hidden=128, tokens=128)}
QUICK_TILED = {"512 tokens, 128 -> 2048": Tiled(128, 2048, 1, 512)}
SHARDS = (4, 8)


def step_of(model: nn.Module, tokens: int, losses: list[float]) -> Callable[[harness.PhaseTimer], None]:
    ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(timer: harness.PhaseTimer) -> None:
        loss = model(input_ids=ids, labels=ids).loss
        timer.mark("forward")
        loss.backward()
        timer.mark("backward")
        losses.append(loss.item())
        model.zero_grad()

    return step


def run_experts(case: Experts, steps: int) -> dict:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import fsdp2x

    sizes = qwen3_sizes(case.hidden, case.layers, 2 * case.hidden, vocab=512)
    sizes |= {"num_experts": case.num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": case.width}
    sides, losses = {}, {}
    for name, grouped in (("grouped_mm", True), ("eager", False)):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
        if (chosen := fsdp2x.moe.use_grouped_gemm(model, grouped)) != name:
            raise RuntimeError(f"the widths of {case} do not fit the grouped product: {chosen}")
        losses[name] = []
        sides[name] = step_of(fsdp2x.fully_shard(model), case.tokens, losses[name])
    samples = harness.alternate(sides, warmup=2, count=steps)
    torch.testing.assert_close(torch.tensor(losses["grouped_mm"]), torch.tensor(losses["eager"]), rtol=1e-4, atol=0.0)
    return {name: sample.summary() for name, sample in samples.items()}


def run_tiled(case: Tiled, steps: int) -> dict:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import fsdp2x

    sides, losses = {}, {}
    for num_shards in (1, *SHARDS):
        torch.manual_seed(0)
        sizes = qwen3_sizes(case.hidden, case.layers, case.intermediate, vocab=512)
        model = fsdp2x.fully_shard(Qwen3ForCausalLM(Qwen3Config(**sizes)))
        if num_shards > 1:
            fsdp2x.apply_tiled_mlp(model, num_shards)
        name = "whole" if num_shards == 1 else f"{num_shards} chunks"
        losses[name] = []
        sides[name] = step_of(model, case.tokens, losses[name])
    samples = harness.alternate(sides, warmup=2, count=steps)
    for name in sides:
        torch.testing.assert_close(torch.tensor(losses[name]), torch.tensor(losses["whole"]), rtol=1e-4, atol=0.0)
    result = {name: sample.summary() for name, sample in samples.items()}
    timer = harness.PhaseTimer(harness.Samples(), counted=False)
    for name, step in sides.items():
        result[name]["peak"] = {"bytes": min(peak_bytes(step, timer) for _ in range(3))}
    return result


def peak_bytes(step: Callable[[harness.PhaseTimer], None], timer: harness.PhaseTimer) -> int:
    """How far the resident set grows during the step."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    dist.barrier()
    step(timer)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{key}:")) * 1024


def rows_of(results: dict) -> list[list[str]]:
    """The table: each side's step against the first line of its case."""
    rows = [["case", "side", "step, ms", "forward, ms", "backward, ms", "times the first", "peak of a step, MiB"]]
    for case, result in results.items():
        first = next(iter(result.values()))["step"]["median_ms"]
        for side, phases in result.items():
            times = [phases[phase]["median_ms"] for phase in ("step", "forward", "backward")]
            peak = f"{phases['peak']['bytes'] / 2**20:.1f}" if "peak" in phases else ""
            rows.append([case, side, *(f"{one:.1f}" for one in times), f"{times[0] / first:.2f}x", peak])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--cases", nargs="+", choices=("experts", "tiled"), default=["experts", "tiled"])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--world", type=int, default=2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, args.world, timeout_s=900)
    rank = harness.start_group()
    results = {}
    if "experts" in args.cases:
        for name, experts in (QUICK_EXPERTS if args.quick else EXPERTS).items():
            results[name] = run_experts(experts, args.steps)
    if "tiled" in args.cases:
        for name, tiled in (QUICK_TILED if args.quick else TILED).items():
            results[name] = run_tiled(tiled, args.steps)
    if rank == 0:
        print(harness.table(rows_of(results)))
        if args.json:
            harness.save(args.json, "moe", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
