"""Packed rows under fully_shard against one process that runs one sample at a time, with uneven and missing data."""

import copy

import pytest
import torch

import fsdp2x
import sequences
from fsdp2x.sequence import (
    micro_batches,
    pack_by_budget,
    token_mean_loss,
    use_varlen_attention,
)
from harness import distributed
from reference import both_transports, grads, only_fsdp2x, params, same

EXACT = {"rtol": 1e-5, "atol": 1e-5}
# Lengths of each rank's samples: from several rows to none at all.
UNEVEN = [[9, 5, 13, 8, 3, 11, 7], [4], []]
full = pytest.mark.full


def check_steps(ctx, name, lengths, transport="auto", pad_to_multiple_of=1):
    only_fsdp2x(ctx)
    reference = sequences.build(name)
    ours = fsdp2x.fully_shard(copy.deepcopy(reference), transport=transport)
    use_varlen_attention(ours)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9) for model in (reference, ours)]
    for number in range(2):
        everyone = [
            sequences.make_samples(reference, part, seed=100 * number + 10 * r) for r, part in enumerate(lengths)
        ]
        rows = list(micro_batches(everyone[ctx.rank], 20, pad_to_multiple_of=pad_to_multiple_of))
        sequences.check_step(ours, rows, reference, sum(everyone, []), f"of step {number}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(params(ours), params(reference), "parameters", **EXACT)
    return rows


@distributed(world_sizes=(3,), timeout=120)
@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=full) for n in ("gemma2", "gpt_oss", "qwen3_moe"))])
@both_transports
def test_ranks_with_less_data_run_empty_rows(ctx, name, transport):
    """Two ranks end with rows of padding, which take part in every gather and reduction."""
    rows = check_steps(ctx, name, UNEVEN, transport, pad_to_multiple_of=4)
    assert len(rows) == 3 and sum(not row.sample_ids for row in rows) == (0, 2, 3)[ctx.rank]


@distributed(world_sizes=(1, 2), timeout=120)
@pytest.mark.parametrize(
    "name", ["mistral", "qwen3_moe", *(pytest.param(n, marks=full) for n in ("gemma3", "mixtral"))]
)
def test_packed_is_one_sample_at_a_time(ctx, name):
    check_steps(ctx, name, UNEVEN[: ctx.world])


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_an_untouched_model_understands_packed_rows(ctx):
    """transformers' own masks read the same positions: no call of ours is needed, only slower and with a mask."""
    reference = sequences.build("qwen3")
    ours = fsdp2x.fully_shard(copy.deepcopy(reference))
    samples = sequences.make_samples(reference, [9, 5, 6], seed=1)
    rows = list(micro_batches(samples if ctx.rank == 0 else [], 20))
    sequences.check_step(ours, rows, reference, samples)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_gradient_checkpointing(ctx):
    """Two rows in one backward: each layer is recomputed with the layout of its own row."""
    results = []
    for checkpointed in (False, True):
        model = sequences.build("mistral").train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        fsdp2x.fully_shard(model)
        use_varlen_attention(model)
        samples = sequences.make_samples(model, [9, 5, 13, 8, 3], seed=ctx.rank)
        rows = list(micro_batches(samples, 20))
        assert len(rows) > 1
        sum(token_mean_loss(model(**row.inputs).logits, row.next_labels, 30.0) for row in rows).backward()
        results.append(grads(model))
    same(results[1], results[0], "gradients", **EXACT)


# ---- agreement of ranks


@distributed(world_sizes=(3,))
def test_ranks_agree_on_the_number_of_bins(ctx):
    lengths = [[5] * 7, [5], []][ctx.rank]
    bins = pack_by_budget(lengths, 10)
    assert len(bins) == 4 and sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert len(pack_by_budget(lengths, 10, num_bins=6 if ctx.rank == 2 else 0)) == 6


@distributed(world_sizes=(3,))
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"input_ids": [1] * 21}, "rank 1: pack_by_budget: sample 1 has 21 tokens, more than max_tokens=20"),
        ({"input_ids": [1, 2], "labels": [1]}, r"rank 1: pack_samples: sample 1 has labels \[1\] for 2 tokens"),
        ({"labels": [1]}, "rank 1: pack_samples: sample 1 needs input_ids"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "rank 1: pack_samples: sample 1 has padding in its"),
        ({"input_ids": "ab"}, "rank 1: pack_samples: sample 1 has input_ids 'ab', expected a tensor or numbers"),
        ([1, 2], "rank 1: pack_samples: sample 1 is a list, expected a mapping"),
    ],
    ids=["long", "labels", "no_ids", "mask", "text", "list"],
)
def test_one_ranks_bad_sample_is_an_error_on_every_rank(ctx, bad, said):
    samples = [{"input_ids": [1, 2], "attention_mask": [1, 1]}] + ([bad] if ctx.rank == 1 else [])
    with pytest.raises(ValueError, match=said):
        list(micro_batches(samples, 20))
    assert len(list(micro_batches(samples[:1], 20))) == 1
