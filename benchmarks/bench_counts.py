"""Collectives, launches and bytes of a step of published models, against stock FSDP2: counted from the plan, not run.

    python benchmarks/bench_counts.py [--quick] [--json FILE]

Counts are those of ``fsdp2x.simulate``, which ``tests/parity/test_step_counts.py`` holds to traces of real steps of
tiny models, of fsdp2x and of stock. Both ways in which NCCL's backends gather: many at once in a group (before torch
2.15), or in turn (since). bf16 compute, fp32 reductions. Launches are kernels of collectives, and copies and casts
around them; ``sent`` is what a rank sends around rings.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import harness
import paper_models

# Title -> the model, ranks and groups of replicas.
CASES = {
    "dense: Llama 8B": ({"name": "llama-8b"}, 64, 1),
    "dense, HSDP": ({"name": "llama-8b"}, 64, 8),
    "LoRA on Llama 8B": ({"name": "llama-8b", "lora": True}, 64, 1),
    "128 experts, fused: Qwen3 30B": ({"name": "qwen3-30b"}, 64, 1),
    "128 experts, a module each": ({"name": "qwen3-30b", "lists_experts": True}, 64, 1),
}
QUICK = ("dense: Llama 8B", "dense, HSDP")
BACKENDS = ("grouped", "in turn")


def run_case(title: str) -> dict:
    from fsdp2x.memory.plan import planned_facts
    from fsdp2x.simulate.machines import MACHINES
    from fsdp2x.simulate.step import simulate

    model_of, world, replicas = CASES[title]
    model = paper_models.build(**model_of)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sides = {}
    for gathers in BACKENDS:
        facts = planned_facts(model, world, replicas=replicas, mp_policy=policy, gathers=gathers)
        options = {"tokens": 1, "sequence_length": 1, "mfu": 0.4, "peers": ("fsdp2",)}
        ours, stock = simulate(model, facts, MACHINES["h100"], **options).steps
        sides[gathers] = ours
    return {
        "case": title,
        "world": world,
        "replicas": replicas,
        **{name: _counts(one) for name, one in {**sides, "stock": stock}.items()},
    }


def _counts(step) -> dict:
    names = ("collectives", "collective_launches", "copy_launches", "gather_bytes", "reduce_bytes", "all_reduce_bytes")
    return {name: getattr(step, name) for name in names}


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: a row for each backend, beside stock."""
    head = ["a step of", "ranks", "gathers of NCCL", "collectives, stock", "fsdp2x", "their launches, stock", "fsdp2x"]
    rows = [[*head, "copies and casts, stock", "fsdp2x", "GiB sent, stock", "fsdp2x"]]
    for result in results:
        ranks = str(result["world"]) + (f", {result['replicas']} replicas" if result["replicas"] > 1 else "")
        for backend in BACKENDS:
            pairs = []
            for name in ("collectives", "collective_launches", "copy_launches"):
                pairs += [str(result[side][name]) for side in ("stock", backend)]
            sent = [f"{_sent(result[side]) / 2**30:.2f}" for side in ("stock", backend)]
            rows.append([result["case"], ranks, backend, *pairs, *sent])
    return rows


def _sent(counts: dict) -> int:
    return sum(counts[name] for name in ("gather_bytes", "reduce_bytes", "all_reduce_bytes"))


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="the dense cases alone")
    args = parser.parse_args()
    results = [run_case(title) for title in (QUICK if args.quick else CASES)]
    print(harness.table(rows_of(results)), flush=True)
    harness.save(args.json, "counts", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
