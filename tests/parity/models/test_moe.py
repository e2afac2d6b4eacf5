"""Mixtures of experts whatever the routing: disjoint experts, no tokens, one token; units of experts; grouped GEMM."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp2x
import moe_models
from fsdp2x import moe
from harness import dist_run, distributed
from moe_models import ListMoe, fused, rows, steered
from reference import both_transports, train_alike

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
KINDS = pytest.mark.parametrize(
    "implementation, own_units",
    [
        ("eager", True),
        ("grouped_mm", False),
        pytest.param("eager", False, marks=pytest.mark.full),
        pytest.param("grouped_mm", True, marks=pytest.mark.full),
    ],
)


def three_steps(ctx, reference, ours, loss_of):
    train_alike(ctx, reference, ours, loss_of, evens=True, **TOLERANCE)


def list_loss(steer):
    """A loss of a ListMoe whose tokens of rank r all choose expert steer(rank)."""

    def loss_of(model, rank, step):
        chosen = steer(rank, step)
        for layer in model.layers:
            layer.mlp.bias = 0.0 if chosen is None else 50.0 * nn.functional.one_hot(torch.tensor(chosen), 4).float()
        return model(rows(rank, step, 0 if chosen is None else 1 if step == 1 else 5)).square().sum() / 7

    return loss_of


@distributed(world_sizes=(3,), only_fsdp2x=True)
@both_transports
def test_disjoint_experts_on_the_ranks(ctx, transport):
    """A list of experts: rank r's tokens all go to expert r, then r + 1 with one token, then rank 0 has none."""
    reference = ListMoe()
    ours = copy.deepcopy(reference)
    fsdp2x.fully_shard(ours, auto_wrap=["ListLayer"], transport=transport)
    steer = list_loss(lambda rank, step: None if (rank, step) == (0, 2) else (rank + step) % 4)
    three_steps(ctx, reference, ours, steer)


def experts_as_units(ctx):
    from datetime import timedelta

    model = ListMoe()
    for layer in model.layers:
        for expert in layer.mlp.experts:
            fsdp2x.fully_shard(expert, transport="shm", timeout=timedelta(seconds=20))
    fsdp2x.fully_shard(model, transport="shm", timeout=timedelta(seconds=20))
    try:
        list_loss(lambda rank, step: rank)(model, ctx.rank, 0).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_shared_memory_says_which_experts_are_units():
    messages = [outcome.value for outcome in dist_run(experts_as_units, 2)]
    assert all("experts.0" in message and "experts.1" in message for message in messages), messages


@distributed(world_sizes=(2,), only_fsdp2x=True)
@KINDS
@both_transports
def test_fused_experts(ctx, transport, implementation, own_units):
    """Rank r uses two experts, another pair each step; in step 1 on a micro-batch of one token."""
    reference = fused()
    assert moe.use_grouped_gemm(reference, implementation == "grouped_mm") == implementation
    ours = copy.deepcopy(reference)
    if own_units:
        assert moe.shard_experts(ours, transport=transport) == 2
        assert all(isinstance(layer.mlp.experts, fsdp2x.FSDPModule) for layer in ours.model.layers)
    fsdp2x.fully_shard(ours, auto_wrap=True, transport=transport)
    assert moe.apply_expert_patch(ours) == 2
    pairs = ((0, 1), (2, 3), (1, 2))

    def loss_of(model, rank, step):
        with steered(model, pairs[(rank + step) % 3]):
            return moe_models.loss_of(model, rank, step, length=1 if step == 1 else 9)

    three_steps(ctx, reference, ours, loss_of)


class Blocks(nn.Module):
    """MoE blocks of transformers without the attention, which cannot run on no tokens."""

    def __init__(self, implementation):
        super().__init__()
        model = fused()
        moe.use_grouped_gemm(model, implementation == "grouped_mm")
        self.blocks = nn.ModuleList(layer.mlp for layer in model.model.layers)
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.is_checkpointed = implementation == "eager"

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x))
        return self.head(x)


@distributed(world_sizes=(3,), only_fsdp2x=True)
@KINDS
@both_transports
def test_a_rank_without_tokens(ctx, transport, implementation, own_units):
    torch.manual_seed(0)
    reference = Blocks(implementation)
    ours = copy.deepcopy(reference)
    if own_units:
        moe.shard_experts(ours, transport=transport)
    else:
        # The block is a unit whose output would not depend on any of its weights.
        moe.apply_expert_patch(ours)
    fsdp2x.fully_shard(ours, auto_wrap=False if own_units else ["Qwen3MoeSparseMoeBlock"], transport=transport)

    def loss_of(model, rank, step):
        num_tokens = 0 if rank == step else 6
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(1, num_tokens, 16, generator=generator)).square().sum() / 7

    three_steps(ctx, moe_ready(reference), ours, loss_of)


def moe_ready(model):
    """The plain model, which on its own could not run the grouped product on no tokens."""
    moe.apply_expert_patch(model)
    return model
