#!/usr/bin/env python3
"""Writes the page about planted faults: what `fsdp2x compare` finds, its false alarms, and what recording costs.

torchrun --nproc_per_node=2 benchmarks/compare_faults.py docs/engine/compare.md
"""

import argparse
import resource
import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdp2x
from fsdp2x.compare.judge import judge
from fsdp2x.compare.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from planted_faults import FAULTS, Case, clean_cases, is_right_place, record, references

ENGINES = ("fsdp2", "ddp", "fsdp2x")
HEADER = """\
# Faults that compare finds

`benchmarks/compare_faults.py` writes this page. It plants faults of `tests/support/planted_faults.py` in a small
training program on two CPU ranks, for a script that uses FSDP2, DDP, or fsdp2x. The reference is the unsharded run.

Faults that depend on the number of ranks are in `tests/dist/compare/test_ranks.py`. `--b-nproc 1` names all 13 of them.
"""


def fault_lists(say: Callable[[str], None]) -> tuple[list[str], dict[str, int]]:
    """Returns the names of the faults by their first difference, what was not named, and counts."""
    not_named: list[str] = []
    counts = dict.fromkeys(("planted", "found", "at the right place"), 0)
    for engine in ENGINES:
        case = Case(engine=engine)
        reference, noisy = references(case)
        for name, fault in FAULTS.items():
            if engine not in fault.engines:
                continue
            found = judge(record(case, name), reference, noisy)
            is_right = bool(found) and is_right_place(fault, found[0].key)
            for what, is_so in zip(counts, (True, bool(found), is_right), strict=True):
                counts[what] += is_so
            if not is_right:
                not_named.append(f"- {engine}, `{name}`: {'found elsewhere' if found else 'missed'}")
            say(f"{engine} {name}: {'named' if is_right else 'not named'}")
    names: dict[str, list[str]] = {}
    for name, fault in FAULTS.items():
        names.setdefault(" or ".join(fault.phases), []).append(f"`{name}`")
    lists = [f"- **{phase}:** {', '.join(of_phase)}" for phase, of_phase in names.items()]
    return [textwrap.fill(one, 120, subsequent_indent="  ") for one in lists] + not_named, counts


def clean_runs(say: Callable[[str], None], seconds: float) -> tuple[int, int]:
    """Returns the number of clean runs, and of alarms."""
    num_runs = num_alarms = 0
    end = time.monotonic() + seconds
    for case in clean_cases():
        is_late = torch.tensor(int(time.monotonic() > end))
        dist.broadcast(is_late, 0)
        if is_late:
            break
        reference, noisy = references(case)
        for engine in ENGINES:
            if case.half and engine == "ddp":
                continue
            alarms = judge(record(replace(case, engine=engine)), reference, noisy)
            num_runs, num_alarms = num_runs + 1, num_alarms + bool(alarms)
            if alarms:
                say(f"alarm: {case} {engine} {alarms[0]}")
    return num_runs, num_alarms


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


def cost(num_steps: int = 10) -> tuple[float, float, float]:
    """Returns seconds of plain and of recorded steps, and by how many MiB recording raises the peak."""

    def train() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(256) for _ in range(6)))
        for block in model:
            fsdp2x.fully_shard(block)
        fsdp2x.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ends = []
        for _ in range(num_steps):
            model(torch.randn(4, 128, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
        return [end - start for start, end in zip(ends, ends[1:], strict=False)]

    plain = statistics.median(train())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Recorder() as recorder:
        recorded = statistics.median(train())
    recorder.finish()
    return plain, recorded, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--clean-seconds", type=float, default=1800, help="Time limit for runs without a fault.")
    args = parser.parse_args()
    dist.init_process_group("gloo")

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    plain, recorded, memory = cost()
    say(f"plain {plain:.3f} s, recorded {recorded:.3f} s, {memory:.0f} MiB")
    lists, counts = fault_lists(say)
    num_runs, num_alarms = clean_runs(say, args.clean_seconds)
    lines = [
        HEADER,
        f"- {len(FAULTS)} faults make {counts['planted']} runs. Of these, {counts['found']} are found, and "
        f"{counts['at the right place']} are named at the right place.",
        f"- {num_runs} runs without a fault raise {num_alarms} alarms: float32 and bf16, with and without dropout, "
        "recomputation, compilation, experts, and accumulation.",
        f"- A recorded step takes {recorded / plain:.1f} times as long as a plain one (6 blocks of 256, 512 tokens, "
        f"median of 9 steps), and {memory:.0f} MiB more memory.",
        "",
        "The faults by their first difference. An engine that does not name this tensor has a line below.",
        "",
        *lists,
    ]
    if dist.get_rank() == 0:
        args.page.write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
