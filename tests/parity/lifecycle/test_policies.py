"""Precision policies beyond the dtype of a whole unit: parameters that keep their dtype, buffers, gradient dtypes."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import TORCH_MINOR, both_transports, only_fsdp2x, params, parity, shard, trained


def train(ctx, model):
    return trained(model, lambda m, step: m(inputs(ctx.rank, step)).float().square().mean()), params(model)


class Norms(Stack):
    """Computes with its norm in fp32 inside a bf16 unit."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        assert self.norm.weight.dtype == torch.float32 and self.head.weight.dtype == torch.bfloat16
        return self.head(self.norm(x.float()).to(x.dtype))


@pytest.mark.skipif(TORCH_MINOR < 15, reason="MixedPrecisionPolicy has no param_dtype_override_fn before torch 2.15")
@distributed(world_sizes=(2,))
@both_transports
def test_parameters_that_keep_their_dtype(ctx, transport):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=lambda param: torch.float32 if param.dim() == 1 and param.numel() == 6 else None,
    )
    model = Norms()
    for block in model.blocks:
        block.down.bias = nn.Parameter(torch.zeros(6), requires_grad=False)  # would be fp32 next to bf16 weights
        del block.down.bias
        block.down.register_parameter("bias", None)
    parity(ctx, model, lambda m: train(ctx, m), STACK_UNITS, transport=transport, mp_policy=policy)


@pytest.mark.skipif(TORCH_MINOR < 15, reason="MixedPrecisionPolicy has no param_dtype_override_fn before torch 2.15")
@distributed(world_sizes=(1,))
def test_an_override_must_be_one_of_two_dtypes(ctx):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16)
    with pytest.raises(ValueError, match="must return None, param_dtype"):
        shard(ctx, Stack(), mp_policy=policy)


@distributed(world_sizes=(1,))
def test_a_gradient_dtype_of_its_own_is_refused(ctx):
    only_fsdp2x(ctx)
    model = Stack().bfloat16()
    model.head.weight.grad_dtype = torch.float32
    with pytest.raises(NotImplementedError, match="'weight' of Linear has grad_dtype"):
        shard(ctx, model)


@distributed(world_sizes=(2,))
def test_buffer_dtype(ctx):
    """Floating-point buffers are converted, counters are not."""
    only_fsdp2x(ctx)

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("scale", torch.full((6,), 0.1))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            return self.linear(x) * self.scale

    model = shard(ctx, Counted(), buffer_dtype=torch.bfloat16)
    assert model.scale.dtype == torch.bfloat16 and model.count.dtype == torch.long
    assert torch.equal(model.scale, torch.full((6,), 0.1).bfloat16())
    model(inputs(ctx.rank)).sum().backward()
    assert model.linear.weight.grad is not None
