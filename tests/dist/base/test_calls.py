"""Collective calls on several models: ranks that call in different orders all raise, and no row is mixed."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2x
from checkpoints import shared_folder
from harness import distributed
from models import Stack
from reference import params, same

TRANSPORTS = ("shm", "process_group")


class Side:
    """One model, and what belongs to it."""

    def __init__(self, folder, transport, seed):
        torch.manual_seed(seed)
        self.folder, self.held, self.version = folder, {}, 0
        self.model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5))
        self.expected = params(self.model)
        fsdp2x.fully_shard(self.model, transport=transport)
        target = fsdp2x.sync.InProcess(lambda items: self.held.update((n, t.clone()) for n, t in items))
        self.session = fsdp2x.sync.connect(self.model, target, names="model")

    def push(self):
        self.version += 1
        self.session.push(version=self.version)
        same(self.held, self.expected)

    def stream(self):
        found = {}
        for bucket in fsdp2x.export.stream(self.model, 64, names="model"):
            found.update((name, tensor.clone()) for name, tensor in bucket.items())
        same(found, self.expected)

    def save(self, name="saved", **options):
        fsdp2x.checkpoint.save(self.folder / name, self.model, step=1, overwrite=True, **options).wait()

    def load(self):
        fsdp2x.checkpoint.load(self.folder / "first", self.model)


CALLS = {
    "full_tensors": lambda side: same(dict(fsdp2x.full_tensors(side.model)), side.expected),
    "part": lambda side: list(fsdp2x.full_tensors(side.model[1])),
    "filter": lambda side: list(fsdp2x.full_tensors(side.model, params=lambda name, param: param.dim() > 1)),
    "stream": Side.stream,
    "push": Side.push,
    "connect": lambda side: fsdp2x.sync.connect(side.model, fsdp2x.sync.InProcess(lambda items: None), names="model"),
    "save": Side.save,
    "save_async": lambda side: side.save(async_save=True),
    "load": Side.load,
    "save_hf": lambda side: fsdp2x.save_hf(side.model, side.folder / "hf", force=True),
}


def refused(call, side):
    with pytest.raises(ValueError, match="different calls: rank 0 in .*, rank 1 in ") as raised:
        call(side)
    return str(raised.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(2, 3))
def test_calls_in_another_order(ctx, transport):
    with shared_folder() as folder:
        actor, critic = (Side(folder, transport, seed) for seed in (0, 1))
        first, second = (critic, actor) if ctx.rank == 1 else (actor, critic)
        actor.save("first")
        for name, call in CALLS.items():
            text = refused(call, first)
            assert text.count("Sequential (unit Sequential ") == 2 or name in ("part", "filter"), text
            refused(call, second)
        for one, other in itertools.pairwise(CALLS):
            refused(CALLS[other if ctx.rank == 1 else one], actor)
        for side, call in itertools.product((actor, critic), CALLS.values()):
            if not (side is critic and call is Side.load):
                call(side)  # as it should be, after all that was refused


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(2, 3))
def test_buckets_of_two_passes_in_another_order(ctx, transport):
    side = Side(None, transport, 0)
    one, other = (fsdp2x.export.stream(side.model, 64, names="model") for _ in range(2))
    next(one), next(other)
    with pytest.raises(ValueError, match="at another bucket"):
        next(other if ctx.rank == 1 else one)


def two_axes():
    """Parameters that are redistributed one by one."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fsdp2x.fully_shard(model, mesh=mesh["dp"])


@distributed(world_sizes=(4,))
def test_parameters_over_two_axes(ctx):
    actor, critic = two_axes(), two_axes()
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match="different calls: .*Sequential 0.*Sequential 1|different calls: .*Sequential 1.*Sequential 0",
        ):
            list(fsdp2x.full_tensors(critic if ctx.rank == 3 else actor))
        list(fsdp2x.full_tensors(actor))
    with pytest.raises(RuntimeError, match="changed between two buckets"):
        for bucket in fsdp2x.export.stream(actor, 64, names="model"):
            assert bucket.index == 0
            if ctx.rank == 3:
                actor[1].weight.to_local().detach().add_(1)


CHANGES = {
    "adamw": lambda model: fsdp2x.optim.AdamW(model.parameters(), lr=0.1).step(),
    "torch": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "load": lambda model: model.load_state_dict(model.state_dict()),
    "shard": lambda model: list(model.parameters())[-1].to_local().detach().mul_(2),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_between_two_buckets(ctx, transport, change):
    """If the weights change on all ranks or on one, all ranks raise. Operations that do not change them may run."""
    model = fsdp2x.fully_shard(Stack(), transport=transport)
    receive = ctx.rank != 1
    for ranks in (range(ctx.world), [0], []):
        last = 0
        expected = pytest.raises(RuntimeError, match="changed between two buckets") if ranks else None
        with expected or contextlib.nullcontext():
            for bucket in fsdp2x.export.stream(model, 100, names="model", receive=receive, transport=transport):
                if bucket.index == 0:
                    model(torch.ones(2, 6)).sum().backward()
                    CHANGES[change](model) if ctx.rank in ranks else None
                last = bucket.index
        if ranks and ctx.rank not in ranks:  # else the next pass raises: ranks must step alike
            CHANGES[change](model)
        assert last > 2 if not ranks else True
        model.zero_grad()
    list(fsdp2x.full_tensors(model))
