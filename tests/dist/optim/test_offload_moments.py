"""HostOffloadPolicy("optimizer"): moments in host memory come to the device for their part of a step."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.testing._internal.two_tensor import TwoTensor

import fsdp2x
import streams
from fsdp2x.sharding import transport
from harness import distributed
from models import STACK_UNITS, inputs
from offloading import OPTIMIZERS, OURS, loss_of, moments, num_of, policy, sharded, train, transfers
from reference import params, same, shard
from streams import WIDTH, wide


@distributed(world_sizes=(1, 2))
def test_one_copy_of_the_moments_each_way(ctx):
    recorder = streams.install()
    model = sharded(ctx, wide(), "optimizer")
    optimizer = OURS(model.parameters(), lr=1e-2)
    train(model, optimizer, ctx, range(2), None)
    recorder.clear()
    train(model, optimizer, ctx, range(2, 4), None)
    entries = recorder.entries
    assert num_of(entries, "transfer", "copy_in") == num_of(entries, "transfer", "copy_out") == 2 * 4
    blocks = {entry[3][0] for entry in transfers(entries)}
    assert blocks == {entry[4][0] for entry in transfers(entries, "copy_out")} and len(blocks) == 4
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            local = state[name].to_local()
            assert any(a <= local.data_ptr() < a + size for a, size in blocks) or not local.numel()
    order = [entry[:2] for entry in entries if entry[0] in ("transfer", "step")]
    assert order[:4] == [
        ("transfer", "copy_in"),
        ("step", "compute"),
        ("transfer", "copy_out"),
        ("transfer", "copy_in"),
    ]
    assert streams.races(entries) == []
    for lane, event in (("compute", "arrived"), ("copy_out", "stepped"), ("copy_in", "left"), ("host", "left")):
        broken = streams.without_waits(entries, lane, f"moments {event}")
        assert len(broken) < len(entries)
        assert streams.races(broken), f"{lane} without {event}"


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mode", ["optimizer", "gradients", "all"])
def test_steps_that_clip(ctx, mode):
    """max_grad_norm, wherever gradients and moments are, has the bits of clipping first."""
    streams.install()
    model = wide()
    plain, offloaded = (sharded(ctx, model, one) for one in ("none", mode))
    train(plain, OURS(plain.parameters(), lr=1e-2), ctx, range(3), max_norm=0.1)
    optimizer = OURS(offloaded.parameters(), lr=1e-2, max_grad_norm=0.1)
    train(offloaded, optimizer, ctx, range(3), max_norm=None)
    assert optimizer.grad_norm > 0.1
    same(params(offloaded), params(plain), "parameters")


@distributed(world_sizes=(2,))
def test_state_goes_in_and_out(ctx):
    """torch's state dict, DCP's, and a cleared state; the moments end where they belong."""
    streams.install()
    model = wide()
    plain, offloaded, third = (sharded(ctx, model, mode) for mode in ("none", "optimizer", "optimizer"))
    optimizers = [OURS(one.parameters(), lr=1e-2) for one in (plain, offloaded, third)]
    train(plain, optimizers[0], ctx, range(3))
    for one in (offloaded, third):
        one.load_state_dict(plain.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))  # torch takes tensors as they are
    same(moments(optimizers[1]), moments(optimizers[0]), "loaded moments")
    options = StateDictOptions(full_state_dict=True)
    whole = copy.deepcopy(get_optimizer_state_dict(offloaded, optimizers[1], options=options))
    set_optimizer_state_dict(third, optimizers[2], whole, options=options)
    for one, optimizer in zip((plain, offloaded, third), optimizers, strict=True):
        train(one, optimizer, ctx, range(3, 5))
    for other in (1, 2):
        same(moments(optimizers[other]), moments(optimizers[0]), f"moments {other}")
        same(params((plain, offloaded, third)[other]), params(plain), f"parameters {other}")
    for optimizer in optimizers:
        optimizer.state.clear()
    for one, optimizer in zip((plain, offloaded), optimizers, strict=False):
        train(one, optimizer, ctx, range(5, 6))
    same(params(offloaded), params(plain), "parameters after the state was cleared")


@distributed(world_sizes=(2,))
def test_some_parameters_without_gradient_and_some_frozen(ctx):
    recorder = streams.install()
    model = wide()
    results = []
    for mode in ("none", "optimizer"):
        recorder.clear()
        trained = sharded(ctx, model, mode)
        optimizer = OURS(trained.parameters(), lr=1e-2)
        train(trained, optimizer, ctx, range(1))
        trained.blocks[0].requires_grad_(False)
        train(trained, optimizer, ctx, range(1, 3))
        trained.blocks[0].requires_grad_(True)
        loss_of(trained, ctx.rank, 3).backward()
        for param in trained.blocks[1].parameters():
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        train(trained, optimizer, ctx, range(4, 5))
        results.append((params(trained), moments(optimizer)))
    same(results[1], results[0], "parameters and moments")


@distributed(world_sizes=(2,))
def test_optimizers_that_would_keep_their_state_on_the_device(ctx):
    streams.install()
    model = sharded(ctx, wide(), "optimizer")
    before = params(model)
    for make in OPTIMIZERS.values():
        optimizer = make(model.parameters(), lr=0.1)
        loss_of(model, ctx.rank, 0).backward()
        with pytest.raises(RuntimeError, match="Use fsdp2x.optim.AdamW"):
            optimizer.step()
        assert not optimizer.state
        model.zero_grad()
    same(params(model), before, "parameters")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), ctx, range(1))  # keeps nothing
    assert not torch.equal(params(model)["head.weight"], before["head.weight"])
    # Models that did not ask are none of its business.
    other = sharded(ctx, wide(), "none")
    train(other, torch.optim.AdamW(other.parameters(), lr=0.1), ctx, range(1))


@distributed(world_sizes=(2,))
def test_an_optimizer_from_before_sharding_and_new_parameters(ctx):
    """The moments of an unsharded model, then parameters that are replaced: both end in blocks of the host."""
    recorder = streams.install()
    results = []
    for mode in ("none", "optimizer"):
        recorder.clear()
        model = wide()
        optimizer = OURS(model.parameters(), lr=1e-2)
        model(inputs(0, width=WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model = shard(ctx, model, STACK_UNITS, transport="streams", offload_policy=policy(mode))
        assert fsdp2x.rebind_optimizer(optimizer, model) == len(list(model.parameters()))
        train(model, optimizer, ctx, range(2))
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = OURS(model.parameters(), lr=1e-2)
        optimizer.load_state_dict(saved)
        train(model, optimizer, ctx, range(2, 4))
        results.append((params(model), moments(optimizer)))
    same(results[1], results[0], "parameters and moments")


@distributed(world_sizes=(1, 2))
def test_the_device_holds_the_moments_of_two_units(ctx):
    """The two largest, in a step; parameters whose device has no streams any more are stepped where they are."""
    recorder = streams.install()
    model = sharded(ctx, wide(), "optimizer")
    optimizer = OURS(model.parameters(), lr=1e-2)
    train(model, optimizer, ctx, range(1), None)
    recorder.clear()
    train(model, optimizer, ctx, range(1, 2), None)
    buffers = {entry[4][0][0]: 0 for entry in transfers(recorder.entries)}
    sizes = sorted(entry[4][0][1] for entry in transfers(recorder.entries))
    assert len(buffers) == 2 and optimizer.host_step_bytes == sum(sizes[-2:])
    expected = sharded(ctx, wide(), "none")
    twin = OURS(expected.parameters(), lr=1e-2)
    expected.load_state_dict(params_of(model))
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (model, expected):
        loss_of(one, ctx.rank, 2).backward()
    twin.step()
    with mock.patch.object(transport, "layer_maker", lambda device: None):
        recorder.clear()
        optimizer.step()
    assert transfers(recorder.entries) == []
    same(params(model), params(expected), "parameters")


def params_of(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


@distributed(world_sizes=(2,))
def test_tensor_subclasses_keep_their_state_where_they_are(ctx):
    streams.install()
    model = wide()
    weight = model.blocks[0].up.weight.detach()
    model.blocks[0].up.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    gathers = {"fsdp_pre_all_gather": None, "fsdp_post_all_gather": None}
    with mock.patch.multiple(TwoTensor, create=True, **gathers):
        model = sharded(ctx, model, "optimizer")
        with pytest.raises(NotImplementedError, match="weight' is a tensor subclass"):
            loss_of(model, ctx.rank, 0)
