"""Offload policies by name: units whose shards are in CPU memory in part compute the same bits as any others."""

import copy
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import fsdp2x
import streams
from checkpoints import shared_folder
from fsdp2x.memory import plan_memory
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from offloading import MODES, OFFLOAD, OURS, POLICIES, loss_of, policy, train, transfers
from reference import TRANSPORTS, full, only_fsdp2x, params, same, shard, shard_stock
from streams import wide


def draw(random: Random, model: nn.Module, modes=MODES) -> dict[str, str]:
    """A mode for most parameters. The others are not named."""
    return {name: random.choice(modes) for name, _ in model.named_parameters() if random.random() < 0.8}


def sharded(ctx, model: nn.Module, modes: dict[str, str], **options) -> nn.Module:
    """Shards the units of `STACK_UNITS`, each with its part of the map."""
    model = copy.deepcopy(model)
    for unit in [*STACK_UNITS, ""]:
        module, prefix = model.get_submodule(unit), f"{unit}." if unit else ""
        inner = [f"{other}." for other in STACK_UNITS] if not unit else []
        chosen = {
            name.removeprefix(prefix): policy(mode)
            for name, mode in modes.items()
            if name.startswith(prefix) and not any(name.startswith(other) for other in inner)
        }
        options = {"transport": "streams", "auto_wrap": False, **options}
        fsdp2x.fully_shard(module, offload_policy=chosen, **options)
    return model


def groups_of(model: nn.Module) -> list:
    return [group for state in model._get_fsdp_state().shared.tree for group in state.groups]


def modes_of(model: nn.Module) -> dict[str, str]:
    return {param.fqn: group.offload.mode for group in groups_of(model) for param in group.params}


SETTINGS = {"AdamW": {}, "int8": {"moments_dtype": "int8", "amsgrad": True}}


@distributed(world_sizes=(1, 2, 3, 4))
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mp", POLICIES)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.each_pair
def test_random_maps_compute_the_same_bits(ctx, seed, mp, name):
    only_fsdp2x(ctx)
    recorder = streams.install(pack_below_bytes=600)
    random, model, results = Random(seed), wide(), []
    modes = draw(random, model)
    options = {"mp_policy": POLICIES[mp], "reshard_after_forward": random.choice([True, False, 2 - ctx.world % 2])}
    for chosen in ({}, modes):
        recorder.clear()
        trained = sharded(ctx, model, chosen, **options)
        optimizer = OURS(trained.parameters(), lr=1e-2, **SETTINGS[name])
        train(trained, optimizer, ctx, range(3))
        states = {name: optimizer.state[param] for name, param in trained.named_parameters()}
        results.append((params(trained), full(states)))
        # Here the host's allocator may get what the recorded device's gave back.
        assert [race for race in streams.races(recorder.entries) if "give_back" not in race] == []
    same(results[1], results[0])
    assert modes_of(trained) == {name: modes.get(name, "none") for name, _ in model.named_parameters()}
    recorder.clear()
    loss_of(trained, ctx.rank, 3).backward()
    num_offloaded = sum(group.offloads for group in groups_of(trained))
    assert len(transfers(recorder.entries, "copy_out")) == num_offloaded, "one copy for each part of a unit"


@distributed(world_sizes=(1, 2, 4))
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_on_the_cpu_a_map_changes_nothing(ctx, seed, transport):
    """Not even the number of collectives."""
    only_fsdp2x(ctx)
    random, model = Random(seed), Stack()
    twin = shard_stock(copy.deepcopy(model), STACK_UNITS)
    model = sharded(ctx, model, draw(random, model), transport=transport)
    results = []
    for one in (twin, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for step in range(2):
            one(inputs(ctx.rank, step)).square().mean().backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append(params(one))
    same(results[1], results[0], **({} if ctx.world <= 2 else {"rtol": 1e-5, "atol": 1e-6}))
    assert len(groups_of(model)) == len(STACK_UNITS) + 1


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("seed", range(2))
def test_checkpoints_and_exports(ctx, seed):
    """Files of a model that spans both are those of any other, and load into any other."""
    only_fsdp2x(ctx)
    streams.install()
    random, plain = Random(seed), wide()
    maps = [draw(random, plain) for _ in range(2)]
    trained, resumed = (sharded(ctx, plain, modes) for modes in maps)
    optimizers = [OURS(model.parameters(), lr=1e-2) for model in (trained, resumed)]
    train(trained, optimizers[0], ctx, range(2))
    with shared_folder() as folder:
        fsdp2x.checkpoint.save(folder, trained, optimizers[0], step=2)
        fsdp2x.checkpoint.load(folder, resumed, optimizers[1])
    same(dict(fsdp2x.full_tensors(resumed)), dict(fsdp2x.full_tensors(trained)), "export")
    for model, optimizer in zip((trained, resumed), optimizers, strict=True):
        train(model, optimizer, ctx, range(2, 4))
    same(params(resumed), params(trained), "parameters after two more steps")
    fsdp2x.sleep(resumed, optimizers[1])
    fsdp2x.wake(resumed, optimizers[1])
    same(params(resumed), params(trained), "parameters after sleep")


@distributed(world_sizes=(1, 3))
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mp", POLICIES)
def test_plans(ctx, seed, mp):
    """The plan of a map, the report of the sharded model, and the bytes that its steps take are the same."""
    only_fsdp2x(ctx)
    streams.install(pack_below_bytes=3000)
    random, model = Random(seed), Stack(num=4, width=48, hidden=80)
    modes, options = draw(random, model), {"mp_policy": POLICIES[mp]}
    named = {name: policy(mode) for name, mode in modes.items()}
    plan = plan_memory(model, ctx.world, device="cuda", offload=named, auto_wrap=True, **options)
    trained = fsdp2x.fully_shard(model, auto_wrap=True, transport="streams", offload_policy=named, **options)
    optimizer = OURS(trained.parameters())
    for step in range(3):
        trained(inputs(ctx.rank, step, width=48)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = fsdp2x.memory_report(trained, optimizer)
    if report.rank == 0:
        assert plan.to_dict() == {**report.to_dict(), "measured": None}


@given(st.dictionaries(st.text("abc.", min_size=1), st.integers(0, 40)), st.integers(0, 200), st.integers(0, 200))
def test_budget(sizes, budget, more):
    """Never more than the budget, largest first, ties by name, and a larger budget only adds."""
    module = nn.Module()
    module.named_parameters = lambda: ((name, torch.empty(size, dtype=torch.uint8)) for name, size in sizes.items())
    chosen = list(fsdp2x.cpu_offload_by_budget(module, budget, pin_memory=False).items())
    names = [name for name, _ in chosen]
    assert all(type(one) is CPUOffloadPolicy and not one.pin_memory for _, one in chosen)
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    assert names == order[: len(names)] and sum(sizes[name] for name in names) <= budget
    if len(names) < len(order):
        assert sum(sizes[name] for name in order[: len(names) + 1]) > budget
    assert names == list(fsdp2x.cpu_offload_by_budget(module, budget + more))[: len(names)]


@distributed(world_sizes=(1,))
def test_mistakes(ctx):
    only_fsdp2x(ctx)
    streams.install()
    tied = Stack()
    tied.blocks[1].up.weight = tied.blocks[0].up.weight
    two = {"blocks.0.up.weight": policy("all"), "blocks.1.up.weight": OffloadPolicy()}
    inner = shard(ctx, Stack(), ["blocks.0"], transport="streams").blocks
    cases = [
        (Stack(), {"blocks.0.up.wieght": OFFLOAD}, {}, ValueError, "Did you mean 'blocks.0.up.weight'"),
        (nn.Sequential(*inner), {"0.up.weight": OFFLOAD}, {}, ValueError, "no parameter that this call shards"),
        ([nn.Linear(2, 2), nn.Linear(2, 2)], {"weight": OFFLOAD}, {}, ValueError, "2 modules of the list have"),
        (tied, two, {"auto_wrap": False}, ValueError, "two policies"),
        (Stack(), {"head.weight": "all"}, {}, TypeError, "must be OffloadPolicy, got 'all'"),
        (Stack(), {"head.weight": CPUOffloadPolicy()}, {}, RuntimeError, "pins memory for an accelerator"),
    ]
    for module, policies, options, kind, said in cases:
        with pytest.raises(kind, match=said):
            fsdp2x.fully_shard(module, offload_policy=policies, transport="streams", **options)
    ignored = Stack()
    with pytest.raises(ValueError, match="no parameter that this call shards"):
        fsdp2x.fully_shard(
            ignored, ignored_params={ignored.head.weight}, offload_policy={"head.weight": OFFLOAD}, transport="streams"
        )
    with pytest.raises(ValueError, match="budget_bytes must be non-negative, got -1"):
        fsdp2x.cpu_offload_by_budget(Stack(), -1)
