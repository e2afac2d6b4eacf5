"""Two torchrun agents on one machine that count as two hosts: shared memory inside each, the process group across.

Run by an agent, this file is the script of a rank.
"""

import copy
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from agents import run_agents


def test_two_agents(tmp_path):
    outputs = run_agents(tmp_path, __file__)
    assert sum(output.count("equal to one process") for output in outputs) == 4 * 2, "\n".join(outputs)


def train(ctx, mesh, transports: str) -> None:
    """Three steps of a sharded model and of a whole one with the mean gradient of all ranks."""
    import fsdp2x
    from models import STACK_UNITS, Stack, inputs
    from reference import mean_of_ranks, params, same, shard

    model, plain = Stack(), Stack()
    shard(ctx, model, STACK_UNITS, mesh=mesh)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(3):
        model(inputs(ctx.rank, step)).square().mean().backward()
        mean_of_ranks(plain, lambda one, rank, step=step: one(inputs(rank, step)).square().mean(), ctx.world)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert fsdp2x.describe(model).transport == transports, fsdp2x.describe(model).transport
    same(params(model), params(copy.deepcopy(plain)), rtol=1e-5, atol=1e-6)
    print(f"rank {ctx.rank}: equal to one process over {transports}", flush=True)


def main() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from fsdp2x.base import rendezvous
    from harness.context import Context
    from models import Stack
    from reference import shard

    rendezvous._host_identity = lambda: f"host {os.environ['GROUP_RANK']}"  # torchrun's number of the agent
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ctx = Context(dist.get_rank(), dist.get_world_size())
    by_host = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    train(ctx, by_host, "shm")
    across = init_device_mesh("cpu", (4,))
    train(ctx, across, "process_group")
    model = shard(ctx, Stack(), mesh=across, transport="shm")
    try:
        model(torch.zeros(1, 6))
    except ValueError as error:
        assert "the ranks run on several hosts" in str(error), error
    else:
        raise AssertionError('transport="shm" across hosts was not refused')
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
