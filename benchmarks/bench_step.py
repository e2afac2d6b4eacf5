"""Measures one training step (forward, backward, AdamW, zero_grad) of fsdp2x against its peers, alternating in one run.

    python benchmarks/bench_step.py [--cases comm many ...] [--steps 15] [--runs 1] [--world 2] [--transport auto]
        [--json FILE]

Starts its own ranks. fp32, one thread a rank. All models have the same weights and inputs, and the sharded ones the
same units (fsdp2x's plan). Every loss must agree, or there is no row. fsdp2x is timed over ``--transport`` with its own
AdamW and with ``torch.optim.AdamW``, and over gloo with its own. The others run over gloo with ``torch.optim.AdamW``.
They are FSDP2, FSDP1, DeepSpeed ZeRO-3 (dense cases, if it is installed), and DDP. DDP does not shard, so it shows the
cost of sharding. ``gloo alone`` is the time of a step's collectives without a model. Added to fsdp2x's step over shared
memory, it is the floor of a step over gloo, given as a share of the measured step. Cases:

    comm      Qwen3, hidden 512, 12 layers, 16 tokens
    many      hidden 64, 48 layers, 8 tokens
    compute   hidden 512, 12 layers, 512 tokens
    moe       Qwen3-MoE, 8 experts of which 2 are used
    lora      rank 8 on the attention of comm, the rest frozen
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import harness
import peers
from step_cases import CASES, Case

LR = 1e-4
TITLES = {
    "fsdp2x": "fsdp2x",
    "fsdp2x_gloo": "fsdp2x over gloo",
    "fsdp2x_torch_adamw": "with torch's AdamW",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "zero3": "DeepSpeed ZeRO-3",
}


def qwen3_sizes(hidden: int, layers: int, intermediate: int, vocab: int) -> dict[str, object]:
    """Arguments of the configs of all benchmarks' models."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": hidden // 8,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


def build_model(case: Case) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = qwen3_sizes(case.hidden, case.layers, case.intermediate, vocab=512)
    torch.manual_seed(0)
    if case.kind == "moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": case.intermediate // 2}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    if case.kind == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    return model


def make_step(model, adamw: type[torch.optim.Optimizer] | None, tokens: int, losses: list[torch.Tensor]):
    """``adamw`` is None for ZeRO-3, which has an optimizer of its own."""
    optimizer = None if adamw is None else adamw(model.parameters(), lr=LR)
    ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(timer: harness.PhaseTimer) -> None:
        loss = model(input_ids=ids, labels=ids).loss
        timer.mark("forward")
        if optimizer is None:
            model.backward(loss)
        else:
            loss.backward()
        timer.mark("backward")
        if optimizer is None:
            model.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        timer.mark("optimizer")
        losses.append(loss.detach())

    return step


def same_losses(name: str, losses: torch.Tensor, stock: torch.Tensor) -> None:
    if not torch.allclose(losses, stock, rtol=1e-5, atol=0.0):
        raise AssertionError(f"{name} computes other losses: {losses.tolist()}, stock FSDP2 {stock.tolist()}")


def run_case(case: Case, steps: int, transport: str) -> dict:
    import fsdp2x

    ours = build_model(case)
    sides = {
        "fsdp2x": (copy.deepcopy(ours), fsdp2x.optim.AdamW),
        "fsdp2x_gloo": (copy.deepcopy(ours), fsdp2x.optim.AdamW),
        "fsdp2x_torch_adamw": (ours, torch.optim.AdamW),
        "stock": (peers.shard_stock(copy.deepcopy(ours)), torch.optim.AdamW),
        "ddp": (DistributedDataParallel(copy.deepcopy(ours)), torch.optim.AdamW),
        "fsdp1": (peers.shard_fsdp1(copy.deepcopy(ours)), torch.optim.AdamW),
    }
    if case.kind == "dense" and peers.has_deepspeed():
        sides["zero3"] = (peers.ZeRO3(copy.deepcopy(ours), lr=LR), None)
    for name in ("fsdp2x", "fsdp2x_torch_adamw"):
        fsdp2x.fully_shard(sides[name][0], transport=transport)
    fsdp2x.fully_shard(sides["fsdp2x_gloo"][0], transport="process_group")
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in sides}
    steps_of = {name: make_step(*side, case.tokens, losses[name]) for name, side in sides.items()}
    steps_of["gloo_alone"] = peers.GlooAlone(sides["fsdp2x_gloo"][0]).step
    samples = harness.alternate(steps_of, warmup=3, count=steps)
    for name in sides:
        same_losses(name, torch.stack(losses[name]), torch.stack(losses["stock"]))
    return {name: sample.summary() for name, sample in samples.items()}


def floor_of(result: dict) -> list[str]:
    """Milliseconds of the collectives alone, and the floor of a step over gloo as a share of fsdp2x's."""
    if "gloo_alone" not in result:  # of an older result
        return ["", ""]
    ours, over_gloo, alone = (result[side]["step"] for side in ("fsdp2x", "fsdp2x_gloo", "gloo_alone"))
    share = (ours["median_ms"] + alone["median_ms"]) / over_gloo["median_ms"]
    return [harness.spread(alone, 1), f"{share:.0%}"]


def rows_of(results: dict) -> list[list[str]]:
    """The table: medians of each phase, and how many times faster than stock FSDP2 they are."""
    measured = {side for result in results.values() for side in result}
    titles = {side: title for side, title in TITLES.items() if side in measured}
    rows = [["case", "phase", "stock FSDP2, ms"]]
    for title in titles.values():
        rows[0] += [f"{title}, ms", "ratio"]
    rows[0] += ["gloo alone, ms", "floor"]
    for name, result in results.items():
        for phase in ("step", "forward", "backward", "optimizer"):
            stock = result["stock"][phase]["median_ms"]
            row = [name, phase, harness.spread(result["stock"][phase], 1)]
            for side in titles:
                if side not in result:
                    row += ["", ""]
                    continue
                time_ms = result[side][phase]["median_ms"]
                row += [harness.spread(result[side][phase], 1), f"{stock / time_ms:.2f}x"]
            rows.append(row + (floor_of(result) if phase == "step" else ["", ""]))
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--world", type=int, default=2, help="number of ranks")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--runs", type=int, default=1, help="times that it is all done, in new processes; needs --json")
    args = parser.parse_args()
    if "RANK" not in os.environ and args.runs > 1:
        return harness.launch_runs(__file__, args.world, 1800, args.runs, args.json)
    if "RANK" not in os.environ:
        return harness.launch(__file__, args.world, timeout_s=1800)
    rank = harness.start_group()
    results = {name: run_case(CASES[name], args.steps, args.transport) for name in args.cases}
    if rank == 0:
        print(harness.table(rows_of(results)), flush=True)
        harness.save(args.json, "step", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
