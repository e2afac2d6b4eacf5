"""Values that pass through forward: nested inputs, dicts, dataclasses, named tuples, and none at all."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import distributed
from models import Mlp, inputs
from reference import TORCH_MINOR, both_transports, grads, parity

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    value: torch.Tensor
    note: str = ""
    more: dict | None = None


PACK = {
    "dict": lambda x: {"value": x, "number": 3},
    "nested": lambda x: {"deep": [{"value": (x, None)}, "text"]},
    "dataclass": lambda x: Record(x, "note", {"again": x * 2}),
    "named_tuple": lambda x: Pair(x, (x * 2, 1)),
    "ordered": lambda x: OrderedDict(value=x),
    "list": lambda x: [x, [x * 2]],
}
UNPACK = {
    "dict": lambda value: value["value"],
    "nested": lambda value: value["deep"][0]["value"][0],
    "dataclass": lambda value: value.value + value.more["again"],
    "named_tuple": lambda value: value.first + value.second[0],
    "ordered": lambda value: value["value"],
    "list": lambda value: value[0] + value[1][0],
}


def stock_kind(ctx, kind):
    """The stock of torch 2.11 does not look for gradients in dataclasses; a list with the same tensors stands in."""
    if kind != "dataclass" or TORCH_MINOR >= 12:
        return kind
    if ctx.impl == "torch":
        pytest.skip("this stock does not look into dataclasses")
    return "list"


class Packer(nn.Module):
    """Takes its input nested in `kind` by keyword, and returns its output nested the same way."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.mlp = kind, Mlp()

    def forward(self, *, packed):
        return PACK[self.kind](self.mlp(UNPACK[self.kind](packed)))


class Caller(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.before, self.packer, self.after = nn.Linear(6, 6), Packer(kind), nn.Linear(6, 3)

    def forward(self, x):
        packed = self.packer(packed=PACK[self.kind](self.before(x)))
        return self.after(UNPACK[self.kind](packed))


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("kind", PACK)
def test_nested_inputs_are_cast(ctx, kind):
    """cast_forward_inputs reaches the same leaves as upstream's, and output_dtype too."""
    seen = []

    def record(module, args, output):
        seen.append(str(UNPACK[module.kind](output).dtype))

    # With reduce_dtype, because its default is not the same in all versions of torch.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)

    def run(model):
        seen.clear()
        model.packer.mlp.register_forward_hook(lambda module, args, output: seen.append(str(output.dtype)))
        model.packer.register_forward_hook(record)
        output = model(inputs(ctx.rank))
        output.square().mean().backward()
        return output.detach(), list(seen), grads(model)

    twin = Caller(stock_kind(ctx, kind))
    _, dtypes, _ = parity(ctx, Caller(kind), run, ("before", "packer", "after"), twin=twin, mp_policy=policy)
    assert dtypes[0] == "torch.bfloat16"


@distributed(world_sizes=(2,))
@both_transports
def test_only_part_of_the_output_is_used(ctx, transport):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = Mlp(), Mlp()

        def forward(self, x):
            x = self.first(x)
            return {"a": x.sum(), "b": self.second(x), "c": x.detach(), "d": None}

    def run(model):
        results = []
        for key in ("a", "b", "b", "a"):
            output = model(inputs(ctx.rank))
            output[key].square().mean().backward()
            results.append(grads(model))
            model.zero_grad()
        return results

    results = parity(ctx, Two(), run, ("first", "second"), transport=transport)
    assert results[0]["second.up.weight"] is None and results[1]["second.up.weight"] is not None
