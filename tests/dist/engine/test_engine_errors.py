"""Bad input gets its sentence: what fully_shard and the first forward refuse, and in which words."""

import copy
import importlib
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp2x
import models
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import shard, shard_auto


class Final(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def __init_subclass__(cls):
        raise TypeError("not to be derived from")


def refused(function, *errors):
    """The error's text."""
    with pytest.raises(errors) as error:
        function()
    return str(error.value)


@distributed(world_sizes=(1,))
def test_a_refused_call_leaves_the_module_as_it_was(ctx):
    model = Stack()
    before = dict(model.named_parameters())
    model.scalar = nn.Parameter(torch.tensor(1.0))
    assert "scalar" in refused(lambda: fsdp2x.fully_shard(model), ValueError)
    del model.scalar
    assert "module once" in refused(lambda: fsdp2x.fully_shard([model.head, model.head]), AssertionError)
    model.tied = replicate(nn.Linear(4, 4))
    model.tied.weight = model.blocks[0].up.weight
    assert "'weight' of a DDPLinear" in refused(lambda: fsdp2x.fully_shard(model), RuntimeError)
    del model.tied
    model.final = Final()
    assert "not to be derived from" in refused(lambda: fsdp2x.fully_shard([model.final, model.head]), TypeError)
    del model.final
    assert type(model) is Stack and all(param is before[name] for name, param in model.named_parameters())
    assert all(fsdp2x.fully_shard.state(module) is None for module in model.modules())
    fsdp2x.fully_shard(model)
    assert type(model).__name__ == "FSDPStack"


@distributed(world_sizes=(1,))
def test_deepcopy(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    for module in (model, model.blocks[0]):
        said = refused(lambda module=module: copy.deepcopy(module), AssertionError)
        assert said.startswith("FSDP does not support deepcopy. Please use state dict for serialization.")
        assert "copy the model before fully_shard" in said and "fsdp2x.full_tensors(model)" in said


@distributed(world_sizes=(4,))
def test_mesh_of_the_wrong_shape(ctx):
    three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    assert "1D or 2D DeviceMesh but got" in refused(lambda: fsdp2x.fully_shard(Stack(), mesh=three), ValueError)
    two = init_device_mesh("cpu", (2, 2))
    assert "mesh_dim_names" in refused(lambda: fsdp2x.fully_shard(Stack(), mesh=two), AssertionError)


@distributed(world_sizes=(1,))
def test_unknown_transport_and_unsupported_arguments(ctx):
    fully_shard = fsdp2x.fully_shard
    message = refused(lambda: fully_shard(Stack(), transport="carrier pigeon"), ValueError)
    assert "carrier pigeon" in message and "shm" in message and "process_group" in message
    for value in (2, 0, -1):
        message = refused(lambda value=value: fully_shard(Stack(), reshard_after_forward=value), ValueError)
        assert "reshard_after_forward" in message and str(value) in message
    assert "reshard_after_forward" in refused(lambda: fully_shard(Stack(), reshard_after_forward="yes"), ValueError)


@distributed(world_sizes=(2,))
def test_uneven_shard_on_another_dim(ctx):
    message = refused(
        lambda: shard(ctx, Stack(hidden=7), shard_placement_fn=lambda p: Shard(p.ndim - 1)),
        NotImplementedError,
        ValueError,
    )
    assert "uneven" in message.lower() or "even" in message.lower()


@distributed(world_sizes=(2,))
def test_freed_weight_names_itself(ctx):
    """A reference to an unsharded weight kept beyond the unit's forward."""
    kept = []

    class Leaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            kept.append(self.linear.weight)
            return self.linear(x)

    model = shard(ctx, nn.Sequential(Leaks(), nn.Linear(6, 3)), ("0",))
    model(inputs(ctx.rank))
    assert "linear.weight" in refused(lambda: kept[0] + 1.0, RuntimeError)


@distributed(world_sizes=(1,))
def test_describe_and_methods_on_unsharded_modules(ctx):
    assert "fully_shard" in refused(lambda: fsdp2x.describe(Stack()), ValueError)
    report = str(fsdp2x.describe(shard_auto(ctx, models.build("qwen3"))))
    for text in ("model.layers.1", "lm_head", "<root>", "slot bytes", "total"):
        assert text in report


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("through", ["parameter", "module"])
def test_a_sharded_weight_used_outside_its_unit(ctx, through):
    """torch's error gets a note with the parameter, the unit, the rank and the ways out."""

    class Reaching(Stack):
        def forward(self, x):
            if through == "parameter":
                return torch.nn.functional.linear(x, self.blocks[1].up.weight)
            return self.blocks[1].up(x)

    model = shard(ctx, Reaching(), STACK_UNITS)
    with pytest.raises(RuntimeError, match="DTensor") as error:
        model(inputs(ctx.rank))
    (note,) = error.value.__notes__
    for part in ("'blocks.1.up.weight'", "unit 'blocks.1'", f"rank {ctx.rank}", "unshard()", "fully_shard(["):
        assert part in note, note
    assert model.blocks[0](inputs(ctx.rank)).shape == (4, 6)


@distributed(world_sizes=(1,))
def test_compiled_autograd_is_refused(ctx):
    """A traced backward would not see memory move; torch asks each node how to trace it, ours says what to do."""
    compiled_autograd = importlib.import_module("torch._dynamo.compiled_autograd")
    model = shard(ctx, Stack(), STACK_UNITS)
    loss = model(inputs(0).requires_grad_()).square().mean()
    with compiled_autograd._enable(lambda graph: graph):
        assert "does not support compiled autograd" in refused(loss.backward, RuntimeError)
    model.reset_iter_state()
    model(inputs(0)).square().mean().backward()


@distributed(world_sizes=(2,), fresh=True)
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_ctrl_c_ends_a_wait(ctx, moment):
    """Rank 0 waits for rank 1 in shared memory when its user loses patience."""
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm")
    model(inputs(ctx.rank)).square().mean().backward()
    loss = model(inputs(ctx.rank)).square().mean() if moment == "backward" else None
    if ctx.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            if moment == "forward":
                model(inputs(0))
            else:
                loss.backward()
        assert time.monotonic() - started < 1.8
    dist.barrier()  # the group must not close before: that would be another error
