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
    mesh_of,
    only_fsdp2x,
    params,
    parity,
    same,
    shard,
    tolerance,
)


class Tied(Stack):
    """The second block computes with the first one's weights, in one unit."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


def variant(kind):
    if kind == "tied":
        return Tied(), ("blocks.0+blocks.1", "blocks.2")
    model = Stack()
    if kind == "frozen":
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.bias.requires_grad_(False)
    return model, STACK_UNITS


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


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("mesh", ["1d", "2d"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("kind", ["plain", "frozen", "tied"])
@pytest.mark.parametrize("how", ACCUMULATIONS)
def test_grid(ctx, mesh, policy, reshard, kind, how):
    """The transports take turns."""
    transport = TRANSPORTS[list(ACCUMULATIONS).index(how) % 2]
    options = {"mesh": mesh_of(mesh, ctx.world), "mp_policy": POLICIES[policy], "reshard_after_forward": reshard}
    exact = {"rtol": 1e-5, "atol": 1e-6} if policy == "fp32" else {"rtol": 2e-2, "atol": 2e-3}
    model, units = variant(kind)
    parity(ctx, model, lambda m: accumulate(ctx, m, how), units, transport=transport, exact=exact, **options)


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


@distributed(world_sizes=(2,))
@both_transports
def test_all_reduce_hook(ctx, transport):
    """The hook sees this rank's rows and may change them."""
    seen = []

    def hook(rows):
        seen.append(rows.numel())
        rows.mul_(2.0)

    def run(model):
        for module in model.modules():
            if hasattr(module, "set_all_reduce_hook"):
                module.set_all_reduce_hook(hook)
        return accumulate(ctx, model, "each")

    parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    assert len(seen) == 2 * 2 * 3 * 4
