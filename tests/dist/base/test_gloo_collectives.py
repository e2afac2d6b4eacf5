"""Gathers and reductions that stand for torch's own over gloo: the same values, and errors as early."""

import contextlib
import copy
import gc
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import divergences
import fsdp2x
from fsdp2x.base import collectives
from harness import distributed
from large_gathers import everything_is_large
from memory import POLICIES
from models import STACK_UNITS, Stack
from reference import grads, same, shard, shard_stock

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel) * (rank + 1) % 97).to(dtype)


@distributed(world_sizes=(2, 3, 4))
@pytest.mark.parametrize("large_bytes", [0, 1 << 40])
def test_values_are_those_of_torch(ctx, large_bytes):
    group, world = dist.group.WORLD, ctx.world
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MESSAGE_BYTES", large_bytes)
        for dtype in DTYPES:
            source, expected = values(ctx.rank, 301, dtype), torch.empty(world * 301, dtype=dtype)
            dist.all_gather_into_tensor(expected, source)
            outputs = torch.empty_like(expected), torch.empty_like(expected)
            in_place = outputs[1].narrow(0, ctx.rank * 301, 301).copy_(source)
            for output, part in zip(outputs, (source, in_place), strict=True):
                collectives.all_gather(group, output, part).wait()
                assert torch.equal(output, expected), dtype
            outputs[1].zero_()
            in_place.copy_(source)
            collectives.gather_in_place(group, [outputs[1]], [source]).wait()
            assert torch.equal(outputs[1], expected), dtype
            exchanged = torch.empty_like(expected)
            collectives.all_to_all(group, exchanged, values(ctx.rank, world * 301, dtype)).wait()
            parts = [values(peer, world * 301, dtype).chunk(world)[ctx.rank] for peer in range(world)]
            exchanged.chunk(world)[ctx.rank].copy_(parts[ctx.rank])  # it may stay unwritten
            assert torch.equal(exchanged, torch.cat(parts)), dtype


@distributed(world_sizes=(2, 3, 4))
def test_exchanges_without_a_waiter(ctx):
    """Callers gave up on two, one of which a peer posts later. Their messages are kept until a later one has ended."""
    group = dist.new_group()
    started = []

    def start(numel: int) -> collectives.Exchange:
        parts = [values(ctx.rank, count, torch.float32) for count in (numel, 3)]
        outputs = [part.new_zeros(ctx.world * part.numel()) for part in parts]
        for output, part in zip(outputs, parts, strict=True):
            output.view(ctx.world, -1)[ctx.rank] = part
        started.append((outputs, [part.numel() for part in parts]))
        return collectives.gather_in_place(group, outputs, parts)

    exchange = start(100_003)
    if ctx.rank > 0:  # as if it had failed before
        with pytest.raises(RuntimeError):
            start(7).posted.wait(timedelta(seconds=0.2))
    dist.barrier()
    if ctx.rank == 0:
        start(7)
    del exchange
    gc.collect()
    assert len(collectives._started[group]) == 2
    if ctx.rank % 2 == 0:
        for exchange in collectives.unfinished_exchanges(group):
            exchange.wait()
    start(50_001).wait()
    assert not collectives._started[group]
    for outputs, sizes in started:
        for output, numel in zip(outputs, sizes, strict=True):
            expected = torch.cat([values(rank, numel, torch.float32) for rank in range(ctx.world)])
            assert torch.equal(output, expected)


@distributed(world_sizes=(2, 3, 4))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshard", [True, False])
def test_steps_are_those_of_stock(ctx, policy, reshard):
    """Gathers in place, and exchanged gradients: equal bits where the sum of two has one order."""
    whole = Stack(width=24, hidden=20)  # some parameters are divided evenly, and those alone are in place
    options = {"mp_policy": POLICIES[policy], "reshard_after_forward": reshard}
    with everything_is_large() as gathered:
        ours = shard(ctx, copy.deepcopy(whole), STACK_UNITS, transport="process_group", **options)
        stock = shard_stock(whole, STACK_UNITS, **options)
        for model in (ours, stock):
            for step in range(3):
                x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * step + ctx.rank))
                model.set_requires_gradient_sync(step != 1)
                model(x).float().square().mean().backward()
        if ctx.world == 2:
            same(grads(ours), grads(stock))
        else:
            same(grads(ours), grads(stock), rtol=1e-5, atol=1e-6)
        assert len(gathered) >= 9 and all(len(outputs) > 1 for outputs in gathered)
        num = len(gathered)
        with CommDebugMode() as comms:
            ours(x).float().square().mean().backward()
        assert len(gathered) == num, "a dispatch mode sees the collectives of stock"
        assert sum(comms.get_comm_counts().values()) > 0


@distributed(world_sizes=(2, pytest.param(3, marks=pytest.mark.full)), timeout=120)
def test_divergences_in_large_gathers(ctx):
    with everything_is_large():
        for seed in range(len(divergences.KINDS)):
            program = divergences.draw(seed, ctx.world, "process_group", divergences.KINDS)
            assert not (wrong := divergences.run(program)), (program, wrong)
        divergences.meet_again()  # this repeats exchanges after a failure, which are messages as well


class Caught(Exception):
    pass


class EncoderDecoder(nn.Module):
    """Generation calls the decoder only. It may raise after the last unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, generates=False, raises=False):
        x = self.decoder(x if generates else self.encoder(x))
        if raises:
            raise Caught
        return self.head(x)


def steps_alike(ctx, model: nn.Module, stock: nn.Module, num: int = 2) -> None:
    for step in range(num):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + ctx.rank))
        for one in (model, stock):
            one(x).square().mean().backward()
        same(grads(model), grads(stock), rtol=1e-5, atol=1e-6)


@contextmanager
def encoder_decoders(ctx):
    """Yields a model and FSDP2's, with large gathers. Both train alike before and after."""
    whole, units = EncoderDecoder(), ("encoder", "decoder")
    with everything_is_large():
        model = shard(ctx, copy.deepcopy(whole), units, transport="process_group")
        stock = shard_stock(whole, units)
        steps_alike(ctx, model, stock)
        yield model, stock
        steps_alike(ctx, model, stock)


@distributed(world_sizes=(2, 3))
def test_ranks_run_different_forwards_of_gathered_units(ctx):
    """One rank generates, or raises after an evaluation's last gather. Its predictions stay those of the others."""
    x = torch.ones(2, 8)
    with encoder_decoders(ctx) as (model, stock):
        with torch.no_grad(), fsdp2x.unsharded(model):
            for _ in range(2 * ctx.rank):
                model(x, generates=True)
        steps_alike(ctx, model, stock)
        with torch.no_grad(), contextlib.suppress(Caught):
            model(x, generates=True, raises=ctx.rank == 0)


@distributed(world_sizes=(2, 3))
def test_a_dispatch_mode_on_one_rank(ctx):
    with encoder_decoders(ctx) as (model, _):
        with pytest.raises(RuntimeError, match="rank 1 gathers .* dispatch mode"):
            with CommDebugMode() if ctx.rank == 1 else contextlib.nullcontext():
                model(torch.ones(2, 8))


@distributed(world_sizes=(2, pytest.param(3, marks=pytest.mark.full)), timeout=120)
def test_a_separate_group_exchanges_and_is_checked(ctx):
    def separated(program):
        model = sharded(program)
        model.set_separate_reduce_scatter_group()
        return model

    sharded = divergences.sharded
    with everything_is_large() as gathered, pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergences, "sharded", separated)
        for seed in range(4):
            program = divergences.draw(seed, ctx.world, "process_group", ("raise in backward", "skip"))
            assert not (wrong := divergences.run(program)), (program, wrong)
        divergences.meet_again()
    assert gathered, "a separate group does not forbid gathers in place"


@distributed(world_sizes=(2, 3))
def test_a_gather_that_the_user_starts_has_the_values_of_its_start(ctx):
    with everything_is_large() as gathered:
        model = shard(ctx, Stack(width=12, hidden=20), STACK_UNITS, transport="process_group")
        unit = model.get_submodule(STACK_UNITS[0])
        expected = {name: param.full_tensor().detach().clone() for name, param in unit.named_parameters()}
        model(torch.ones(2, 12))  # lazy initialization
        model.reshard()
        handle = unit.unshard(async_op=True)
        with torch.no_grad():
            for param in unit.parameters():
                param.to_local().zero_()
        handle.wait()
        assert gathered
        same(dict(unit.named_parameters()), expected)
