"""The small transformer of the self-test and its batches: deterministic, no dropout, rows that do not divide."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# 1003 and 250 are multiples of none of 2, 3 and 4: shards differ in size.
VOCAB, HIDDEN, LAYERS, HEADS, FEED_FORWARD = 1003, 64, 4, 8, 250
BATCH, LENGTH = 2, 16


class SimpleTransformer(nn.Module):
    """Embedding, encoder layers, head. Logits are [batch, length, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, FEED_FORWARD, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.lm_head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def build(device: torch.device) -> SimpleTransformer:
    """The same weights on every rank and at every call; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        return SimpleTransformer().to(device)


def batch(rank: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one rank in one step, int64 [batch, length]: any rank can make those of the others."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCAB, (2, BATCH, LENGTH), generator=generator).to(device)
    return tokens[0], tokens[1]


def loss_of(model: nn.Module, rank: int, step: int, device: torch.device) -> Tensor:
    """Mean cross-entropy of that rank's batch, in fp32."""
    inputs, labels = batch(rank, step, device)
    return nn.functional.cross_entropy(model(inputs).float().view(-1, VOCAB), labels.view(-1))
