"""Wire formats on the transport of an accelerator, played on the CPU: what is its own, and what it meets."""

import copy

import pytest
import torch
from torch import nn

import fsdp2x
import streams
from harness import distributed
from reference import grads, mesh_of, params, same, shard
from user_collectives import UserGather
from wire import UNITS, gathered, loss_of, reference, root_stats, sharded


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_a_device_encodes_for_each_gather(ctx):
    model = sharded(ctx, reference(), "streams")
    model.set_wire_dtype(weights="int8")
    loss_of(model, ctx.rank).backward()
    stats = root_stats(model)
    assert stats["gathers"] == stats["wire_encodings"] == 5
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
    model.blocks[0].unshard()
    weight = model.blocks[0].up.weight.detach().clone()
    model.blocks[0].reshard()
    same(weight, gathered(params(model)["blocks.0.up.weight"], "int8", ctx.world))


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_devices_without_our_kernels_refuse(ctx):
    """Torch's operations stand in for kernels that are not there, but not for these."""
    streams.install(with_kernels=False)
    model = sharded(ctx, reference(), "streams")
    model.set_wire_dtype(weights="int8")
    with pytest.raises(RuntimeError, match="need fsdp2x's kernels"):
        loss_of(model, ctx.rank)


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("case", ["settings", "bytes", "custom gather", "accumulation", "offload"])
def test_streams_meet_other_settings(ctx, case):
    """Formats that change, a collective of the user's, hooks, gradients of several backwards, shards on the host."""
    offload = fsdp2x.HostOffloadPolicy("all", pin_memory=False) if case == "offload" else fsdp2x.OffloadPolicy()
    whole = reference()
    twin = sharded(ctx, whole, "process_group")
    model = sharded(ctx, whole, "streams", offload_policy=offload)
    for one in (twin, model):
        one.set_wire_dtype(weights="fp8" if case == "settings" else "int8", gradients="int8")
        if case == "custom gather":
            one.blocks[0].set_custom_all_gather(UserGather())
        if case == "bytes":
            one.set_all_reduce_hook(lambda rows: rows.mul_(2.0))
    for step in range(3):
        if case == "settings" and step == 1:
            for one in (twin, model):
                one.set_wire_dtype(weights="int8", gradients="bfloat16")
        for one in (twin, model):
            if case == "accumulation":
                one.set_requires_gradient_sync(False)
                loss_of(one, ctx.rank, 9 + step).backward()
                one.set_requires_gradient_sync(True)
            loss_of(one, ctx.rank, step).backward()
        same(grads(model), grads(twin), f"step {step}")
        for one in (twin, model):
            with torch.no_grad():
                for param in one.parameters():
                    param.add_(param.grad, alpha=-0.1)
            one.zero_grad()


class Many(torch.nn.Module):
    """More parameters than a launch of the kernels can name, of which some take no part."""

    def __init__(self, num: int = 330, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(width, width)) for _ in range(num))

    def forward(self, x):
        for weight in self.weights[2::3]:
            x = torch.tanh(x @ weight)
        return x


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_more_parameters_than_a_launch_names(ctx):
    found = {}
    for transport in ("process_group", "streams"):
        model = shard(ctx, Many(), transport=transport)
        model.set_wire_dtype(weights="int8", gradients="int8")
        found[transport] = []
        for step in range(2):
            model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step + 7 * ctx.rank))).sum().backward()
            found[transport].append(grads(model))
    same(found["streams"], found["process_group"])
    assert sum(grad is None for grad in found["streams"][0].values()) == 220


@distributed(world_sizes=(4,), only_fsdp2x=True)
@pytest.mark.parametrize("transport", ["process_group", "streams"])
def test_a_backward_that_is_refused_leaves_nothing_behind(ctx, transport):
    """Send and receive buffers belong to a pending reduction, which returns them once."""
    options = {"mesh": mesh_of("2d", ctx.world), "transport": transport}
    model, untouched = (shard(ctx, copy.deepcopy(reference()), UNITS, **options) for _ in range(2))
    for one in (model, untouched):
        one.set_wire_dtype(gradients="int8")
    weight = model.blocks[0].up.weight
    model.set_requires_all_reduce(False)
    loss_of(model, ctx.rank).backward()
    weight.requires_grad_(False)
    model.set_requires_all_reduce(True)
    with pytest.raises(RuntimeError, match="frozen or unfrozen while"):
        loss_of(model, ctx.rank).backward()
    weight.requires_grad_(True)
    model.reset_iter_state()
    model.zero_grad()
    for one in (model, untouched):
        loss_of(one, ctx.rank).backward()
    same(grads(model), grads(untouched))
    assert root_stats(model)["scratch_slots_owned"] == 0


class Vectors(nn.Module):
    """A unit without anything to encode, next to one that has something."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Module()
        self.scale.forward = lambda x: x * self.scale.weight
        self.scale.weight = nn.Parameter(torch.randn(4096))
        self.head = nn.Linear(4096, 8)

    def forward(self, x):
        return self.head(self.scale(x))


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("transport", ["process_group", "streams"])
def test_units_with_nothing_to_code(ctx, transport):
    model = shard(ctx, Vectors(), ["scale"], transport=transport)
    model.set_wire_dtype(weights="int8", gradients="int8")
    planned = fsdp2x.memory_report(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(2, 4096)).square().mean().backward()
    measured = fsdp2x.memory_report(model).measured
    assert {name: getattr(planned, name) for name in measured} == measured
