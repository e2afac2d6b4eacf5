"""Ranks of which some add up gradients in fp32 and others have one in bf16."""

from harness import distributed
from memory import POLICIES
from models import STACK_UNITS, Stack, inputs
from reference import TRANSPORTS, grads, only_fsdp2x, same, shard, tolerance


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
