"""A step of published models on 8 to 1,024 GPUs that are not there, by the schedules of fsdp2x and of others.

    python benchmarks/bench_scale.py [--quick] [--json FILE]

What ``fsdp2x plan --simulate`` foretells, in one table: a model of links, compute and host, whose assumptions it
prints; nothing here is measured. bf16 compute, fp32 reductions, samples of 8,192 or 2,048 tokens, one a rank; the
larger models compute activations again in backward. fsdp2x with both ways in which NCCL's backends gather: in turn
(torch 2.15), and grouped.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import harness
import paper_models

MODELS = ("llama-8b", "llama-70b", "qwen3-235b")
WORLDS = (8, 64, 256, 1024)
NODES = ("h100", "b200")
TOKENS = (8192, 2048)
MFU = 0.4
TITLES = {
    "fsdp2x": "fsdp2x",
    "grouped": "grouped",
    "fsdp2": "stock FSDP2",
    "megatron_fsdp": "Megatron-FSDP v2",
    "yafsdp": "YaFSDP",
}


def run_model(name: str, worlds: tuple[int, ...], nodes: tuple[str, ...]) -> list[dict]:
    from fsdp2x.memory.plan import planned_facts
    from fsdp2x.simulate.machines import MACHINES
    from fsdp2x.simulate.step import simulate

    model = paper_models.build(name)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for world in worlds:
        facts = {way: planned_facts(model, world, mp_policy=policy, gathers=way) for way in ("in turn", "grouped")}
        for node in nodes:
            for tokens in TOKENS:
                options = {"tokens": tokens, "sequence_length": tokens, "mfu": MFU, "recomputes": name != "llama-8b"}
                in_turn = simulate(model, facts["in turn"], MACHINES[node], **options).steps
                (grouped,) = simulate(model, facts["grouped"], MACHINES[node], peers=(), **options).steps
                steps = {**{step.name: step for step in in_turn}, "grouped": grouped}
                results.append(
                    {
                        "model": name,
                        "world": world,
                        "node": node,
                        "tokens": tokens,
                        "network_ms": 1e3 * steps["fsdp2x"].communication_s,
                        **{side: {"step_ms": 1e3 * one.step_s, "exposed_ms": 1e3 * one.exposed_s,
                                  "host_ms": 1e3 * one.host_s} for side, one in steps.items()},
                    }
                )  # fmt: skip
    return results


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: milliseconds of a step, and of what the network's share exposes."""
    steps = [f"step, {title}, ms" for title in TITLES.values()]
    rows = [
        ["model", "node", "ranks", "tokens", *steps, "network, ms", "exposed, fsdp2x", "stock", "host, fsdp2x", "stock"]
    ]
    for one in results:
        times = [f"{one[side]['step_ms']:.0f}" for side in TITLES]
        parts = [f"{one[side][part]:.0f}" for part in ("exposed_ms", "host_ms") for side in ("fsdp2x", "fsdp2")]
        head = [one["model"], one["node"], str(one["world"]), str(one["tokens"])]
        rows.append([*head, *times, f"{one['network_ms']:.0f}", *parts])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one model on H100s")
    args = parser.parse_args()
    results = []
    for name in MODELS[:1] if args.quick else MODELS:
        results += run_model(name, WORLDS, NODES[:1] if args.quick else NODES)
    print(harness.table(rows_of(results)), flush=True)
    harness.save(args.json, "scale", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
