"""Writes to unsharded weights end with their reshard, however and by whichever rank they were made, as upstream's."""

import ctypes

import pytest
import torch

from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, full, parity, shard

WRITES = {
    "in place": lambda param: param.mul_(2),
    "data": lambda param: param.data.mul_(2),
    "detached": lambda param: param.detach().fill_(7),
    "last element": lambda param: param.data.view(-1)[-1:].add_(1),
    "memory": lambda param: ctypes.memset(param.data_ptr(), 0x3F, param.nbytes),
}


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("write", WRITES)
@both_transports
def test_writes_end_with_the_reshard(ctx, write, transport):
    def run(model, stays=False):
        outputs = [full(model(inputs(ctx.rank)))]
        units = [module for module in model.modules() if hasattr(module, "unshard")]
        for writers in (range(ctx.world), (ctx.world - 1,)):
            for module in units:
                module.unshard()
            if ctx.rank in writers:
                with torch.no_grad():
                    for param in model.parameters():
                        WRITES[write](param)
            for module in units:
                module.reshard()
            outputs.append(full(model(inputs(ctx.rank))))
        assert all(torch.equal(outputs[0], after) != stays for after in outputs[1:]), write
        return outputs

    if transport == "streams" and ctx.world == 1:  # without a cast, the weights are the shards themselves
        run(shard(ctx, Stack(), STACK_UNITS, transport=transport), stays=True)
    else:
        parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
