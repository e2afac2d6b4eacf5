"""Ways in which frameworks reach past a pool of shards: files of shards, empty shards, and assigned memory.

`assert_pooled`: each shard lies in its unit's pool or slot, at its place, and the pads are zero.
"""

import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs, step
from reference import both_transports, full, mean_of_ranks, params, same, shard
from training import shared_folder

get_state = fsdp2x.fully_shard.state


def square_loss(model, rank, number):
    return model(inputs(rank, number)).square().mean()


def assert_pooled(model):
    """Shards are in their unit's flat buffer, or in its gather buffer, without overlap. Their padding is zero."""
    groups = {id(group): group for state in map(get_state, model.modules()) if state for group in state.groups}
    assert groups
    for group in groups.values():
        outside = torch.ones(group.pool.numel(), dtype=torch.bool)
        for record in group.params:
            local = record.param.to_local()
            assert isinstance(record.param, nn.Parameter) and local.is_contiguous()
            if local.numel() == 0:
                continue
            start = local.untyped_storage().data_ptr() - group.pool.data_ptr()
            end = start + local.untyped_storage().nbytes()
            assert local.storage_offset() == 0 and 0 <= start < end <= group.pool.numel(), record.owners[0][1]
            assert bool(outside[start:end].all()), "two shards share bytes"
            outside[start:end] = False
        rests = group.engine is not None and group.engine.has_resting_shards  # next to other ranks' rows
        assert rests or not bool(group.pool[outside].any()), "a pad was written"


def saved_bytes(value) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer().nbytes


@distributed(world_sizes=(2,))
def test_saving_does_not_drag_the_pool_along(ctx):
    """One value, a whole state dict, a gradient: the file has the size of what was saved, and loads again."""
    model = shard(ctx, Stack(num=2, width=64, hidden=256), ("blocks.0", "blocks.1"))
    step_input = torch.ones(2, 64)
    model(step_input).sum().backward()
    pool_bytes = get_state(model.blocks[0]).groups[0].pool.numel()
    assert pool_bytes > 64 * 1024
    state = model.state_dict()
    small = state["blocks.0.up.bias"]
    overhead = 6 * 1024
    for value in (small, small.to_local(), nn.Parameter(small.to_local()), model.blocks[0].up.bias.grad):
        assert saved_bytes(value) < small.to_local().numel() * 4 + overhead < pool_bytes
    total = sum(value.to_local().numel() * 4 for value in state.values())
    assert saved_bytes(state) < total + overhead * len(state)
    with shared_folder(ctx) as folder:
        path = folder / f"rank_{ctx.rank}.pt"  # verl's per-rank files; accelerate with use_dcp=False
        torch.save(state, path)
        loaded = torch.load(path, weights_only=True)
        same(full(loaded), full(state))
        other = shard(ctx, Stack(num=2, width=64, hidden=256, seed=5), ("blocks.0", "blocks.1"))
        other.load_state_dict(loaded)
        same(params(other), params(model))
        assert_pooled(other)
    assert_pooled(model)


@distributed(world_sizes=(2, 4))
def test_safetensors_of_local_shards(ctx):
    """safetensors refuses tensors that share memory; accelerate drops equal-looking ones as tied."""
    from safetensors.torch import load_file, save_file, save_model

    model = shard(ctx, Stack(), STACK_UNITS)
    step(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
    local = {name: param.to_local() for name, param in model.named_parameters()}
    pointers = [value.untyped_storage().data_ptr() for value in local.values() if value.numel()]
    assert len(set(pointers)) == len(pointers), "each shard has a storage of its own"
    with shared_folder(ctx) as folder:
        path = folder / f"shard-{ctx.rank}.safetensors"
        save_file({name: value.detach() for name, value in local.items()}, path)
        same(dict(sorted(load_file(path).items())), {name: local[name].detach() for name in sorted(local)})
        holder = nn.Module()
        for name, value in local.items():
            holder.register_parameter(name.replace(".", "_"), nn.Parameter(value.detach()))
        save_model(holder, str(folder / f"model-{ctx.rank}.safetensors"))
        assert len(load_file(folder / f"model-{ctx.rank}.safetensors")) == len(local)
    assert_pooled(model)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@both_transports
@distributed(world_sizes=(4,))
def test_empty_shards(ctx, options, transport):
    """Three rows on four ranks: optimizers of every kind, clipping, state dicts and the collectives take them."""
    model, plain = Stack(), Stack()
    shard(ctx, model, STACK_UNITS, transport=transport)
    empty = [name for name, param in model.named_parameters() if param.to_local().numel() == 0]
    assert ("head.bias" in empty) == (ctx.rank == 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(3):
        loss_of = partial(square_loss, number=number)
        losses = mean_of_ranks(plain, loss_of, ctx.world)
        loss = loss_of(model, ctx.rank)
        loss.backward()
        same(loss.detach(), losses[ctx.rank], rtol=1e-5, atol=1e-6)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, plain)]
        same(full(norms[0]), norms[1], rtol=1e-5, atol=1e-7)
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
    same(params(model), {n: p.detach() for n, p in plain.named_parameters()}, rtol=1e-4, atol=1e-5)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    same(whole, params(model))
    assert_pooled(model)


@distributed(world_sizes=(2,))
def test_data_assigned_after_the_first_forward(ctx):
    """Every rank names the shard that one rank replaced."""
    model = shard(ctx, Stack(), STACK_UNITS)
    expected = full(model(inputs(ctx.rank)))
    same(full(model(inputs(ctx.rank))), expected)
    model.reshard()
    weight = model.blocks[1].up.weight
    whole = weight._local_tensor
    if ctx.rank == 1:
        weight._local_tensor = whole.clone()
    with pytest.raises(RuntimeError, match=r"blocks.1.up.weight.*on rank 1 has left its pool.*copy_"):
        fsdp2x.check_module_states(model)
    weight._local_tensor = whole
    fsdp2x.check_module_states(model)
    same(full(model(inputs(ctx.rank))), expected)
