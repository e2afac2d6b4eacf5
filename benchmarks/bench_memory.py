"""Measures memory of training: proportional set size summed over the ranks, minus that of the imports.

    python benchmarks/bench_memory.py [--quick] [--cases comm compute] [--world 2] [--steps 4] [--json FILE]

Each implementation (fsdp2x, FSDP2, DDP, and DeepSpeed ZeRO-3 if it is installed) gets new processes, one after the
other. They import everything, join a gloo group, and wait. This is the baseline. Then they build the model, shard it,
return freed memory to the kernel, and train with torch's AdamW. Meanwhile this process reads the ``Pss`` of all of them
(shared pages in equal parts) every few milliseconds.

``peak`` is the largest sum during the steps, ``resting`` the sum after them. Losses of all sides must agree. fp32, one
thread a rank. ``plan`` is what fsdp2x's memory_report estimates for all ranks, without activations.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import IO

import torch
import torch.distributed as dist

import harness
from bench_step import build_model
from peers import ZeRO3, has_deepspeed, shard_stock
from step_cases import CASES, Case

SIDES = ("fsdp2x", "stock", "ddp", "zero3")
QUICK = Case(hidden=256, layers=4, tokens=16, intermediate=768)
_SAMPLE_EVERY_S = 0.01
_TIMEOUT_S = 600


# ---- a rank


def run_rank(side: str, case: Case, rank: int, world: int, port: int, steps: int) -> None:
    """Speaks JSON lines: says when it is ready for the next stage, and waits for a line."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (part of the baseline)

    import fsdp2x
    from fsdp2x import fully_shard  # noqa: F401, the first name imports what all of them need

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size=None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    if side == "zero3":
        # DeepSpeed would ask MPI for these. Its import is part of the baseline.
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", **{k: str(v) for k, v in place.items()}}
        import deepspeed  # noqa: F401
    dist.barrier()
    say("imported")
    model = build_model(case)
    counted = {}
    if side == "fsdp2x":
        fsdp2x.fully_shard(model)
    elif side == "stock":
        shard_stock(model)
    zero3 = ZeRO3(model, lr=1e-4) if side == "zero3" else None
    optimizer_model = torch.nn.parallel.DistributedDataParallel(model) if side == "ddp" else zero3 or model
    optimizer = None if zero3 else torch.optim.AdamW(optimizer_model.parameters(), lr=1e-4)
    if side == "fsdp2x":
        report = fsdp2x.memory_report(model, optimizer)
        counted = {"plan": report.peak_bytes, "plan, resting": report.resting_bytes}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    say("built")
    ids = torch.randint(0, 512, (1, case.tokens), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(steps):
        loss = optimizer_model(input_ids=ids, labels=ids).loss
        if zero3 is not None:
            zero3.backward(loss)
            zero3.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    dist.barrier()
    say("trained", losses=losses, counted=counted)
    dist.destroy_process_group()


def say(stage: str, **values) -> None:
    print(json.dumps({"stage": stage, **values}), flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the benchmark that started this rank is gone")


# ---- the process that measures


def pss_bytes(pids: list[int]) -> int:
    """Proportional set size of all processes together."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            total += next(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024
    return total


class PeakWatch:
    """Reads the sum of ``pids`` in a thread until ``stop()``, which returns the largest."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._peak, self._failure = pids, 0, None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(_SAMPLE_EVERY_S):
                self._peak = max(self._peak, pss_bytes(self._pids))
        except (OSError, StopIteration) as error:
            self._failure = error

    def stop(self) -> int:
        self._stopping.set()
        self._thread.join()
        if self._failure is not None:
            raise RuntimeError(f"a rank ended while it was measured: {self._failure}")
        return self._peak


class Ranks:
    """Processes that run ``python *words --world W --port P --rank R`` and report their stages as JSON lines."""

    def __init__(self, words: list[str], world: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words, "--world", str(world), "--port", str(self._store.port)]
        self._processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(world)
        ]
        self.pids = [process.pid for process in self._processes]
        self._deadline = time.monotonic() + _TIMEOUT_S
        self._guard = threading.Timer(_TIMEOUT_S, self._kill)
        self._guard.start()

    def wait_for(self, stage: str) -> list[dict]:
        """Returns each rank's report at the end of this stage. The ranks then wait."""
        said = []
        for rank, process in enumerate(self._processes):
            line = _pipe(process.stdout).readline()
            while line and not line.startswith('{"stage"'):  # DeepSpeed prints what it compiles
                line = _pipe(process.stdout).readline()
            if not line:
                raise RuntimeError(f"rank {rank} ended before it had {stage}; its error is above")
            said.append(json.loads(line))
            if said[-1]["stage"] != stage:
                raise RuntimeError(f"rank {rank} says {said[-1]['stage']}, expected {stage}")
        return said

    def go_on(self) -> None:
        for process in self._processes:
            _pipe(process.stdin).write("\n")
            _pipe(process.stdin).flush()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        self._guard.cancel()
        for process in self._processes:
            _pipe(process.stdin).close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the ranks are started with pipes"
    return pipe


def measure(words: list[str], world: int, timed: bool = False) -> dict:
    """Bytes above the baseline of all ranks of one side, the losses of each, and sums of what they counted.

    ``timed``: the ranks then time steps, while this process reads nothing. The entry "timed" holds their reports.
    """
    ranks = Ranks(words, world)
    try:
        ranks.wait_for("imported")
        baseline = pss_bytes(ranks.pids)
        ranks.go_on()
        ranks.wait_for("built")
        built = pss_bytes(ranks.pids)
        watch = PeakWatch(ranks.pids)
        ranks.go_on()
        said = ranks.wait_for("trained")
        peak = watch.stop()
        resting = pss_bytes(ranks.pids)
        ranks.go_on()
        reports = {}
        if timed:
            reports = {"timed": ranks.wait_for("timed")}
            ranks.go_on()
    finally:
        ranks.close()
    result = {"built": built - baseline, "peak": max(peak, resting) - baseline, "resting": resting - baseline}
    result |= {name: sum(one["counted"][name] for one in said) for name in said[0]["counted"]}
    return {**result, "baseline": baseline, "losses": [one["losses"] for one in said], **reports}


def run_case(name: str, world: int, steps: int) -> dict:
    sides = [side for side in SIDES if side != "zero3" or has_deepspeed()]
    words = [__file__, "--cases", name, "--steps", str(steps), "--side"]
    result = {side: measure([*words, side], world) for side in sides}
    expected = result["stock"]["losses"]
    for side in sides:
        for mine, theirs in zip(result[side].pop("losses"), expected, strict=True):
            if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(mine, theirs, strict=True)):
                raise AssertionError(f"losses of {side} differ from stock's: {mine} and {theirs}")
    return {"case": name, "world": world, **result}


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: MiB above the baseline, all ranks together."""
    titles = {"ddp": "DDP", "zero3": "DeepSpeed ZeRO-3", "stock": "stock FSDP2", "fsdp2x": "fsdp2x"}
    sides = [side for side in titles if any(side in result for result in results)]
    rows = [["case", "ranks", "what", *(f"{titles[side]}, MiB" for side in sides), "fsdp2x to stock"]]
    for result in results:
        head = [result["case"], str(result["world"])]
        for what in ("built", "resting", "peak"):
            ratio = result["fsdp2x"][what] / result["stock"][what]
            rows.append([*head, what, *(f"{result[side][what] / 2**20:.0f}" for side in sides), f"{ratio:.2f}x"])
        counted = ("plan", "plan, resting")
        for what in [what for what in counted if what in result["fsdp2x"]]:
            rows.append([*head, what, *[""] * (len(sides) - 1), f"{result['fsdp2x'][what] / 2**20:.0f}", ""])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one small model, two steps")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "quick"], default=["comm", "compute"])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--side", choices=SIDES, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = {**CASES, "quick": QUICK}
    if args.side is not None:
        run_rank(args.side, cases[args.cases[0]], args.rank, args.world, args.port, args.steps)
        return 0
    if args.quick:
        args.cases, args.steps = ["quick"], 2
    results = [run_case(name, args.world, args.steps) for name in args.cases]
    print(harness.table(rows_of(results)), flush=True)
    harness.save(args.json, "memory", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
