"""Two GPUs: an engine on the second receives buckets through NCCL, in a group separate from the trainers'."""

import pytest
import torch

import fsdp2x
from engine_process import digests
from engines import EngineProcess, new_address
from fsdp2x.sync import GroupPeer
from harness import distributed
from models import STACK_UNITS, Stack
from one_gpu import needs_gpu
from reference import shard

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.shows("broadcasts"),
]


@distributed(world_sizes=(1,), timeout=300, fresh=True)
def test_an_engine_on_the_second_device(ctx):
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    model = shard(ctx, Stack(width=64, hidden=96), STACK_UNITS, mesh=init_device_mesh("cuda", (1,)))
    address = new_address("group")
    target = GroupPeer(address, 1, backend="nccl")
    with EngineProcess(address, environment={"CUDA_VISIBLE_DEVICES": "1"}) as engine:
        with fsdp2x.sync.connect(model, target, bucket_bytes=20_000, timeout_s=60) as sync:
            for version in range(3):
                with torch.no_grad():
                    for param in model.parameters():
                        param.to_local().add_(version)
                sync.push(version=version)
                expected = {name: tensor.cpu() for name, tensor in fsdp2x.full_tensors(model)}
                status = engine.status()
                assert (status["state"], status["version"], status["digests"]) == ("clean", version, digests(expected))
