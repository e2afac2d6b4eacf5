"""A unit of a tied embedding, a norm, and the head is resharded before the embedding's backward, with equal results."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp2x.sharding.wrap import UnitPlan
from harness import distributed
from reference import both_transports, full, only_fsdp2x, parity, shard

VOCAB, WIDTH = 12, 6


class Tied(nn.Module):
    """``kind`` names what reads the tied weight, and when."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        limit = 1.0 if kind == "max_norm" else None
        self.embed = nn.Embedding(VOCAB, WIDTH, max_norm=limit)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        if kind == "frozen":
            self.head.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        early = self.head(x) if self.kind == "head early" else 0.0
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "checkpoint" else torch.relu(block(x))
        if self.kind == "embed thrice":
            x = x + self.embed(tokens.flip(0)) * self.embed(tokens)
        if self.kind == "detached":
            return self.head(self.norm(x.detach())) + x.mean()
        if self.kind == "tail in a checkpoint":
            return checkpoint(lambda y: self.head(self.norm(y)), x, use_reentrant=False)
        x = self.norm(x)
        if self.kind == "functional":
            return F.linear(x, self.head.weight)
        if self.kind == "head twice":
            return self.head(x) + self.head(torch.tanh(self.head(x)) @ torch.ones(VOCAB, WIDTH))
        return self.head(x) + early


KINDS = [
    "plain", "frozen", "max_norm", "checkpoint", "tail in a checkpoint", "head early", "head twice", "embed thrice",
    "detached", "functional",
]  # fmt: skip


def units_of(model: Tied) -> list[UnitPlan]:
    tail = (model.norm, model.embed, model.head)
    plans = [UnitPlan((block,), (f"blocks.{i}",), None, "") for i, block in enumerate(model.blocks)]
    return [*plans, UnitPlan(tail, ("norm", "embed", "head"), False, "")]


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("kind", KINDS)
@both_transports
def test_steps_are_those_of_one_process(ctx, kind, transport):
    def run(model):
        found = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            tokens = (torch.arange(8) * (step + 1) % VOCAB).view(2, 4)
            losses = [model(tokens).square().mean()]
            # Two forwards before one backward, and a backward of a retained graph. A weight that changes in forward, or
            # that no module of the unit uses, allows neither.
            if step == 1 and kind not in ("max_norm", "functional"):
                losses.append(model(tokens.flip(1)).square().mean())
                losses[0].backward(retain_graph=True)
            sum(losses).backward()
            found.append([full(losses), full([p.grad for p in model.parameters() if p.requires_grad])])
            optimizer.step()
            optimizer.zero_grad()
        return found

    model = Tied(kind)
    parity(ctx, model, run, units_of(model), transport=transport)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("is_tied", [False, True])
def test_no_backward_gathers_an_embedding(ctx, is_tied):
    """A step of a transformers model gathers each block twice, and the embedding and the tail once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import fsdp2x

    only_fsdp2x(ctx)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=3, tie_word_embeddings=is_tied)
    model = fsdp2x.fully_shard(LlamaForCausalLM(config))
    tokens = torch.arange(8).view(2, 4)
    counts = []
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        counts.append(fsdp2x.describe(model).stats["gathers"])
    made = counts[1] - counts[0]
    assert made == fsdp2x.memory_report(model).traffic.gathers == 2 * 3 + (1 if is_tied else 2)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("kind", ["plain", "max_norm", "detached"])
def test_the_embedding_has_no_gathered_weight_in_backward(ctx, kind):
    only_fsdp2x(ctx)
    model = Tied(kind)
    shard(ctx, model, units_of(model))
    seen = []
    unit = model.norm._get_fsdp_state()
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append(unit.made_unit.param_state))
    model(torch.arange(8).view(2, 4)).sum().backward()
    assert seen == ["SHARDED" if kind == "plain" else "UNSHARDED"]
