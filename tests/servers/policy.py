"""Shared code of the trainers in this folder: a sharded policy, other weights for it, and its expected answers."""

from __future__ import annotations

import torch
from torch.distributed.tensor import distribute_tensor

import fsdp2x

NUM_PROMPT, NUM_NEW = 40, 8  # more than a block of an engine's cache


def prompt_of(vocab_size: int) -> list[int]:
    return [(3 * i * i + 5 * i) % vocab_size for i in range(NUM_PROMPT)]


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.model.layers:
        fsdp2x.fully_shard(layer)
    return fsdp2x.fully_shard(model)


def change(model: torch.nn.Module, seed: int) -> None:
    """Other weights, of the same sizes."""
    generator = torch.Generator().manual_seed(seed)
    full = {name: 0.3 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    for name, param in model.named_parameters():
        if "norm" in name:
            full[name] = 1 + full[name]
        with torch.no_grad():
            param.copy_(distribute_tensor(full[name], param.device_mesh, param.placements))


@torch.no_grad()
def answer_of(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The likeliest tokens and their log-probabilities."""
    tokens, found = list(prompt), []
    for _ in range(NUM_NEW):
        scores = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(0)
        tokens.append(int(scores.argmax()))
        found.append(float(scores.max()))
    return tokens[len(prompt) :], found
