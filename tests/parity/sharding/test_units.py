"""How units are cut and when they are resharded: lists, mixed precision, ignored parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import (
    TORCH_MINOR,
    both_transports,
    grads,
    params,
    parity,
    same,
    shard,
    shard_stock,
    trained,
)

WAYS_TO_CUT = {
    "root_only": (),
    "blocks": STACK_UNITS,
    "list": ("blocks.0", "blocks.1+blocks.2", "norm+head"),
}


def train(ctx, model, num=3):
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # an optimizer of gathered parameters steps nothing
    return trained(model, lambda m, step: m(inputs(ctx.rank, step)).square().mean(), num), params(model)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("cut", WAYS_TO_CUT)
@pytest.mark.parametrize("reshard", [True, False, None])
@both_transports
def test_reshard_after_forward(ctx, cut, reshard, transport):
    """The numbers do not depend on it; which parameters are registered after forward does, as upstream's."""

    def run(model):
        model(inputs(ctx.rank)).sum()
        after_forward = {name: isinstance(param, DTensor) for name, param in model.named_parameters()}
        results = train(ctx, model)
        return after_forward, results, [isinstance(param, DTensor) for param in model.parameters()]

    after, _, at_end = parity(ctx, Stack(), run, WAYS_TO_CUT[cut], transport=transport, reshard_after_forward=reshard)
    assert all(at_end)
    if cut == "blocks":
        assert after["blocks.0.up.weight"] == (reshard is not False)
        assert after["head.weight"] == (reshard is True)


@distributed(world_sizes=(2,))
def test_structure_is_upstreams(ctx):
    """Names, order, placements, shapes, classes: nothing that a framework looks at differs."""
    model = Stack()
    twin, ours = shard_stock(copy.deepcopy(model), STACK_UNITS), shard(ctx, model, STACK_UNITS)
    for (name, expected), (mine, param) in zip(twin.named_parameters(), ours.named_parameters(), strict=True):
        assert name == mine and isinstance(param, nn.Parameter) and isinstance(param, DTensor)
        assert param.placements == expected.placements == (Shard(0),) and param.shape == expected.shape
        assert param.to_local().shape == expected.to_local().shape and param.requires_grad
        assert param.device_mesh == expected.device_mesh and param.stride() == expected.stride()
    for expected, module in zip(twin.modules(), ours.modules(), strict=True):
        assert type(module).__name__ == type(expected).__name__
        assert isinstance(module, FSDPModule) == isinstance(expected, FSDPModule)
        for attribute in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            assert getattr(module, attribute, None) == getattr(expected, attribute, None)
    assert isinstance(ours, Stack) and isinstance(ours.blocks[:1], nn.ModuleList)
    assert list(ours.state_dict()) == list(twin.state_dict())


@distributed(world_sizes=(2,))
@pytest.mark.parametrize(
    "policy",
    [
        {"param_dtype": "bfloat16"},
        {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "output_dtype": "float32"},
        {"param_dtype": "float16", "reduce_dtype": "float32", "cast_forward_inputs": False},
        {"reduce_dtype": "bfloat16"},
        {"output_dtype": "bfloat16"},
    ],
    ids=lambda policy: "-".join(f"{key}={value}" for key, value in policy.items()),
)
@both_transports
@pytest.mark.each_pair
def test_mixed_precision(ctx, policy, transport):
    options = {key: getattr(torch, value) if isinstance(value, str) else value for key, value in policy.items()}

    def run(model):
        results = []
        for step in range(2):
            x = inputs(ctx.rank, step)
            if not options.get("cast_forward_inputs", True):
                x = x.to(torch.float16)
            output = model(x)
            output.float().square().mean().backward()
            results += [output.detach(), grads(model)]
        return results

    # output_dtype of a block would feed the next unit a dtype that it does not cast: only the root has it.
    units = () if "output_dtype" in options else STACK_UNITS
    # Shared memory sums bf16 gradients in fp32 and rounds once; upstream's backend rounds each addition.
    default = options.get("param_dtype") if TORCH_MINOR < 15 else None
    rounds_once = transport == "shm" and options.get("reduce_dtype", default) == torch.bfloat16
    exact = {"rtol": 2e-2, "atol": 1e-3} if rounds_once else None
    parity(ctx, Stack(), run, units, transport=transport, mp_policy=MixedPrecisionPolicy(**options), exact=exact)


@distributed(world_sizes=(2,))
def test_ignored_parameters_stay_plain(ctx):
    model = Stack()
    twin = copy.deepcopy(model)
    shard_stock(twin, STACK_UNITS, ignored_params=set(twin.blocks[1].up.parameters()))
    ours = shard(ctx, model, STACK_UNITS, ignored_params=set(model.blocks[1].up.parameters()))
    assert not isinstance(ours.blocks[1].up.weight, DTensor)
    same(train(ctx, ours), train(ctx, twin))
