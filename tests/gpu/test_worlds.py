"""One GPU: steps of rank 0 in a world of identical ranks equal FSDP2's, in every arrangement of the engine.

Collectives go through NCCL, one rank's part at a time (alike.py). The rehearsal on the CPU runs the same body over
gloo, and its record has no races.
"""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import alike
import fsdp2x
import wire
from arrangements import CASES, STEPS, WIDTH, run
from harness import distributed
from models import Stack, inputs
from one_gpu import CLOSE, device_of, each_backend, skipped_without_windows
from reference import full, same, shard, shard_stock


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.parametrize("name", CASES)
@pytest.mark.shows("worlds")
def test_steps_are_stocks(ctx, place, backend, name):
    case, device = CASES[name], device_of(place)
    with alike.world_of(device, backend, case.sizes, case.pack_below) as (mesh, world):
        options = {"mesh": mesh, **case.options}
        model = case.make()
        stock = shard_stock(copy.deepcopy(model), case.units, **options)
        ours = shard(ctx, model, case.units, transport=place if place == "streams" else "auto", **options)
        expected = run(stock, case, device)
        world.counts = dict.fromkeys(world.counts, 0)
        got = run(ours, case, device)
        same(got, expected, name, **CLOSE[case.close])
        gathers = world.counts["gather of many"] + (world.counts["gather"] if case.pack_below != 0 else 0)
        assert gathers >= STEPS and world.counts["reduction"] >= STEPS, world.counts
        assert (world.counts["all-reduce"] > 0) == (len(case.sizes) == 2)
        del stock, ours, model


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.parametrize("weights, gradients", [("int8", "int8"), ("fp8", "bfloat16")])
@pytest.mark.shows("wire formats")
def test_numbers_in_few_bits(ctx, place, backend, weights, gradients):
    """Every rank has this rank's rows, so all weights arrive as this rank's do."""
    case, device = CASES["fp32"], device_of(place)
    with alike.world_of(device, backend, case.sizes) as (mesh, _):
        model = case.make().to(device)
        world = mesh.size()

        def repeated(param: torch.Tensor) -> torch.Tensor:
            rows = param.detach().chunk(world)[0]
            # Use CPU arithmetic, like fsdp2x's kernels: on a device, torch divides by a Python number differently.
            arrived = wire.travelled(rows.cpu(), weights).to(device) if param.dim() > 1 else rows
            return torch.cat([arrived] * world)[: len(param)]

        twin = copy.deepcopy(model)
        with torch.no_grad():
            for param in twin.parameters():
                param.copy_(repeated(param))
        options = {"mesh": mesh, "transport": place if place == "streams" else "auto"}
        ours = shard(ctx, model, case.units, **options)
        ours.set_wire_dtype(weights=weights, gradients=gradients)
        feedback = {name: wire.ErrorFeedback(gradients, world) for name, _ in twin.named_parameters()}
        for step in range(STEPS):
            x = inputs(0, step, rows=16, width=WIDTH).to(device)
            for one in (ours, twin):
                one(x).double().square().mean().backward()
            with fsdp2x.unsharded(ours):
                same(dict(ours.named_parameters()), dict(twin.named_parameters()), "gathered")
            for (name, param), expected in zip(ours.named_parameters(), twin.parameters(), strict=True):
                arrived = feedback[name].sent(expected.grad).chunk(world)[0]
                # Another order of sums in the backward may give the next code.
                beside = 1.01 * expected.grad.abs().max().item() / (127 if gradients == "int8" else 256)
                same(param.grad.to_local(), arrived, f"{name}, step {step}", rtol=0, atol=beside)
            ours.zero_grad()
            twin.zero_grad()


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.parametrize("kind", ["process_group", "symmetric"])
@pytest.mark.shows("communication memory")
def test_steps_in_memory_for_collectives(ctx, place, backend, kind):
    """Slots and buffers come from the backend's allocator, and from torch's pool of symmetric memory."""
    if kind == "symmetric" and place != "cuda":
        pytest.skip("the CPU has no symmetric memory")
    device, case = device_of(place), CASES["bf16"]
    with alike.world_of(device, backend, case.sizes) as (mesh, _):
        options = {"mesh": mesh, "transport": place if place == "streams" else "auto", **case.options}
        plain = shard(ctx, case.make(), case.units, **options)
        ours = shard(ctx, case.make(), case.units, **options)
        if kind == "process_group":
            ours.set_allocate_memory_from_process_group_for_comm(True)
        else:
            ours.set_symm_mem_for_comm("NCCL")
            for model in (plain, ours):  # its symmetric reductions sum only
                model.set_force_sum_reduction_for_comms(True)
        with skipped_without_windows():
            got = run(ours, case, device)
        same(got, run(plain, case, device), kind)


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.shows("worlds")
def test_several_roots_take_turns(ctx, place, backend):
    """A policy and its critic: two models with interleaved steps share the device's streams."""
    device, case = device_of(place), CASES["bf16"]
    with alike.world_of(device, backend, case.sizes) as (mesh, _):
        options = {"mesh": mesh, **case.options}

        def results(make: Callable) -> list:
            models = [make(Stack(width=WIDTH, hidden=96, seed=seed), case.units, **options) for seed in (0, 1)]
            found = []
            for step in range(STEPS):
                x = inputs(0, step, rows=16, width=WIDTH).to(device)
                first, second = (model(x).double().square().mean() for model in models)
                second.backward()  # the last forward is not the first to go back
                first.backward()
                for model in models:
                    found += [param.grad.to_local().clone() for param in model.parameters()]
                    model.zero_grad()
            return found

        def ours(model, units, **options):
            return shard(ctx, model, units, transport=place if place == "streams" else "auto", **options)

        same(results(ours), results(shard_stock), "gradients", **CLOSE["bf16"])


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.shows("optimizers")
def test_our_adamw_with_clipping(ctx, place, backend, name):
    """Against torch's AdamW over FSDP2's shards. Halfway, it takes over the state of torch's fused one."""
    case, device = CASES[name], device_of(place)
    with alike.world_of(device, backend, case.sizes) as (mesh, _):
        options = {"mesh": mesh, **case.options}
        model = case.make()
        stock = shard_stock(copy.deepcopy(model), case.units, **options)
        ours = shard(ctx, model, case.units, transport=place if place == "streams" else "auto", **options)
        torchs = torch.optim.AdamW(stock.parameters(), lr=1e-2, fused=True)
        mine = fsdp2x.optim.AdamW(ours.parameters(), lr=1e-2)
        results: list[list] = [[], []]
        for step in range(2 * STEPS):
            if step == STEPS:
                mine.load_state_dict(copy.deepcopy(torchs.state_dict()))
            x = inputs(0, step, rows=16, width=WIDTH).to(device)
            waits = never_waiting(place) if step > STEPS + 1 else contextlib.nullcontext()
            for found, sharded, optimizer in zip(results, (stock, ours), (torchs, mine), strict=True):
                loss = sharded(x).double().square().mean()
                loss.backward()
                with waits if optimizer is mine else contextlib.nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        results[0] += [full_local(param) for param in stock.parameters()]
        results[1] += [full_local(param) for param in ours.parameters()]
        same(results[1], results[0], "losses and weights", **CLOSE["bf16"])


def full_local(param: nn.Parameter) -> torch.Tensor:
    return full(param.detach().to_local())


@contextlib.contextmanager
def never_waiting(place: str):
    """On a device, an operation that makes the host wait is an error."""
    if place == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if place == "cuda":
            torch.cuda.set_sync_debug_mode("default")
