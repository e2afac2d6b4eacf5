"""The twelve ways in which frameworks reach past a pool of shards, one test each; numbers as in the names.

Every test ends with `assert_pooled`: each shard lies in its unit's pool or slot, at its place, and the pads are zero.
"""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, build, inputs, step
from reference import both_transports, full, grads, mean_of_ranks, params, parity, same, shard, shard_stock
from training import shared_folder

get_state = fsdp2x.fully_shard.state


def square_loss(model, rank, number):
    return model(inputs(rank, number)).square().mean()


def sharded_like(model, values):
    current = model.state_dict()
    return {
        name: distribute_tensor(value.clone(), current[name].device_mesh, current[name].placements)
        for name, value in values.items()
    }


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


@pytest.mark.parametrize("moment", ["before_forward", "after_step"])
@both_transports
@distributed(world_sizes=(2, 3))
def test_01_load_state_dict_assign(ctx, moment, transport):
    """The optimizer is made from the new Parameter objects. They must train, and must be in the flat buffer."""
    model = shard(ctx, Stack(), STACK_UNITS, transport=transport)
    if moment == "after_step":
        step(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
    loaded = sharded_like(model, Stack(seed=3).state_dict())
    before = list(model.parameters())
    model.load_state_dict(loaded, assign=True)
    assert not any(a is b for a, b in zip(before, model.parameters(), strict=True)), "assign makes new objects"
    kept = list(model.parameters())
    optimizer = torch.optim.AdamW(kept, lr=1e-2)
    twin = shard(ctx, Stack(seed=3), STACK_UNITS, transport=transport)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for number in range(3):
        same(step(ctx, model, optimizer, number), step(ctx, twin, twin_optimizer, number))
    assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
    same(params(model), params(twin))
    same(full(loaded), Stack(seed=3).state_dict(), "what was loaded from is not trained along")
    assert_pooled(model)


@both_transports
@distributed(world_sizes=(2,))
def test_02_moving_the_sharded_model(ctx, transport):
    """verl, ROLL, veomni: to_empty and load after sharding, .cpu() and .to(device) around a rollout."""

    def run(model):
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, Stack(seed=3).state_dict() if ctx.rank == 0 else {}, options=options)
        kept = list(model.parameters())
        optimizer = torch.optim.AdamW(kept, lr=1e-2)
        results = []
        for number in range(3):
            results.append(step(ctx, model, optimizer, number))
            model.cpu()
            model.to("cpu", non_blocking=True)
            assert all(a is b for a, b in zip(kept, model.parameters(), strict=True)), "the optimizer lost its objects"
        model.to_empty(device="cpu")
        set_model_state_dict(model, Stack(seed=4).state_dict() if ctx.rank == 0 else {}, options=options)
        return [*results, step(ctx, model), params(model)]

    model = Stack()
    twin = shard_stock(copy.deepcopy(model), STACK_UNITS)
    shard(ctx, model, STACK_UNITS, transport=transport)
    same(run(model), run(twin))
    assert_pooled(model)


@pytest.mark.parametrize("accumulate", [False, True])
@both_transports
@distributed(world_sizes=(2,))
def test_04_zero_grad_drops_pooled_gradients(ctx, accumulate, transport):
    """Gradients of three steps, held to the end: none may be written again through a pool that was given back."""
    model = Stack()

    def run(model):
        held = []
        for number in range(3):
            step(ctx, model, number=number)
            if accumulate:
                step(ctx, model, number=number + 10)
            held.append({name: param.grad for name, param in model.named_parameters()})
            model.zero_grad(set_to_none=number != 1)
            if number == 1:
                assert all(not full(grad).any() for grad in held[-1].values())
                model.zero_grad()
        del held[1]
        return [full(part) for part in held]

    parity(ctx, model, run, STACK_UNITS, transport=transport)
    assert_pooled(model)


def saved_bytes(value) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer().nbytes


@distributed(world_sizes=(2,))
def test_05_saving_does_not_drag_the_pool_along(ctx):
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
def test_06_safetensors_of_local_shards(ctx):
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
def test_07_empty_shards(ctx, options, transport):
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


@both_transports
@distributed(world_sizes=(3, 4))
def test_08_padding_is_never_seen(ctx, transport):
    """37 rows of vocabulary on 3 or 4 ranks: the pad of the last shard is in no norm, moment, or local tensor."""
    model = build("qwen3")
    rows = model.model.embed_tokens.weight.shape[0]
    assert rows % ctx.world
    fsdp2x.fully_shard(model, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5, eps=1.0)
    ids = torch.full((2, 7), rows - 1)  # the last row gets the largest gradient
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        for param in model.parameters():
            local = param.to_local()
            assert param.grad.to_local().shape == local.shape
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
        expected = torch.stack([full(param.grad).norm() for param in model.parameters()]).norm()
        got = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
        same(full(got), expected, rtol=1e-5, atol=1e-7)
        optimizer.step()
        optimizer.zero_grad()
    for param in model.parameters():
        assert optimizer.state[param]["exp_avg"].to_local().shape == param.to_local().shape
    covered = sum(param.to_local().shape[0] for param in [model.model.embed_tokens.weight])
    chunk = -(-rows // ctx.world)
    assert covered == max(0, min(chunk, rows - ctx.rank * chunk))
    assert_pooled(model)


class Adapted(nn.Module):
    """One unit has a frozen bf16 base, a table of frozen bytes, and trainable fp32 adapters, as in quantized LoRA."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(6, 7, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.codes = nn.Parameter(torch.randint(0, 255, (7, 5), dtype=torch.uint8), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([[True, False, True]] * 3), requires_grad=False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.out = nn.Linear(7, 6)

    def forward(self, x):
        scale = self.codes.float().mean(dim=1) / 255 * self.flags.float().mean()
        return self.out(self.base(x.bfloat16()).float() * scale + self.up(self.down(x)))


@both_transports
@distributed(world_sizes=(1, 2, 3, 4))
def test_09_mixed_dtypes_and_frozen_in_one_unit(ctx, transport):
    model, plain = Adapted(), Adapted()
    shard(ctx, model, transport=transport)
    assert len(fsdp2x.describe(model).units) == 1
    frozen = full({name: param for name, param in model.named_parameters() if not param.requires_grad})
    optimizers = [
        torch.optim.AdamW([param for param in m.parameters() if param.requires_grad], lr=1e-2) for m in (model, plain)
    ]
    for number in range(3):
        loss_of = partial(square_loss, number=number)
        losses = mean_of_ranks(plain, loss_of, ctx.world)
        loss = loss_of(model, ctx.rank)
        loss.backward()
        same(loss.detach(), losses[ctx.rank], rtol=1e-6, atol=1e-7)
        same(grads(model), grads(plain), rtol=1e-5, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(full({name: param for name, param in model.named_parameters() if name in frozen}), frozen)
    assert all(param.grad is None for name, param in model.named_parameters() if name in frozen)
    assert_pooled(model)


@both_transports
@distributed(world_sizes=(2,))
def test_10_assigned_data_and_merged_adapters(ctx, transport):
    """Forward uses values assigned through ``.data`` before the first forward, and values written in place later."""
    model, plain = Stack(), Stack()
    shard(ctx, model, STACK_UNITS, transport=transport)
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        sharded._local_tensor.data = sharded.to_local().detach() * 2  # leaves the pool
        whole.data.mul_(2)
    same(full(model(inputs(ctx.rank))), plain(inputs(ctx.rank)).detach())
    assert_pooled(model)
    model.reshard()
    with torch.no_grad():
        for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
            sharded.copy_(sharded * 0.5 + 0.01)  # a merge, computed on the shards
            sharded.data.add_(1e-3)
            sharded.to_local().data.mul_(1.5)
            whole.copy_((whole * 0.5 + 0.01 + 1e-3) * 1.5)
    same(full(model(inputs(ctx.rank))), plain(inputs(ctx.rank)).detach(), rtol=1e-6, atol=1e-7)
    assert_pooled(model)


@distributed(world_sizes=(2,))
def test_10_data_assigned_after_the_first_forward(ctx):
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


@both_transports
@distributed(world_sizes=(2, 3))
def test_11_full_tensor_of_every_parameter(ctx, transport):
    """Weights are synchronized one by one, at every moment of a step. The step is the same as without it."""

    def run(model, sync):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        shards = list(model.parameters())
        seen = []
        for number in range(2):
            loss = model(inputs(ctx.rank, number)).square().mean()
            if sync:
                seen.append([param.full_tensor() for param in shards])
            loss.backward()
            if sync:
                seen.append([param.grad.full_tensor() for param in shards])
            optimizer.step()
            if sync:
                seen.append([value.full_tensor() for value in model.state_dict().values()])
            optimizer.zero_grad()
        return loss.detach(), params(model), seen

    model, twin = (shard(ctx, Stack(), STACK_UNITS, transport=transport) for _ in range(2))
    *got, seen = run(model, True)
    *expected, _ = run(twin, False)
    same(got, expected)
    same([value.detach() for value in seen[-1]], list(got[1].values()))
    same([value.detach() for value in seen[0]], [param.detach() for param in Stack().parameters()])
    assert_pooled(model)


@pytest.mark.parametrize("reshard", [True, False])
@both_transports
@distributed(world_sizes=(2, 3))
def test_12_two_roots_and_a_root_run_twice(ctx, reshard, transport):
    """GRPO: policy and reference in turn, the policy twice before its backward, in every order of the backwards."""

    def loss_of(policy, rank, reference, number):
        first = policy(inputs(rank, number))
        with torch.no_grad():
            target = reference(inputs(rank, number))
        second = policy(inputs(rank, number + 5))
        return (first - target).square().mean() + second.square().mean()

    plain = Stack(seed=1), Stack(seed=2)
    options = {"transport": transport, "reshard_after_forward": reshard}
    pair = tuple(shard(ctx, copy.deepcopy(model), STACK_UNITS, **options) for model in plain)
    for number, (policy, reference) in enumerate([(0, 1), (1, 0)] * 2):
        of_plain = partial(loss_of, reference=plain[reference], number=number)
        expected = mean_of_ranks(plain[policy], of_plain, ctx.world)
        loss = loss_of(pair[policy], ctx.rank, pair[reference], number)
        other = pair[reference](inputs(ctx.rank)).sum()  # a second graph, whose backward comes first or never
        if number % 2:
            other.backward()
        loss.backward()
        same(loss.detach(), expected[ctx.rank], rtol=1e-5, atol=1e-6)
        same(grads(pair[policy]), grads(plain[policy]), rtol=1e-4, atol=1e-6)
        for model in pair:
            model.zero_grad()
    for model in pair:
        assert_pooled(model)
