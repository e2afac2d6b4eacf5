"""Measures packing against padding (tokens per second), and sequences over ranks against full ones (peak memory).

    python benchmarks/bench_sequence.py [--quick] [--cases packing ulysses] [--steps 5] [--json FILE]

Starts its own 2 ranks. All sides use fsdp2x.fully_shard and Qwen3, forward and backward, fp32, one thread a rank.
Losses of all sides must agree, or there is no row. Only the samples' own tokens count.

packing, samples of uneven lengths, the same on all sides:

    padded         batches of 8 in the given order, padded to their longest, SDPA with padding masks
    sorted         the same with samples of similar length together
    packed_masks   packed rows on the unchanged model, which builds block masks from positions
    packed         the same rows under use_varlen_attention

ulysses:

    none           one sequence per step on each rank
    ulysses        each of these sequences over both ranks, one after the other
    context        the same with context parallelism

``_checkpointing`` recomputes activations. The peak is the rise of a rank's private resident memory in a step, largest
of the ranks.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

import harness
from bench_step import qwen3_sizes

# glibc's M_MMAP_THRESHOLD: from this size on, freed memory leaves the resident set at once.
_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES = -3, 65536
_VOCAB = 512


@dataclass(frozen=True)
class Packing:
    hidden: int = 128
    layers: int = 4
    samples: int = 32  # of a rank and step
    batch: int = 8
    budget: int = 1024
    longest: int = 512


@dataclass(frozen=True)
class Ulysses:
    hidden: int = 128
    layers: int = 4
    tokens: int = 4096


CASES = {"packing": Packing(), "ulysses": Ulysses()}
QUICK = {"packing": replace(CASES["packing"], samples=8, batch=4, longest=128), "ulysses": Ulysses(tokens=512)}


def build_model(hidden: int, layers: int, tokens: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = qwen3_sizes(hidden, layers, 3 * hidden, _VOCAB)
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=tokens, attn_implementation="sdpa"))


# ---- packing


def draw_samples(case: Packing) -> list[dict[str, torch.Tensor]]:
    """Lengths as of instruction data: many short, few long (log-normal, median 60)."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    lengths = (torch.randn(case.samples, generator=generator) * 0.9 + 4.1).exp().clamp(8, case.longest).int().tolist()
    return [{"input_ids": torch.randint(0, _VOCAB, (length,), generator=generator)} for length in lengths]


def padded_batches(samples: list[dict[str, torch.Tensor]], size: int) -> list[dict[str, torch.Tensor]]:
    batches = []
    for start in range(0, len(samples), size):
        ids = [sample["input_ids"] for sample in samples[start : start + size]]
        pad = nn.utils.rnn.pad_sequence
        mask = pad([torch.ones_like(row) for row in ids], batch_first=True)
        targets = pad([nn.functional.pad(row[1:], (0, 1), value=-100) for row in ids], True, padding_value=-100)
        batches.append({"input_ids": pad(ids, batch_first=True), "attention_mask": mask, "targets": targets})
    return batches


def packed_rows(samples: list[dict[str, torch.Tensor]], case: Packing) -> list[dict[str, object]]:
    from fsdp2x.sequence import micro_batches

    rows = micro_batches(samples, case.budget)
    return [{**row.inputs, "targets": row.next_labels} for row in rows]


def train_step(model: nn.Module, batches: list[dict], losses: list[torch.Tensor]) -> Callable:
    """Forward and backward of all micro-batches; the loss is the mean over all label tokens of all ranks."""
    import fsdp2x
    from fsdp2x.sequence import count_label_tokens, mean_over_ranks, token_mean_loss

    def step(timer: harness.PhaseTimer) -> None:
        num_tokens = count_label_tokens(batch["targets"] for batch in batches)
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            inputs = {name: value for name, value in batch.items() if name != "targets"}
            with fsdp2x.accumulate(model, last=index == len(batches) - 1):
                loss = token_mean_loss(model(**inputs).logits, batch["targets"], num_tokens)
                loss.backward()
            total += loss.detach()
        timer.mark("forward and backward")
        model.zero_grad()
        losses.append(mean_over_ranks(total))

    return step


def run_packing(case: Packing, steps: int) -> dict:
    import fsdp2x
    from fsdp2x.sequence import use_varlen_attention

    samples = draw_samples(case)
    by_length = sorted(samples, key=lambda sample: len(sample["input_ids"]))
    data = {
        "padded": padded_batches(samples, case.batch),
        "sorted": padded_batches(by_length, case.batch),
        "packed_masks": packed_rows(samples, case),
        "packed": packed_rows(samples, case),
    }
    plain = build_model(case.hidden, case.layers, case.budget)
    losses: dict[str, list[torch.Tensor]] = {side: [] for side in data}
    sides = {}
    for side, batches in data.items():
        model = fsdp2x.fully_shard(copy.deepcopy(plain))
        if side == "packed":
            use_varlen_attention(model)
        sides[side] = train_step(model, batches, losses[side])
    samples_of = harness.alternate(sides, warmup=1, count=steps)
    for side in data:
        torch.testing.assert_close(torch.stack(losses[side]), torch.stack(losses["padded"]), rtol=1e-5, atol=0.0)
    tokens = torch.tensor([sum(len(sample["input_ids"]) for sample in samples), 0])
    result = {}
    for side, batches in data.items():
        computed = torch.tensor([int(tokens[0]), sum(batch["input_ids"].numel() for batch in batches)])
        dist.all_reduce(computed)
        result[side] = {**samples_of[side].summary(), "tokens": int(computed[0]), "positions": int(computed[1])}
    return result


# ---- Ulysses


def peak_rise_bytes(run: Callable[[], object]) -> int:
    """How far ``run`` lifts this process's private resident memory; largest of the ranks."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak restarts at the present
    run()
    after = _status()
    # Pages of shared memory are never given back while the model lives.
    rise = (after["VmHWM"] - before["VmRSS"]) - (after["RssShmem"] - before["RssShmem"])
    largest = torch.tensor(rise)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _status() -> dict[str, int]:
    with open("/proc/self/status", encoding="ascii") as file:
        lines = (line.split() for line in file)
        return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[0].startswith(("Vm", "Rss"))}


def run_ulysses(case: Ulysses, steps: int) -> dict:
    import fsdp2x
    from fsdp2x.sequence import apply_context_parallel, apply_ulysses, init_sequence_mesh, use_varlen_attention

    mesh = init_sequence_mesh(dist.get_world_size(), "cpu")
    plain = build_model(case.hidden, case.layers, case.tokens)
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(0, _VOCAB, (dist.get_world_size(), 1, case.tokens), generator=generator)
    mine = sequences[dist.get_rank()]
    whole = [{"input_ids": mine, "targets": nn.functional.pad(mine[:, 1:], (0, 1), value=-100)}]
    sides, losses = {}, {}
    for name in ("none", "ulysses", "context", "ulysses_checkpointing", "context_checkpointing"):
        model, batches = copy.deepcopy(plain), whole
        if name.endswith("checkpointing"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        fsdp2x.fully_shard(model, mesh=mesh.shard)
        if name == "none":
            use_varlen_attention(model)
        else:
            apply = apply_ulysses if name.startswith("ulysses") else apply_context_parallel
            context = apply(model, mesh.sequence)
            shards = [context.shard_inputs({"input_ids": ids, "labels": ids}) for ids in sequences]
            batches = [{**shard.inputs, "targets": shard.next_labels} for shard in shards]
        losses[name] = []
        sides[name] = train_step(model, batches, losses[name])
    samples = harness.alternate(sides, warmup=1, count=steps)
    # After the timing: with this allocator every large tensor is a fresh mapping.
    if ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES) != 1:
        raise OSError("mallopt(M_MMAP_THRESHOLD) failed: freed memory would stay in the peak")
    result = {}
    for side, step in sides.items():
        step(harness.PhaseTimer(harness.Samples(), counted=False))
        peak = peak_rise_bytes(lambda step=step: step(harness.PhaseTimer(harness.Samples(), counted=False)))
        result[side] = {**samples[side].summary(), "tokens": sequences.numel(), "peak_bytes": peak}
    for side in sides:
        torch.testing.assert_close(torch.stack(losses[side]), torch.stack(losses["none"]), rtol=1e-5, atol=0.0)
    return result


RUN = {"packing": run_packing, "ulysses": run_ulysses}


def rows_of(results: dict) -> list[list[str]]:
    """The table: tokens of samples a second, positions computed for them, memory, each against the first side."""
    titles = {
        "padded": "padded, batches as they come",
        "sorted": "padded, sorted by length",
        "packed_masks": "packed, transformers' block masks",
        "packed": "packed, use_varlen_attention",
        "none": "whole sequences",
        "ulysses": "Ulysses over the ranks",
        "context": "context parallelism over the ranks",
        "ulysses_checkpointing": "Ulysses, checkpointing",
        "context_checkpointing": "context parallelism, checkpointing",
    }
    rows = [["case", "side", "step, ms", "tokens/s", "ratio", "positions per token", "peak of a step, MiB", "ratio"]]
    for name, result in results.items():
        first = next(iter(result.values()))
        for side, values in result.items():
            speed, base = (1e3 * one["tokens"] / one["step"]["median_ms"] for one in (values, first))
            row = [name, titles[side], f"{values['step']['median_ms']:.0f}", f"{speed:.0f}", f"{speed / base:.2f}x"]
            row.append(f"{values['positions'] / values['tokens']:.2f}" if "positions" in values else "1.00")
            if "peak_bytes" in values:
                row += [f"{values['peak_bytes'] / 2**20:.0f}", f"{values['peak_bytes'] / first['peak_bytes']:.2f}x"]
            else:
                row += ["", ""]
            rows.append(row)
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples and short sequences")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return harness.launch(__file__, world=2, timeout_s=1800)
    rank = harness.start_group()
    cases = QUICK if args.quick else CASES
    # In the order of CASES: measuring memory changes the allocator for what comes after.
    results = {name: RUN[name](case, args.steps) for name, case in cases.items() if name in args.cases}
    if rank == 0:
        print(harness.table(rows_of(results)), flush=True)
        harness.save(args.json, "sequence", results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
