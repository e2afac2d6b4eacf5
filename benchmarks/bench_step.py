"""One training step (forward, backward, AdamW, zero_grad) of fsdp2x against torch's FSDP2, alternating in one run.

    python benchmarks/bench_step.py [--cases comm many compute] [--steps 15] [--transport auto] [--json FILE]

Starts its own 2 ranks. Both models have the same units (fsdp2x's plan), weights, inputs and ``torch.optim.AdamW``, and
every loss of both must agree, or there is no row.
Cases: ``comm`` (Qwen3, hidden 512, 12 layers, 16 tokens), ``many`` (hidden 64, 48 layers, 8 tokens), ``compute``
(hidden 512, 12 layers, 512 tokens). fp32, one thread a rank.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard

import harness


@dataclass(frozen=True)
class Case:
    hidden: int
    layers: int
    tokens: int
    intermediate: int


CASES = {
    "comm": Case(hidden=512, layers=12, tokens=16, intermediate=1536),
    "many": Case(hidden=64, layers=48, tokens=8, intermediate=176),
    "compute": Case(hidden=512, layers=12, tokens=512, intermediate=1536),
}


def build_model(case: Case) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=case.hidden // 8,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def shard_stock(model: nn.Module) -> nn.Module:
    """Torch's FSDP2 with the units fsdp2x plans."""
    from fsdp2x.wrap import plan_units

    for plan in plan_units(model, None):
        part = plan.modules[0] if len(plan.modules) == 1 else list(plan.modules)
        stock_fully_shard(part, reshard_after_forward=plan.reshard_after_forward)
    return stock_fully_shard(model)


def make_step(model: nn.Module, tokens: int, losses: list[torch.Tensor]):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(timer: harness.PhaseTimer) -> None:
        loss = model(input_ids=ids, labels=ids).loss
        timer.mark("forward")
        loss.backward()
        timer.mark("backward")
        optimizer.step()
        optimizer.zero_grad()
        timer.mark("optimizer")
        losses.append(loss.detach())

    return step


def run_case(case: Case, steps: int, transport: str) -> dict:
    import fsdp2x

    ours = build_model(case)
    stock = shard_stock(copy.deepcopy(ours))
    fsdp2x.fully_shard(ours, transport=transport)
    losses: dict[str, list[torch.Tensor]] = {"fsdp2x": [], "stock": []}
    sides = {"fsdp2x": ours, "stock": stock}
    samples = harness.alternate(
        {name: make_step(model, case.tokens, losses[name]) for name, model in sides.items()}, warmup=3, count=steps
    )
    torch.testing.assert_close(torch.stack(losses["fsdp2x"]), torch.stack(losses["stock"]), rtol=1e-5, atol=0.0)
    return {name: sample.summary() for name, sample in samples.items()}


def rows_of(results: dict) -> list[list[str]]:
    """The table: medians of each phase."""
    rows = [["case", "phase", "stock FSDP2, ms", "fsdp2x, ms", "ratio"]]
    for name, result in results.items():
        for phase in ("step", "forward", "backward", "optimizer"):
            stock, ours = result["stock"][phase]["median_ms"], result["fsdp2x"][phase]["median_ms"]
            rows.append([name, phase, f"{stock:.1f}", f"{ours:.1f}", f"{stock / ours:.2f}x"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=2, timeout_s=1800)
    rank = harness.start_group()
    results = {name: run_case(CASES[name], args.steps, args.transport) for name in args.cases}
    if rank == 0:
        print(harness.table(rows_of(results)), flush=True)
        if args.json is not None:
            harness.save(args.json, "step", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
