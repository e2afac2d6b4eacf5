"""fsdp2x.rollout.sample on a sharded model: inside of ``unsharded`` it draws what the plain model draws."""

import copy

import pytest
import torch

import fsdp2x
from fsdp2x import rl
from fsdp2x.rollout import Sampling, sample
from harness import distributed
from models import build
from reference import both_transports


@distributed(world_sizes=(2, 4))
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
@both_transports
def test_a_sharded_model_samples_inside_unsharded(ctx, name, transport):
    """Ranks have other numbers of prompts, the last of four none. Scores of the sharded model agree afterwards."""
    plain = build(name).eval()
    model = fsdp2x.fully_shard(copy.deepcopy(plain), transport=transport)
    prompts = [[3, 4, 5, 6], [7, 8], [9]][: 3 - ctx.rank]
    sampling = Sampling(6, 2, temperature=0.8, stop_ids=(4, 5), seed=ctx.rank)
    with fsdp2x.unsharded(model):
        found = sample(model, prompts, sampling)
    assert found == sample(plain, prompts, sampling)
    samples = [
        {"input_ids": [*prompts[c.prompt], *c.tokens], "labels": [-100] * len(prompts[c.prompt]) + c.tokens}
        for c in found
    ]
    fsdp2x.sequence.use_varlen_attention(model)
    for row in fsdp2x.sequence.micro_batches(samples, 64):
        scores = rl.score(model, row.inputs, row.next_labels, temperature=0.8).log_probs
        drawn = rl.RowTokens(row).align([c.log_probs for c in found])
        torch.testing.assert_close(scores.detach(), drawn, rtol=0, atol=1e-4)
