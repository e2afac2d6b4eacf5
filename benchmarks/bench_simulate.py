"""The simulator against this machine: forward and backward of a step, foretold from links that are measured here.

    python benchmarks/bench_simulate.py [--world 2] [--cases comm many ...] [--steps 9] [--json FILE]

Measured first, by all ranks at once, with nothing of the step in it: gathers and reductions of two sizes over gloo and
over shared memory (a latency and a bandwidth each), and a copy in memory; and, in turn with the steps, the same model
unsharded: how fast this machine computes. Host times of a unit are those of ``bench_host.py``. From these the step is
foretold, for fsdp2x over both transports and for stock FSDP2. Of everything the fastest of several runs counts.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import bench_collectives
import bench_step
import harness
import peers
import plots
import step_cases

CASES = ("comm", "many", "compute", "moe")
SIZES = (2**18, 2**24)


def machine_of(transport: str, timed: list[dict], memory_bytes_per_s: float):
    """Two measured sizes make a latency and a bandwidth of each kind; the compute's rate is filled in later."""
    from fsdp2x.simulate.machines import Machine, Protocol

    world = dist.get_world_size()
    protocols = []
    for kind in ("all_gather", "reduce_scatter"):
        few, many = (1e-3 * one[transport][kind]["min_ms"] for one in timed)
        moved = (SIZES[1] - SIZES[0]) * (world - 1) / world
        bytes_per_s = moved / max(many - few, 1e-9)
        base_s = max(few - SIZES[0] * (world - 1) / world / bytes_per_s, 0.0)
        protocols.append(Protocol(base_s, 0.0, 0.0, bytes_per_s, (kind,)))
    return Machine(
        name=f"this machine, {transport}", ranks_per_node=world, inside_bytes_per_s=1.0, across_bytes_per_s=1.0,
        ring=tuple(protocols), tree=None, flops_per_s=1.0, launch_s=0.0, collective_s=0.0, module_s=0.0,
        memory_bytes_per_s=memory_bytes_per_s if transport == "gloo" else math.inf, is_device=False,
    )  # fmt: skip


def step_of(model: nn.Module, tokens: int) -> Callable[[harness.PhaseTimer], None]:
    ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(timer: harness.PhaseTimer) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        timer.mark("both")
        for param in model.parameters():
            param.grad = None

    return step


def run_case(name: str, machines: dict, steps: int) -> dict:
    import fsdp2x

    case = step_cases.CASES[name]
    plain = bench_step.build_model(case)
    models = {
        "unsharded": plain,
        "process_group": fsdp2x.fully_shard(copy.deepcopy(plain), transport="process_group"),
        "shm": fsdp2x.fully_shard(copy.deepcopy(plain), transport="shm"),
        "stock": peers.shard_stock(copy.deepcopy(plain)),
    }
    samples = harness.alternate(
        {side: step_of(model, case.tokens) for side, model in models.items()}, warmup=3, count=steps
    )
    # The fastest of each: what else runs on the machine only adds to a step.
    measured = {side: _mean_of_ranks(min(one.phases["both"])) for side, one in samples.items()}
    compute_s = measured["unsharded"]
    planned = {side: foretell(plain, case.tokens, side, machines, compute_s) for side in plots.SIMULATED}
    return {
        "case": name,
        "world": dist.get_world_size(),
        "compute_ms": 1e3 * compute_s,
        **{side: {"foretold_ms": 1e3 * planned[side], "measured_ms": 1e3 * measured[side]} for side in plots.SIMULATED},
    }


def foretell(model: nn.Module, tokens: int, side: str, machines: dict, compute_s: float) -> float:
    """Seconds of forward and backward."""
    from dataclasses import replace

    from fsdp2x.memory.plan import planned_facts
    from fsdp2x.simulate.step import simulate
    from fsdp2x.simulate.work import work_of

    flops = sum(one.flops + one.backward_flops for one in work_of(model, tokens, tokens).values())
    transport = "shm" if side == "shm" else "process_group"
    machine = replace(machines["shm" if side == "shm" else "gloo"], flops_per_s=flops / compute_s)
    # Stock waits for each of its collectives on a CPU; shared memory is copied by the host itself.
    machine = replace(machine, is_blocking=side != "process_group")
    facts = planned_facts(model, dist.get_world_size(), device="cpu", transport=transport)
    names = ("fsdp2",) if side == "stock" else ()
    step = simulate(model, facts, machine, tokens=tokens, sequence_length=tokens, mfu=1.0, peers=names).steps[-1]
    return step.step_s - step.optimizer_s


def _mean_of_ranks(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def copy_bytes_per_s() -> float:
    """Of reading and writing together, while every rank copies."""
    source = torch.ones(2**24)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(7):
        harness.start_together()
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / _mean_of_ranks(min(seconds))


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: foretold, measured, and the error of what is foretold."""
    rows = [["case", "ranks", "unsharded, ms", "side", "foretold, ms", "measured, ms", "error"]]
    for one in results:
        for side, title in plots.SIMULATED.items():
            foretold, measured = one[side]["foretold_ms"], one[side]["measured_ms"]
            head = [one["case"], str(one["world"]), f"{one['compute_ms']:.1f}", title]
            rows.append([*head, f"{foretold:.1f}", f"{measured:.1f}", f"{foretold / measured - 1:+.0%}"])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one case, few steps")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=None)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="default 9, quick 5")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=args.world, timeout_s=1800)
    rank = harness.start_group()
    steps = args.steps or (5 if args.quick else 9)
    meet = bench_collectives.Meeting()
    timed = [bench_collectives.run_size(size, steps, meet) for size in SIZES]
    memory_bytes_per_s = copy_bytes_per_s()
    machines = {name: machine_of(name, timed, memory_bytes_per_s) for name in ("gloo", "shm")}
    results = [run_case(name, machines, steps) for name in args.cases or (CASES[:1] if args.quick else CASES)]
    if rank == 0:
        print(harness.table(rows_of(results)), flush=True)
        harness.save(args.json, "simulate", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
