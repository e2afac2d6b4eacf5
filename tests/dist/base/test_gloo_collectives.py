"""Gathers and reductions that stand for torch's own over gloo: the same values, and errors as early."""

import pytest
import torch
import torch.distributed as dist

import divergences
from fsdp2x.base import collectives
from harness import distributed
from reference import only_fsdp2x

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel) * (rank + 1) % 97).to(dtype)


@distributed(world_sizes=(2, 3, 4))
@pytest.mark.parametrize("large_bytes", [0, 1 << 40])
def test_values_are_those_of_torch(ctx, large_bytes):
    only_fsdp2x(ctx)
    group, world = dist.group.WORLD, ctx.world
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_LARGE_BYTES", large_bytes)
        for dtype in DTYPES:
            source, expected = values(ctx.rank, 301, dtype), torch.empty(world * 301, dtype=dtype)
            dist.all_gather_into_tensor(expected, source)
            outputs = torch.empty_like(expected), torch.empty_like(expected)
            in_place = outputs[1].narrow(0, ctx.rank * 301, 301).copy_(source)
            for output, part in zip(outputs, (source, in_place), strict=True):
                collectives.all_gather(group, output, part).wait()
                assert torch.equal(output, expected), dtype
        for dtype in DTYPES[:4]:
            source, expected = values(ctx.rank, world * 301, dtype), torch.empty(301, dtype=dtype)
            dist.reduce_scatter_tensor(expected, source.clone())
            for average in (False, True):
                output = torch.empty_like(expected)
                collectives.reduce_scatter(group, output, source.clone(), average).wait()
                assert torch.equal(output, expected / world if average else expected), dtype


@distributed(world_sizes=(2, pytest.param(3, marks=pytest.mark.full)), timeout=120)
def test_divergences_in_large_gathers(ctx):
    only_fsdp2x(ctx)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_LARGE_BYTES", 0)
        for seed in range(len(divergences.KINDS)):
            program = divergences.draw(seed, ctx.world, "process_group", divergences.KINDS)
            assert not (wrong := divergences.run(program)), (program, wrong)
        divergences.meet_again()  # this repeats exchanges after a failure, which are broadcasts as well
