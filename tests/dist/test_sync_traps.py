"""Engines that keep, pad, prepack, repack once and stay poisoned take pushes right, through every target."""

import contextlib

import pytest
import torch
from torch import nn

import fsdp2x
from engines import Reloading, peer
from fsdp2x.sync import InProcess, SyncError
from harness import distributed
from reference import same, shard


@contextlib.contextmanager
def in_process(ctx, engine):
    yield (
        InProcess(engine.load if ctx.rank == 0 else None, start=engine.start, finish=engine.finish, abort=engine.abort),
        None,
    )


@pytest.mark.parametrize("way", ["in_process", "peer"])
@distributed(world_sizes=(2,))
def test_a_reload_by_layers(ctx, way):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    names = [name for name, _ in model.named_parameters()]
    shard(ctx, model)
    for bucket_bytes in (32, 300, 700, 1 << 20):  # a tensor, a layer, a layer and a half, all
        engine = Reloading(names)
        with (peer if way == "peer" else in_process)(ctx, engine) as (target, _):
            with fsdp2x.sync.connect(model, target, bucket_bytes=bucket_bytes) as sync:
                for version in range(4):
                    with torch.no_grad():
                        for param in model.parameters():
                            param.add_(1)
                    whole = dict(fsdp2x.full_tensors(model))
                    if version == 2:
                        engine.bad = "2.bias"
                        with pytest.raises(SyncError, match="attempted to load 2.bias"):
                            sync.push(version=version)
                        continue
                    sync.push(version=version)
                    if ctx.rank == 0:
                        same(dict(sorted(engine.weights.items())), dict(sorted(whole.items())))
                if ctx.rank == 0:
                    assert engine.num_repacks == 3, "what is done once per push was done for each bucket, or not at all"
