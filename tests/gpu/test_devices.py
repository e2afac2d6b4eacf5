"""Two GPUs: a model on the second computes as on the first, whichever is current, and leaves the first alone."""

import pytest
import torch

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from one_gpu import POLICIES, needs_gpu
from reference import same, shard

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.shows("second device"),
]

WIDTH = 64


def trained(ctx, index: int, current: int, policy: str) -> list[torch.Tensor]:
    """Returns losses and weights of a model on one device, whose steps run while another device is current."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(index)
    mesh = init_device_mesh("cuda", (ctx.world,))
    model = shard(ctx, Stack(width=WIDTH, hidden=96), STACK_UNITS, mesh=mesh, mp_policy=POLICIES[policy])
    optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-2)
    assert {param.device.index for param in model.parameters()} == {index}
    torch.cuda.set_device(current)
    losses = []
    for step in range(4):
        x = inputs(ctx.rank, step, rows=16, width=WIDTH).to(f"cuda:{index}")
        loss = model(x).float().square().mean()
        loss.backward()
        fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        if step == 1:
            fsdp2x.sleep(model, optimizer)
            fsdp2x.wake(model, optimizer)
    for device in (index, current):
        torch.cuda.synchronize(device)
    return losses + [param.detach().to_local().cpu() for param in model.parameters()]


@distributed(world_sizes=(1, 2), timeout=300, fresh=True)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("current", [0, 1])
def test_a_model_on_the_second_device(ctx, policy, current):
    expected = trained(ctx, 0, 0, policy)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats(0)["allocation.all.allocated"]
    got = trained(ctx, 1, current, policy)
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == before, "the first device was asked for memory"
    same(got, expected, "losses and weights", rtol=1e-5, atol=1e-6)
