"""State dicts, all ways to load them, meta-device initialization, and moves of a sharded model."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import models
from harness import distributed
from models import STACK_UNITS, Stack, inputs, step
from reference import both_transports, full, params, parity, same, shard, shard_auto, shard_stock


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("assign", [False, True])
@both_transports
def test_state_dict_round_trip(ctx, assign, transport):
    """Values of another model are loaded after a step: the next forward must see them, and training go on from them."""

    def run(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = [step(ctx, model, optimizer)]
        wanted = Stack(seed=3).state_dict()
        sharded = {
            name: distribute_tensor(value, model.head.weight.device_mesh, model.head.weight.placements)
            for name, value in wanted.items()
        }
        assert list(model.state_dict()) == list(wanted)
        result = model.load_state_dict(sharded, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys
        same(full(model.state_dict()), wanted)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses += [step(ctx, model, optimizer, number) for number in range(3)]
        return losses, params(model)

    losses, _ = parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    reference = Stack(seed=3)
    same(losses[1], reference(inputs(ctx.rank)).square().mean().detach(), "first loss", rtol=1e-6, atol=1e-6)


@distributed(world_sizes=(2, 3))
def test_full_state_dict(ctx):
    """get_model_state_dict(full) and set_model_state_dict(broadcast) of torch, tied weights included."""
    model = models.build("qwen3")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    ours = shard_auto(ctx, model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(ours, options=options)
    assert list(state) == (list(expected) if ctx.rank == 0 else [])
    for name, value in state.items():
        same(value, expected[name], name)
    other = shard_auto(ctx, models.build("qwen3", seed=5))
    set_model_state_dict(other, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    same(params(other), params(ours))
    same(other(**models.batch("qwen3", 0)).loss.detach(), ours(**models.batch("qwen3", 0)).loss.detach(), "loss")


@distributed(world_sizes=(2,))
@both_transports
def test_optimizer_state_dict_round_trip(ctx, transport):
    """The state goes out whole and comes back into a fresh model and optimizer; training continues bit for bit."""

    def run(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            step(ctx, model, optimizer, number)
        whole = StateDictOptions(full_state_dict=True)
        saved = copy.deepcopy(get_model_state_dict(model, options=whole))
        saved_optimizer = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))
        wanted = [step(ctx, model, optimizer, number) for number in (2, 3)]
        set_model_state_dict(model, saved, options=whole)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        set_optimizer_state_dict(model, optimizer, saved_optimizer, options=whole)
        again = [step(ctx, model, optimizer, number) for number in (2, 3)]
        same(again, wanted, "after loading")
        return again

    parity(ctx, Stack(), run, STACK_UNITS, transport=transport)


@distributed(world_sizes=(2,))
@both_transports
def test_meta_device_initialisation(ctx, transport):
    """Shard on meta, to_empty, fill by load: the values and the training are those of the usual way."""

    def run_with(apply):
        with torch.device("meta"):
            model = Stack()
        model = apply(model)
        assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
        model.to_empty(device="cpu")
        state = Stack(seed=3).state_dict()
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return [step(ctx, model, optimizer, number) for number in range(2)], params(model)

    got = run_with(lambda m: shard(ctx, m, STACK_UNITS, transport=transport))
    same(got, run_with(lambda m: shard_stock(m, STACK_UNITS)))
