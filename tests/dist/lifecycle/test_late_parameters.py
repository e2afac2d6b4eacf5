"""Parameters registered after `fully_shard`: adopted, ignored, or refused, and removed from the model again."""

import itertools
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2x
from fsdp2x.lifecycle.tree import unit_states
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import params, same, shard

UNITS = ("blocks.0", "blocks.1+blocks.2")


def a_head(model):
    model.extra = nn.Linear(2, 2)
    return {"extra.weight", "extra.bias"}


def a_list(model):
    model.extra = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(5)])
    return {f"extra.{i}" for i in range(5)}


def past_registration(model):
    model._modules["extra"] = nn.Linear(2, 2, bias=False)
    model.head._parameters["scale"] = nn.Parameter(torch.ones(1))
    return {"extra.weight", "head.scale"}


def nothing(model):
    return set()


def sharded_as_well(model):
    model.extra = fsdp2x.fully_shard(nn.Linear(2, 2))
    return set()


def replicated(model):
    model.extra = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    replicate(model.extra)
    return set()


def tied_again(model):
    model.blocks[2].up.weight = model.blocks[1].up.weight
    return set()


def wrapped(model):
    model.blocks[0] = nn.Sequential(model.blocks[0])
    return set()


def gathered_before(model):
    for module in (model, model.blocks[0]):
        module.unshard()
    return a_head(model)


def stack():
    model = Stack()
    model.plain = nn.Linear(2, 2, bias=False)
    model.blocks[2].up.weight = model.blocks[1].up.weight
    return model


def run(ctx, model):
    model(inputs(ctx.rank)).sum().backward()
    model.zero_grad()


def adopted(model):
    groups = [group for state in unit_states(model) for group in state.groups if group.is_replicated]
    return {record.fqn for group in groups for record in group.params}


CHANGES = [a_head, a_list, past_registration, nothing]
ONLY_BEFORE = [sharded_as_well, replicated, tied_again, wrapped, gathered_before]


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize(
    ("change", "between"), [*itertools.product(CHANGES, (False, True)), *((change, False) for change in ONLY_BEFORE)]
)
@pytest.mark.each_pair
def test_what_is_adopted(ctx, change, between):
    """At the first forward, or between steps."""
    model = shard(ctx, stack(), UNITS)
    if between:
        run(ctx, model)
    names = change(model)
    run(ctx, model)
    assert adopted(model) == names
    run(ctx, model)


@distributed(world_sizes=(2,))
def test_ignored_parameters_are_left_alone(ctx):
    """This includes a nested unit's parameters and ones that are set again, but not other names next to them."""
    model = stack()
    model.empty = nn.Sequential()  # is false
    model.empty.weight = nn.Parameter(torch.ones(1))
    ignored = {model.head.weight, model.plain.weight, model.blocks[0].up.bias, model.empty.weight}
    shard(ctx, model, STACK_UNITS[:1], ignored_params=ignored)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.head.late = nn.Parameter(torch.ones(1))
    run(ctx, model)
    assert adopted(model) == {"head.late"}


@distributed(world_sizes=(2,))
def test_what_leaves_the_model_is_forgotten(ctx):
    """After a removal, replacement, or move, other parameters keep their values and removed modules are freed."""
    model = shard(ctx, stack(), UNITS)
    model.extra = nn.ParameterDict({"a": torch.randn(2), "b": torch.randn(3)})
    model.more = nn.Linear(2, 2)
    run(ctx, model)
    kept, values = model.extra["b"], model.extra["b"].detach().clone()
    del model.extra["a"]
    gone = weakref.ref(model.more)
    model.more = nn.Linear(3, 3)
    run(ctx, model)
    assert adopted(model) == {"extra.b", "more.weight", "more.bias"} and gone() is None
    assert model.extra["b"] is kept and "a" not in model.extra
    same(params(model)["extra.b"], values)
    model.extra["a"] = torch.randn(4)
    del model.more
    run(ctx, model)
    assert adopted(model) == {"extra.a", "extra.b"}


# ---- refused


def a_scalar(model):
    model.extra = nn.Linear(2, 2)
    model.extra.weight = nn.Parameter(torch.tensor(1.0))
    return ValueError, "parameter 'weight' of Linear was added after fully_shard and is a scalar"


def a_dtensor(model):
    model.extra = nn.Linear(6, 3)
    model.extra.weight = nn.Parameter(model.head.weight.detach().clone())
    return NotImplementedError, "parameter 'weight' of Linear was added after fully_shard and is a DTensor"


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("change", [a_scalar, a_dtensor])
@pytest.mark.parametrize("between", [False, True])
def test_what_cannot_be_adopted_is_named(ctx, change, between):
    model = shard(ctx, stack(), UNITS)
    if between:
        run(ctx, model)
    error, message = change(model)
    for _ in range(2):
        with pytest.raises(error, match=message):
            run(ctx, model)
    del model.extra
    run(ctx, model)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", ["shm", "process_group"])
@pytest.mark.parametrize("between", [False, True])
def test_ranks_that_add_different_parameters_are_told(ctx, between, transport):
    model = shard(ctx, stack(), UNITS, transport=transport)
    if between:
        run(ctx, model)
    model.extra = nn.Linear(2, 2 + ctx.rank)
    with pytest.raises(ValueError, match="different models.*extra.weight"):
        run(ctx, model)
    model.extra = nn.Linear(2, 2)
    run(ctx, model)
    assert adopted(model) == {"extra.weight", "extra.bias"}


@distributed(world_sizes=(2,))
def test_not_between_micro_batches(ctx):
    model = shard(ctx, stack(), UNITS)
    with fsdp2x.accumulate(model, last=False):
        model(inputs(ctx.rank)).sum().backward()
    a_head(model)
    with pytest.raises(RuntimeError, match="between two micro-batches"):
        model(inputs(ctx.rank))
    model.reset_iter_state()
    run(ctx, model)
    assert not isinstance(model.extra.weight, DTensor)


@distributed(world_sizes=(2,), fresh=True)
def test_one_rank_alone_that_adds_something_ends_in_errors(ctx):
    group = dist.new_group(timeout=timedelta(seconds=3))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = shard(ctx, stack(), UNITS, transport="process_group", mesh=mesh)
    run(ctx, model)
    if ctx.rank == 0:
        a_head(model)
    with pytest.raises(
        RuntimeError,
        match="rank 0 is in .*rank 1 gathers|rank 1 gathers.*rank 0 is in",
    ):
        run(ctx, model)


class MakesItsScale(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(4))
        return super().forward(x) * self.scale


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("unit", ["", "0"])
@pytest.mark.parametrize("first_without_grad", [False, True])
def test_a_parameter_made_in_a_forward(ctx, unit, first_without_grad):
    """Its first gradient would be that of one rank. After a forward without gradients, it trains."""
    torch.manual_seed(0)
    model, reference = (nn.Sequential(MakesItsScale(4, 4), nn.Linear(4, 4)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    for module in [model.get_submodule(unit), model] if unit else [model]:
        fsdp2x.fully_shard(module)
    if first_without_grad:
        with torch.no_grad():
            model(torch.ones(2, 4))
    else:
        with pytest.raises(RuntimeError, match="registered the parameter 'scale' in a forward"):
            model(torch.ones(2, 4))
    batches = [torch.full((2, 4), 1.0 + rank) for rank in range(ctx.world)]
    model(batches[ctx.rank]).square().mean().backward()
    for batch in batches:
        (reference(batch).square().mean() / ctx.world).backward()
    same(model[0].scale.grad, reference[0].scale.grad, "gradient", rtol=1e-6, atol=1e-6)
