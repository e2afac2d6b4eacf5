"""What is trainable and came after `fully_shard` is named once, at the first forward; of the rest nothing is said."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, batch, build, inputs, tiny_lora
from reference import only_fsdp2x, shard, shard_auto


@contextlib.contextmanager
def warned():
    """The messages about late parameters of what runs inside."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(one.message) for one in caught if "added after fully_shard" in str(one.message)]
    assert all(one.category is UserWarning for one in caught if str(one.message) in found)


def first_forward(ctx, model):
    with warned() as found:
        model(inputs(ctx.rank)).sum().backward()
    return found


def a_head(model):
    model.extra = nn.Linear(2, 2)
    return "'extra.weight', 'extra.bias'. "


def one_of_a_unit_below(model):
    model.blocks[1].scale = nn.Parameter(torch.ones(3))
    return "'blocks.1.scale'. "


def a_bias_where_none_was(model):
    model.plain.bias = nn.Parameter(torch.ones(2))
    return "'plain.bias'. "


def many(model):
    model.extra = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(5)])
    return "'extra.0', 'extra.1', 'extra.2' and 2 more. "


def a_layer_in_place_of_another(model):
    model.head = nn.Linear(6, 3)
    return "'head.weight', 'head.bias'. "


def stack():
    model = Stack()
    model.plain = nn.Linear(2, 2, bias=False)
    model.blocks[2].up.weight = model.blocks[1].up.weight
    return model


UNITS = ("blocks.0", "blocks.1+blocks.2")


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("add", [a_head, one_of_a_unit_below, a_bias_where_none_was, many, a_layer_in_place_of_another])
def test_what_came_late_is_named_once(ctx, add):
    only_fsdp2x(ctx)
    model = shard(ctx, stack(), UNITS)
    names = add(model)
    said = first_forward(ctx, model)
    assert len(said) == (ctx.world > 1)
    for text in said:
        assert names in text and "trains its own copy" in text and "before fully_shard" in text
        assert "fsdp2x.add_lora" in text and "call fully_shard on their module" in text
    assert first_forward(ctx, model) == []


@distributed(world_sizes=(2,))
def test_copies_of_shards_are_ranks_too(ctx):
    only_fsdp2x(ctx)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = shard(ctx, stack(), UNITS, mesh=mesh)
    a_head(model)
    assert len(first_forward(ctx, model)) == 1


@distributed(world_sizes=(2,))
def test_a_filter_that_raises_leaves_a_root_that_runs(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, stack(), UNITS)
    a_head(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="added after fully_shard"):
            model(inputs(ctx.rank))
    assert first_forward(ctx, model) == []
    assert all(unit.param_state == "SHARDED" for unit in fsdp2x.describe(model).units)


# ---- silent


def nothing(model):
    pass


def frozen(model):
    model.extra = nn.Linear(2, 2).requires_grad_(False)


def sharded_as_well(model):
    model.extra = fsdp2x.fully_shard(nn.Linear(2, 2))


def replicated(model):
    model.extra = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    replicate(model.extra)


def tied_again(model):
    model.blocks[2].up.weight = model.blocks[1].up.weight


def tied_elsewhere(model):
    model.extra = nn.Linear(6, 3)
    model.extra.weight, model.extra.bias = model.head.weight, model.head.bias


def wrapped(model):
    model.blocks[0] = nn.Sequential(model.blocks[0])


def gathered_before(model):
    for module in (model, model.blocks[0]):
        module.unshard()


@distributed(world_sizes=(2,))
@pytest.mark.parametrize(
    "change", [nothing, frozen, sharded_as_well, replicated, tied_again, tied_elsewhere, wrapped, gathered_before]
)
def test_what_is_reduced_or_not_trained_is_silent(ctx, change):
    only_fsdp2x(ctx)
    model = shard(ctx, stack(), UNITS)
    change(model)
    assert first_forward(ctx, model) == []


@distributed(world_sizes=(2,))
def test_ignored_parameters_are_silent(ctx):
    """Those of a unit below, too, and when they are set anew; not those of other names beside them."""
    only_fsdp2x(ctx)
    model = stack()
    ignored = {model.head.weight, model.plain.weight, model.blocks[0].up.bias}
    shard(ctx, model, STACK_UNITS[:1], ignored_params=ignored)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.head.late = nn.Parameter(torch.ones(1))
    (said,) = first_forward(ctx, model)
    assert ": 'head.late'. " in said


MODELS = {"tied": lambda: build("qwen3"), "lora": tiny_lora, "experts": lambda: build("qwen3_moe")}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("kind", MODELS)
def test_models_as_they_come_are_silent(ctx, kind):
    only_fsdp2x(ctx)
    if kind == "lora":
        pytest.importorskip("peft")
    model = shard_auto(ctx, MODELS[kind]())
    model.tie_weights()
    with warned() as found:
        model(**batch("qwen3", ctx.rank)).loss.backward()
    assert found == []
