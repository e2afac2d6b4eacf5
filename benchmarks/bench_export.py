"""Measures full tensors of a sharded model: ``export.stream`` against one ``full_tensor()`` per parameter.

    python benchmarks/bench_export.py [--hidden 512] [--layers 16] [--repeats 5] [--bucket-mib 16] [--json FILE]

Starts its own 2 ranks. Both sides alternately read the same sharded Qwen3 in one run. Reports milliseconds for the
full model.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import harness
from bench_step import qwen3_sizes


def build_model(hidden: int, layers: int) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**qwen3_sizes(hidden, layers, 3 * hidden, vocab=4096)))


def stock(model):
    def step(timer: harness.PhaseTimer) -> None:
        for param in model.parameters():
            param.full_tensor()

    return step


def streamed(model, transport: str, bucket_bytes: int):
    from fsdp2x.export import stream

    def step(timer: harness.PhaseTimer) -> None:
        for _ in stream(model, bucket_bytes=bucket_bytes, transport=transport):
            pass

    return step


def rows_of(results: dict) -> list[list[str]]:
    """The table: medians for the whole model, and how many times faster than ``full_tensor()`` each way is."""
    rows = [["way", "parameters", "GB", "ms", "GB/s", "ratio"]]
    sides = {name: result for name, result in results.items() if isinstance(result, dict)}
    base = sides["full_tensor"]["step"]["median_ms"]
    for name, result in sides.items():
        took = result["step"]["median_ms"]
        size = [str(results["parameters"]), f"{results['bytes'] / 1e9:.2f}"]
        rows.append([name, *size, f"{took:.1f}", f"{results['bytes'] / took / 1e6:.2f}", f"{base / took:.2f}x"])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--transports", nargs="+", choices=("shm", "process_group"), default=["shm", "process_group"])
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=2, timeout_s=1800)
    rank = harness.start_group()
    import fsdp2x

    model = fsdp2x.fully_shard(build_model(args.hidden, args.layers))
    numbers = {
        "parameters": sum(1 for _ in model.parameters()),
        "bytes": sum(p.numel() * 4 for p in model.parameters()),
    }
    steps = {
        "full_tensor": stock(model),
        **{name: streamed(model, name, args.bucket_mib << 20) for name in args.transports},
    }
    samples = harness.alternate(steps, warmup=1, count=args.repeats)
    results = {name: sample.summary() for name, sample in samples.items()}
    if rank == 0:
        print(f"{numbers['parameters']} parameters, {numbers['bytes'] / 1e9:.2f} GB", flush=True)
        print(harness.table(rows_of({**numbers, **results})), flush=True)
        harness.save(args.json, "export", {**numbers, **results})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
