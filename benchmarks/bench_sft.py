"""SFT of a real chat model of 135 million parameters: steps per second, and peak memory of all ranks.

    python benchmarks/bench_sft.py [--runs 5] [--worlds 1 2] [--steps 6] [--model FOLDER] [--gloo] [--quick]
        [--json FILE]

fsdp2x with its own AdamW against torch's FSDP2 and DDP with ``torch.optim.AdamW``. Each side of each run has fresh
processes, and sides take turns. A step is 16 rows of 40 tokens over all ranks, fp32, one thread a rank. Losses of all
sides must agree. Memory is measured during the first two steps, as in bench_memory.py: proportional set size above the
imports. The others are timed, because reading memory takes most of a core. FOLDER is what
``examples/smollm2/convert.py`` wrote. ``--gloo`` adds fsdp2x over gloo, which the other sides use. ``--quick`` takes a
random model with two layers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import harness
from bench_memory import measure, say
from peers import shard_stock

SIDES = {"fsdp2x": "fsdp2x", "fsdp2x_gloo": "fsdp2x over gloo", "stock": "FSDP2", "ddp": "DDP"}
TRANSPORTS = {"fsdp2x": "auto", "fsdp2x_gloo": "process_group"}
MODEL = Path(__file__).resolve().parents[1] / "build" / "smollm2" / "base"
NUM_ROWS, NUM_TOKENS, WARMUP = 16, 40, 2
LR = 1e-5


def build_model(folder: str) -> torch.nn.Module:
    """The model of the folder, or the small one for an empty name."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def run_rank(args: argparse.Namespace) -> None:
    """One rank of one side; reports its stages to `bench_memory.measure`."""
    import transformers.models.llama.modeling_llama  # noqa: F401  (part of the baseline)

    import fsdp2x

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", args.port, world_size=None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world, timeout=timedelta(seconds=120))
    dist.barrier()
    say("imported")
    model = build_model(args.model)
    vocabulary = model.config.vocab_size
    adamw = fsdp2x.optim.AdamW if args.side in TRANSPORTS else torch.optim.AdamW
    if args.side in TRANSPORTS:
        fsdp2x.fully_shard(model, transport=TRANSPORTS[args.side])
    elif args.side == "stock":
        shard_stock(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(model.parameters(), lr=LR)
    dist.barrier()
    say("built")
    chance = torch.Generator().manual_seed(0)
    losses, seconds = [], []
    for number in range(WARMUP + args.steps):
        if number == WARMUP:
            say("trained", losses=losses, counted={})
        ids = torch.randint(0, vocabulary, (NUM_ROWS, NUM_TOKENS), generator=chance)[args.rank :: args.world]
        dist.barrier()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        del loss
    say("timed", losses=losses, step_s=statistics.median(seconds[WARMUP:]))
    dist.destroy_process_group()


def run_world(world: int, runs: int, steps: int, model: str, sides: list[str]) -> dict:
    """Median, least and largest steps per second and peak MiB of each side."""
    found: dict[str, list[dict]] = {side: [] for side in sides}
    for number in range(runs):
        order = sides if number % 2 == 0 else sides[::-1]
        for side in order:
            words = [__file__, "--steps", str(steps), "--model", model, "--side", side]
            found[side].append(measure(words, world, timed=True))
        for side in sides:
            mine, theirs = ([rank["losses"] for rank in found[one][-1]["timed"]] for one in (side, "stock"))
            pairs = [(a, b) for one, other in zip(mine, theirs, strict=True) for a, b in zip(one, other, strict=True)]
            if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in pairs):
                raise AssertionError(f"losses of {side} differ from FSDP2's: {mine} and {theirs}")
    result: dict = {"world": world, "runs": runs}
    for side, measured in found.items():
        speeds = [1 / statistics.mean(rank["step_s"] for rank in one["timed"]) for one in measured]
        peaks = [one["peak"] / 2**20 for one in measured]
        result[side] = {"steps_per_s": _spread(speeds), "peak_mib": _spread(peaks), "speeds": speeds}
    return result


def _spread(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def _cell(spread: list[float], digits: int) -> str:
    median, low, high = spread
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratio_of(result: dict, what: str, peer: str, side: str) -> str:
    """Returns peer / side. Speeds are compared run by run, because the machine changes between runs."""
    if what != "steps_per_s" or "speeds" not in result[peer]:
        return f"{result[peer][what][0] / result[side][what][0]:.2f}"
    pairs = zip(result[peer]["speeds"], result[side]["speeds"], strict=True)
    return _cell(_spread([theirs / ours for theirs, ours in pairs]), 2)


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: medians of the runs, with their range where there are several."""
    sides = [side for side in SIDES if side in results[0]]
    pairs = [(peer, side) for side in sides if side in TRANSPORTS for peer in ("stock", "ddp")]
    titles = [f"{SIDES[peer]} / {SIDES[side]}" for peer, side in pairs]
    rows = [["ranks", "what", *(SIDES[side] for side in sides), *titles]]
    for result in results:
        for what, title, digits in (("steps_per_s", "steps/s", 3), ("peak_mib", "peak of all ranks, MiB", 0)):
            values = {side: result[side][what] for side in sides}
            cells = [_cell(spread, digits) for spread in values.values()]
            ratios = [ratio_of(result, what, peer, side) for peer, side in pairs]
            rows.append([str(result["world"]), title, *cells, *ratios])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small random model, one run of two steps")
    parser.add_argument("--runs", type=int, default=1, help="runs of each side; 5 for a number to publish")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a run")
    parser.add_argument("--model", default=str(MODEL), help="HuggingFace folder")
    parser.add_argument("--gloo", action="store_true", help="also run fsdp2x over gloo")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    for name in ("rank", "world", "port"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        run_rank(args)
        return 0
    if args.quick:
        args.model, args.runs, args.steps = "", 1, 2
    elif not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model: {args.model} has no config.json; run examples/smollm2/convert.py {args.model}")
    sides = [side for side in SIDES if args.gloo or side != "fsdp2x_gloo"]
    results = [run_world(world, args.runs, args.steps, args.model, sides) for world in args.worlds]
    print(harness.table(rows_of(results)), flush=True)
    harness.save(args.json, "sft", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
