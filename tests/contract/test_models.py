"""Models whose classes are ABCs or containers, and what a sharded class must keep."""

import abc
import copy
import pickle

import pytest
import torch
from torch import nn

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import full, params, same, shard


class Policy(nn.Module, abc.ABC):
    """As TRL's and verl's value-head models are: the metaclass is ABCMeta."""

    @abc.abstractmethod
    def head(self, x): ...

    def forward(self, x):
        return self.head(self.body(x))


class ValuePolicy(Policy):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.value = nn.Linear(6, 7), nn.Linear(7, 3)

    def head(self, x):
        return self.value(x)


@distributed(world_sizes=(2,))
def test_verls_patch_for_abc_models(ctx):
    """verl and ROLL put an ABC in the place of upstream's FSDPModule for the length of the call."""
    import torch.distributed.fsdp._fully_shard._fully_shard as fully_shard_module

    original = fully_shard_module.FSDPModule

    class FSDPModuleABC(abc.ABC, original):
        pass

    model = ValuePolicy()
    with fsdp2x.install():
        fully_shard_module.FSDPModule = FSDPModuleABC
        try:
            fully_shard_module.fully_shard(model)
        finally:
            fully_shard_module.FSDPModule = original
    assert isinstance(model, fsdp2x.FSDPModule) and isinstance(model, original)
    model(inputs(ctx.rank)).sum().backward()


@distributed(world_sizes=(2, 3))
def test_classes_of_sharded_modules(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)
    part = model.blocks[1:]
    assert type(part) is nn.ModuleList and list(part) == list(model.blocks)[1:]
    # A ModuleList whose class has a forward can be a unit itself; slices of it are of the original class.
    blocks = Chain([nn.Linear(6, 6), nn.Linear(6, 6)])
    shard(ctx, blocks)
    assert isinstance(blocks, fsdp2x.FSDPModule) and type(blocks[:1]) is Chain
    assert len(blocks(inputs(ctx.rank))) == 4
    state = pickle.loads(pickle.dumps(full(dict(model.state_dict()))))
    same(state, params(model))


class Chain(nn.ModuleList):
    def forward(self, x):
        for module in self:
            x = module(x)
        return x
