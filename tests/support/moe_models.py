"""Tiny mixtures of experts for tests: fused ones of transformers, and a list whose experts run when they are hit."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

import models

WIDTH = 8


def fused(name="qwen3_moe", **overrides):
    """4 experts of width 12 and hidden size 16, 2 of them for each token."""
    return models.build(name, use_cache=False, **overrides)


def loss_of(model, rank: int, step: int, length: int = 9) -> torch.Tensor:
    """Returns a loss of `fused`'s logits. It needs no next token, so it also works with one token."""
    batch = models.batch("qwen3_moe", 10 * step + rank, size=1, length=length)
    return model(input_ids=batch["input_ids"]).logits.square().mean()


@contextlib.contextmanager
def steered(model, experts: tuple[int, int]) -> Iterator[None]:
    """The routers of `fused` send all tokens to two experts only."""

    def choose(module, args, out):
        logits, scores, _ = out
        chosen = torch.tensor(experts).expand(scores.shape[0], -1)
        return logits, logits.softmax(-1).gather(1, chosen), chosen

    hooks = [layer.mlp.gate.register_forward_hook(choose) for layer in model.model.layers]
    yield
    for hook in hooks:
        hook.remove()


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 5, bias=False), nn.Linear(WIDTH, 5, bias=False)
        self.down_proj = nn.Linear(5, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states):
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class ListBlock(nn.Module):
    """As transformers 4 wrote it: only experts that tokens chose are called, in ascending order."""

    def __init__(self, num_experts=4, top_k=1):
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))
        self.top_k = top_k
        self.bias = 0.0  # added to the router's scores, to steer tokens

    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, WIDTH)
        logits = self.gate(hidden_states) + self.bias
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        final = torch.zeros_like(hidden_states)
        mask = nn.functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for index in mask.sum((-1, -2)).nonzero().flatten().tolist():
            which, tokens = torch.where(mask[index])
            out = self.experts[index](hidden_states[tokens]) * weights[tokens, which, None]
            final.index_add_(0, tokens, out)
        return final.view(shape), logits


class ListLayer(nn.Module):
    def __init__(self, top_k):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = ListBlock(top_k=top_k)

    def forward(self, x):
        x = x + self.mix(x)
        return x + self.mlp(x)[0]


class ListMoe(nn.Module):
    """Two layers with such blocks between an embedding and a head."""

    def __init__(self, seed=0, top_k=1):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(ListLayer(top_k) for _ in range(2))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def rows(rank, step=0, num=5):
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    return torch.randn(1, num, WIDTH, generator=generator)
