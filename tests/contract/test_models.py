"""Models whose classes are ABCs or containers, and what a sharded class must keep."""

import abc

import torch
from torch import nn

import fsdp2x
from harness import distributed
from models import inputs


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
