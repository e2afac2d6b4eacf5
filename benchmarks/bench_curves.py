"""Compares losses of training runs by the format of AdamW's moments and by the wire format between ranks.

    python benchmarks/bench_curves.py [--steps 120] [--seeds 6] [--only SIDE ...] [--quick] [--json FILE]

Each side is `fsdp2x train examples/demo.yaml` on 2 ranks, with a quarter of the demo's batch and its own settings. The
data are the bytes of this Python's standard library. A seed determines weights, batches, and validation text, which are
the same for all sides. The curves are those of the first seed. One run says little about a side, because any other
rounding ends about one percent above or below. So a side's result is the mean of its distances to float32 with the same
seed. This benchmark measures no time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import harness

CONFIG = Path(__file__).parents[1] / "examples/demo.yaml"
WORLD, BATCH_SIZE, EVAL_BLOCKS = 2, 2, 64


def wire(weights: str, gradients: str | None = None) -> tuple[str, ...]:
    """Overrides for wire formats, which a process group has and shared memory has no use for."""
    formats = ["parallel.transport=process_group", f"parallel.wire_weights={weights}"]
    return (*formats, f"parallel.wire_gradients={gradients}") if gradients else tuple(formats)


# Side -> which question it belongs to ("": to both), and its overrides.
SIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    "float32": ("", ()),
    "bfloat16": ("moments", ("optimizer.moments_dtype=bfloat16",)),
    "int8": ("moments", ("optimizer.moments_dtype=int8",)),
    "int8, stochastic": ("moments", ("optimizer.moments_dtype=int8", "optimizer.stochastic_rounding=true")),
    "weights int8, gradients bfloat16": ("wire", wire("int8", "bfloat16")),
    "weights int8, gradients int8": ("wire", wire("int8", "int8")),
    "weights fp8, gradients bfloat16": ("wire", wire("fp8", "bfloat16")),
}
# A model and texts so small that only the way is shown.
QUICK = (
    *("model.config.num_hidden_layers=1", "model.config.hidden_size=64", "model.config.intermediate_size=64"),
    *("data.block_size=32", "data.max_bytes=200_000"),
)


def train(overrides: tuple[str, ...], steps: int, timeout_s: float = 900) -> dict:
    """Mean training loss of each tenth of the steps, and the held-out loss of eight evaluations: [step, loss]."""
    from fsdp2x.train.metrics import read_metrics

    span = max(steps // 40, 1)
    with tempfile.TemporaryDirectory(prefix="fsdp2x-bench-") as folder:
        settings = [
            f'data.files=["{sysconfig.get_paths()["stdlib"]}"]',
            f'logging.output="{folder}"',
            f"train.steps={steps}",
            f"train.eval_every={max(steps // 8, 1)}",
            "checkpoint.save_every=0",
            "checkpoint.save_last=false",
            f"train.batch_size={BATCH_SIZE}",
            f"train.eval_blocks={EVAL_BLOCKS}",
            *overrides,
        ]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD}"]
        command = [*torchrun, f"--log-dir={folder}/torchrun", "-m", "fsdp2x.train", str(CONFIG), *settings]
        env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        subprocess.run([sys.executable, *command], env=env, timeout=timeout_s, check=True, stdout=subprocess.DEVNULL)
        lines = read_metrics(Path(folder) / "metrics.jsonl")
    losses = [line["loss"] for line in lines if line["event"] == "train"]
    spans = [(end, sum(losses[end - span : end]) / span) for end in range(span, len(losses) + 1, span)]
    return {
        "train": [[end, round(loss, 4)] for end, loss in spans],
        "held_out": [[line["step"], round(line["loss"], 4)] for line in lines if line["event"] == "eval"],
    }


def distances(results: dict, side: str) -> list[float]:
    """How far a side's held-out loss ends from float32's, in per cent, for each seed."""
    pairs = zip(results[side]["ends"], results["float32"]["ends"], strict=True)
    return [100 * (loss / plain - 1) for loss, plain in pairs]


def rows_of(results: dict) -> list[list[str]]:
    """The table: held-out losses of the first seed on the way; how far the ends of all seeds are from float32's."""
    base = results["float32"]["held_out"]
    shown = base[1::2] if len(base) > 3 else base
    head = f"end against float32, {len(results['float32']['ends'])} seeds"
    rows = [["of", "side", *(f"step {step}" for step, _ in shown), head]]
    for side, found in results.items():
        losses = dict(map(tuple, found["held_out"]))
        off = distances(results, side)
        against = f"{statistics.mean(off):+.2f} % ({min(off):+.2f} to {max(off):+.2f})" if side != "float32" else ""
        rows.append([found["of"], side, *(f"{losses[step]:.4f}" for step, _ in shown), against])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=None, help="default 120, quick 8")
    parser.add_argument("--seeds", type=int, default=None, help="how many; default 6, quick 1")
    parser.add_argument("--only", nargs="+", choices=list(SIDES), default=list(SIDES), metavar="SIDE")
    parser.add_argument("--quick", action="store_true", help="a model and texts that are too small to be compared")
    args = parser.parse_args()
    steps, num_seeds = args.steps or (8 if args.quick else 120), args.seeds or (1 if args.quick else 6)
    results: dict = {}
    for side in dict.fromkeys(["float32", *args.only]):
        question, overrides = SIDES[side]
        words = (*(QUICK if args.quick else ()), *overrides)
        runs = [train((*words, f"train.seed={seed}"), steps) for seed in range(num_seeds)]
        results[side] = {"of": question, **runs[0], "ends": [run["held_out"][-1][1] for run in runs]}
        print(f"{side}: {results[side]['ends']}", flush=True)
        harness.save(args.json, "curves", results)
    print(harness.table(rows_of(results)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
