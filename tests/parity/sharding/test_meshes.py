"""1-D and 2-D meshes against stock: dtypes, resharding, accumulation, frozen, tied and mixed parameters."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from harness import distributed
from memory import POLICIES
from models import STACK_UNITS, Stack, inputs
from reference import (
    TRANSPORTS,
    both_transports,
    grads,
    only_fsdp2x,
    params,
    parity,
    same,
    shard,
    tolerance,
)

# How the three micro-batches before a step are reduced: (gradient sync, all-reduce) of each.
ACCUMULATIONS = {
    "each": ((True, True),) * 3,
    "last": ((False, False), (False, False), (True, True)),
    "scatter_only": ((True, False), (True, False), (True, True)),
    "mixed": ((False, False), (True, False), (True, True)),
}


def accumulate(ctx, model, how):
    """Two optimizer steps of three micro-batches each."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    results = []
    for step in range(2):
        for number, (sync, all_reduce) in enumerate(ACCUMULATIONS[how]):
            model.set_requires_gradient_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            model.set_is_last_backward(number == 2)
            loss = model(inputs(ctx.rank, 3 * step + number)).float().square().mean()
            loss.backward()
            results.append(loss.detach())
        results.append(grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return results, params(model)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize(("shape", "policy"), [((2, 1), "fp32"), ((1, 2), "fp32"), ((2,), "bf16")])
@pytest.mark.parametrize("how", ACCUMULATIONS)
@both_transports
def test_two_ranks_bit_for_bit(ctx, shape, policy, how, transport):
    """All replicas, or all shards: sums of two numbers have one order only.

    Gradients in bf16 that are summed in fp32: packed as they come, or added up in fp32 first.
    """
    names = ("replicate", "shard")[-len(shape) :]
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names), "mp_policy": POLICIES[policy]}
    parity(ctx, Stack(), lambda m: accumulate(ctx, m, how), STACK_UNITS, transport=transport, **options)


class Routed(Stack):
    """Block 1 gets no gradient on some ranks."""

    def forward(self, x, use):
        x = self.blocks[0](x)
        gathered = self.blocks[1](x)  # gathers are the same on every rank
        return self.head(self.norm(gathered if use else x + 0 * gathered.detach()))


@distributed(world_sizes=(2, 3))
def test_ranks_that_add_up_and_ranks_that_do_not(ctx):
    """In bf16: the last rank holds an fp32 sum of two micro-batches for block 1, the others one gradient in bf16."""
    only_fsdp2x(ctx)
    found = []
    for transport in TRANSPORTS:
        model = shard(ctx, Routed(), STACK_UNITS, transport=transport, mp_policy=POLICIES["bf16"])
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            use = number == 1 or ctx.rank == ctx.world - 1
            model(inputs(ctx.rank, number), use=use).float().square().mean().backward()
        found.append(grads(model))
    assert found[0]["blocks.1.up.weight"] is not None
    same(*found, **tolerance(ctx))
