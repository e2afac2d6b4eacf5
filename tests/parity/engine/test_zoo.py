"""Modules that treat their parameters in a way of their own: recurrent, attention, buffers, parametrizations."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from harness import distributed
from models import Mlp, inputs
from reference import both_transports, full, parity, trained


class Recurrent(nn.Module):
    """nn.LSTM sets its flat list of weights whenever a parameter is assigned."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 5, num_layers=2, batch_first=True), nn.Linear(5, 6)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Attention(nn.Module):
    """Reads out_proj.weight of a child that is never called."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.conv(x[:, None])).mean(1)


class Table(nn.Module):
    """Parameters of one row, one element, three dims, in a ParameterList and a ParameterDict; a buffer in place."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(3, 2, 6))
        self.rows = nn.ParameterList([torch.randn(1, 6), torch.randn(2, 6)])
        self.named = nn.ParameterDict({"a": torch.randn(7), "b": torch.randn(5, 6)})
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        x = x * self.one + self.cube.sum((0, 1)) + self.rows[0] + self.rows[1].mean(0)
        return x * self.named["a"].sum() + self.named["b"].mean(0) * self.count


ZOO = {
    "lstm": Recurrent,
    "attention": Attention,
    "encoder_layer": lambda: nn.TransformerEncoderLayer(6, 2, 5, dropout=0.0, batch_first=True),
    "convolution": Convolution,
    "table": Table,
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.GELU()),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "dropout": lambda: nn.Sequential(Mlp(), nn.Dropout(0.3)),
}


class Wrapped(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.special, self.after = nn.Linear(6, 6), ZOO[kind](), nn.Linear(6, 3)

    def forward(self, x):
        return self.after(self.special(self.before(x)))


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("kind", ZOO)
@both_transports
def test_kinds_of_modules(ctx, kind, transport):
    def loss_of(model, step):
        x = inputs(ctx.rank, step)
        return model(x[:, None] if kind in ("lstm", "attention") else x).square().mean()

    def run(model):
        return trained(model, loss_of, 3, lr=0.05), [full(buffer) for buffer in model.buffers()]

    parity(ctx, Wrapped(kind), run, ("special",), transport=transport)
