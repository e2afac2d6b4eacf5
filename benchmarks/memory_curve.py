"""Memory over a training step, for the picture of docs/how-it-works.md: fsdp2x and FSDP2, each with its own AdamW.

    python benchmarks/memory_curve.py [--steps 8] [--json benchmarks/memory_curve.json]

Two ranks train a model of 110 million parameters in fp32. This process reads the memory of both ranks together, as
bench_memory.py does, and rank 0 notes when each phase of a step begins. A reading at 1.5 is in the middle of backward.
The first two steps are left out, because they allocate. ``python benchmarks/draw.py`` draws the result.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import harness
from bench_memory import Ranks, pss_bytes, say
from bench_step import build_model
from peers import shard_stock
from step_cases import Case

CASE = Case(hidden=1024, layers=8, tokens=16, intermediate=3072)
WORLD, WARMUP = 2, 2
SIDES = ("fsdp2x", "stock")


def run_rank(side: str, rank: int, port: int, steps: int) -> None:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (part of the baseline)

    import fsdp2x

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size=None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    dist.barrier()
    say("imported")
    model = build_model(CASE)
    if side == "fsdp2x":
        fsdp2x.fully_shard(model)
        optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        shard_stock(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    report = fsdp2x.memory_report(model, optimizer).to_dict() if side == "fsdp2x" else {}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    ids = torch.randint(0, 512, (1, CASE.tokens), generator=torch.Generator().manual_seed(rank))
    marks = []
    for _ in range(WARMUP + steps):
        dist.barrier()
        began = [time.monotonic()]
        loss = model(input_ids=ids, labels=ids).loss
        began.append(time.monotonic())
        loss.backward()
        began.append(time.monotonic())
        optimizer.step()
        optimizer.zero_grad()
        del loss
        began.append(time.monotonic())
        marks.append(began)
    dist.barrier()
    say("trained", marks=marks[WARMUP:], plan={name: size for name, size in report.items() if name.endswith("_bytes")})
    dist.destroy_process_group()


def measure(side: str, steps: int) -> dict:
    """Readings of one side: where in the step, and the bytes of all ranks above the imports; and its plan's bytes."""
    ranks = Ranks([__file__, "--side", side, "--steps", str(steps)], WORLD)
    readings: list[tuple[float, int]] = []
    stopping = threading.Event()

    def watch() -> None:
        while not stopping.wait(0.002):
            began = time.monotonic()
            size = pss_bytes(ranks.pids)
            readings.append(((began + time.monotonic()) / 2, size))

    thread = threading.Thread(target=watch, daemon=True)
    try:
        ranks.wait_for("imported")
        baseline = pss_bytes(ranks.pids)
        ranks.go_on()
        thread.start()
        said = ranks.wait_for("trained")
        stopping.set()
        thread.join()
        ranks.go_on()
    finally:
        stopping.set()
        ranks.close()
    points = []
    for began in said[0]["marks"]:
        for number, (start, end) in enumerate(zip(began, began[1:], strict=False)):
            points += [
                (round(number + (at - start) / (end - start), 3), size - baseline)
                for at, size in readings
                if start <= at < end
            ]
    plan = {name: sum(one["plan"][name] or 0 for one in said) for name in said[0]["plan"]}
    return {"points": sorted(points), "plan": plan}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps that are drawn")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "memory_curve.json")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    for name in ("rank", "world", "port"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        run_rank(args.side, args.rank, args.port, args.steps)
        return 0
    results = {side: measure(side, args.steps) for side in SIDES}
    record = {"environment": harness.environment(), "model": CASE.title, "results": results}
    args.json.write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
