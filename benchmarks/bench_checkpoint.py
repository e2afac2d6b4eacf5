"""Measures saves of model and AdamW: fsdp2x against FSDP2 with DCP, synchronous and in the background.

    python benchmarks/bench_checkpoint.py [--hidden 1024] [--layers 16] [--repeats 5] [--dir FOLDER] [--json FILE]

Starts its own 2 ranks. Both sides alternately save the same Qwen3 to new folders in one run, fsync included. "save" is
the time until the checkpoint is on disk. "stall" is the time until training can continue, after the first save, which
touches the staging memory. fsdp2x also writes checksums, a manifest, and `latest`, and deletes the previous checkpoint.
FSDP2's files are deleted between the measurements.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import harness
from bench_export import build_model


def with_moments(model, optimizer):
    """One step with zero gradients: the state is what counts here."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def ours(hidden: int, layers: int):
    import fsdp2x

    model = fsdp2x.fully_shard(build_model(hidden, layers))
    return with_moments(model, fsdp2x.optim.AdamW(model.parameters()))


def stock(hidden: int, layers: int):
    from torch.distributed.fsdp import fully_shard

    model = build_model(hidden, layers)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return with_moments(model, torch.optim.AdamW(model.parameters()))


def save_ours(model, optimizer, folder: Path, in_background: bool):
    import fsdp2x

    count = 0

    def step(timer: harness.PhaseTimer) -> None:
        nonlocal count
        count += 1
        name = folder / ("ours-async" if in_background else "ours")
        saved = fsdp2x.checkpoint.save(name, model, optimizer, step=count, keep=1, async_save=in_background)
        timer.mark("stall" if in_background else "save")
        if in_background:
            saved.wait()
            timer.mark("written after")

    return step


def save_stock(model, optimizer, folder: Path, in_background: bool):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    count = 0
    group = dist.new_group(backend="gloo")

    def step(timer: harness.PhaseTimer) -> None:
        nonlocal count
        count += 1
        name = folder / f"stock-{in_background}-{count}"
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        if in_background:
            future = dcp.async_save(state, checkpoint_id=name, process_group=group)
            timer.mark("stall")
            future.result()
            timer.mark("written after")
        else:
            dcp.save(state, checkpoint_id=name)
            timer.mark("save")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(name)

    return step


def rows_of(results: dict) -> list[list[str]]:
    """The table: medians, and how many times faster ours is; last, our stall as a part of our synchronous save."""
    rows = [["case", "phase", "stock ms", "fsdp2x ms", "ratio"]]
    for case, sides in results.items():
        for phase in sides["fsdp2x"]:
            theirs, mine = (sides[side][phase]["median_ms"] for side in ("stock", "fsdp2x"))
            rows.append([case, phase, f"{theirs:.0f}", f"{mine:.0f}", f"{theirs / mine:.2f}x"])
    phases = {phase: times["median_ms"] for sides in results.values() for phase, times in sides["fsdp2x"].items()}
    if {"stall", "save"} <= set(phases):
        rows.append(
            ["stall of a save at once", "ours / ours", "", "", f"{100 * phases['stall'] / phases['save']:.1f} %"]
        )
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write; default the folder for temporary files")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=2, timeout_s=3600)
    rank = harness.start_group()
    names = [tempfile.mkdtemp(prefix="fsdp2x-bench-", dir=args.dir) if rank == 0 else None]
    dist.broadcast_object_list(names, src=0)
    folder = Path(names[0])
    results = {}
    try:
        our_side, stock_side = ours(args.hidden, args.layers), stock(args.hidden, args.layers)
        size = sum(p.numel() * p.element_size() for p in our_side[0].parameters()) / 1e9
        for case, in_background in (("at once", False), ("in the background", True)):
            steps = {
                "stock": save_stock(*stock_side, folder, in_background),
                "fsdp2x": save_ours(*our_side, folder, in_background),
            }
            samples = harness.alternate(steps, warmup=1, count=args.repeats)
            results[f"{case}, {size:.2f} GB and moments"] = {
                side: {phase: times for phase, times in sample.summary().items() if phase != "step"}
                for side, sample in samples.items()
            }
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank == 0:
        print(harness.table(rows_of(results)), flush=True)
        harness.save(args.json, "checkpoint", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
