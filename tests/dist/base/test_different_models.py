"""Ranks with different models get the same ValueError before any collective; what may differ is not refused."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2x
from fsdp2x import MixedPrecisionPolicy
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import grads, shard

TRANSPORTS = ("auto", "shm", "process_group")


def wider(model):
    model.blocks[1].up = nn.Linear(6, 8)
    model.blocks[1].down = nn.Linear(8, 6)


def narrower(model):
    model.head = nn.Linear(6, 2)


def shorter(model):
    del model.blocks[2]


def longer(model):
    model.blocks.append(copy.deepcopy(model.blocks[0]))


def without_bias(model):
    model.blocks[0].up.bias = None


def with_another(model):
    model.extra = nn.Parameter(torch.zeros(2))


def half(model):
    model.blocks[1].half()


def swapped(model):
    """The same shapes in another order."""
    norm = model.norm
    del model.norm
    model.norm = norm


def renamed(model):
    model.blocks[0].over = model.blocks[0].down
    del model.blocks[0].down
    model.blocks[0].down = nn.Identity()


# Change of one rank's model -> words in the error.
CHANGES = {
    wider: ("blocks.1", "up.weight", "(7, 6)", "(8, 6)"),
    narrower: ("head.weight", "(3, 6)", "(2, 6)"),
    shorter: ("blocks.2",),
    longer: ("blocks.3", "no more units"),
    without_bias: ("blocks.0", "up.bias"),
    with_another: ("extra",),
    half: ("blocks.1", "torch.float32", "torch.float16"),
    swapped: ("norm.weight", "head.weight"),
    renamed: ("over.weight", "down.weight"),
}
POLICIES = {
    "gathered": ({"param_dtype": torch.bfloat16}, ("gathered as torch.bfloat16",)),
    "reduced": ({"reduce_dtype": torch.bfloat16}, ("reduced as torch.bfloat16",)),
}


def sentence_of_all(ctx, error) -> str:
    sentences = [None] * ctx.world
    dist.all_gather_object(sentences, error)
    assert len(set(sentences)) == 1, sentences
    return sentences[0]


def units_of(model):
    return [f"blocks.{index}" for index in range(len(model.blocks))]


def refused(ctx, model, transport, act=None, **options) -> str:
    """Returns the error that all ranks raise, before they communicate any parameter."""
    return sentence_of_all(ctx, refusal(ctx, model, transport, act, **options))


def refusal(ctx, model, transport, act=None, **options) -> str:
    """Returns the error that this rank raises."""
    model = shard(ctx, model, units_of(model), transport=transport, **options)
    with pytest.raises(ValueError) as error:
        (act or (lambda m: m(inputs(ctx.rank))))(model)
    return str(error.value)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_parameters(ctx, transport):
    for victim in {ctx.world - 1, 1}:
        for change, named in CHANGES.items():
            model = Stack()
            if ctx.rank == victim:
                change(model)
            said = refused(ctx, model, transport)
            assert said.startswith("fully_shard: the ranks have different models: rank 0 has"), said
            assert f"rank {victim} " in said and "same modules, shapes and dtypes" in said, said
            assert all(word in said for word in named), (named, said)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_units_and_dtypes(ctx, transport):
    for arguments, named in POLICIES.values():
        policy = MixedPrecisionPolicy(**arguments) if ctx.rank == 1 else MixedPrecisionPolicy()
        said = refused(ctx, Stack(), transport, mp_policy=policy)
        assert "rank 1 " in said and all(word in said for word in named), said
    model = shard(ctx, Stack(), STACK_UNITS if ctx.rank == 0 else STACK_UNITS[:2], transport=transport)
    with pytest.raises(ValueError, match="the ranks have different models") as error:
        model(inputs(ctx.rank))
    assert "blocks.2" in sentence_of_all(ctx, str(error.value))


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_way_to_the_parameters_compares(ctx, transport):
    """A gather asked for by hand, whole tensors, an export: whatever comes first."""

    def unshard(model):
        model.unshard()

    def whole(model):
        with fsdp2x.unsharded(model):
            pass

    def export(model):
        list(fsdp2x.export.stream(model, names="model", transport=transport))

    for act in (unshard, whole, export):
        model = Stack()
        if ctx.rank == 1:
            narrower(model)
        said = refused(ctx, model, transport, act)
        assert "the ranks have different models" in said and "head.weight" in said, (act, said)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_a_refusal_the_ranks_go_on(ctx, transport):
    model = Stack()
    if ctx.rank == 1:
        wider(model)
    refused(ctx, model, transport)
    model = shard(ctx, Stack(), STACK_UNITS, transport=transport)
    model(inputs(ctx.rank)).sum().backward()
    assert grads(model)["head.bias"] is not None


def frozen(model, names):
    for name, param in model.named_parameters():
        if name.startswith(names):
            param.requires_grad_(False)
    return model


@distributed(world_sizes=(2,))
def test_one_rank_trains_other_parameters(ctx):
    """Over a process group their gradients differ in size: refused. Over shared memory flags say who has which."""
    for part, named in (("blocks.0.up", "up.weight"), ("blocks.2", "blocks.2")):  # a part of a unit, and a whole one
        said = refused(ctx, frozen(Stack(), (part,) if ctx.rank == 1 else ()), "process_group")
        assert "every rank must train the same parameters" in said and "frozen" in said and named in said, said
        model = shard(ctx, frozen(Stack(), (part,) if ctx.rank == 1 else ()), STACK_UNITS, transport="shm")
        model(inputs(ctx.rank)).sum().backward()
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group")
    with torch.no_grad() if ctx.rank == 1 else nullcontext():
        model(inputs(ctx.rank))  # a forward alone asks for nothing


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replicas_compare(ctx, transport):
    """Both ranks of a shard group have the same; the other replica has not. Ranks have their numbers in the job."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = ctx.rank >= 2
    model = Stack()
    if other:
        narrower(model)
    said = refusal(ctx, model, transport, mesh=mesh)
    first = ctx.rank % 2
    assert "(2, 6)" in said and f"rank {first} has" in said and f"rank {first + 2} " in said, said
    said = refusal(ctx, frozen(Stack(), ("head.bias",) if other else ()), transport, mesh=mesh)
    assert "frozen" in said and "head.bias" in said, said
