"""Averages of weights over shards: those of torch's AveragedModel on the unsharded model."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp2x
import models
from checkpoints import shared_folder
from fsdp2x.optim import EMA
from harness import distributed
from models import STACK_UNITS, Stack, inputs, train
from reference import changes, full, params, same, shard

DECAY = 0.75
OPTIMIZERS = {
    "adamw": lambda model: fsdp2x.optim.AdamW(model.parameters(), lr=1e-2),
    "torch's": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "local": lambda model: fsdp2x.local_optimizer(torch.optim.NAdam(model.parameters(), lr=1e-2)),
}


def loss_of(model, rank, step=0):
    return model(inputs(rank, step)).square().mean()


@distributed(world_sizes=(1, 2, 3), only_fsdp2x=True)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averages_are_torchs(ctx, name):
    """Averages and the losses computed with them agree after each step. The model's own values return bit for bit."""
    reference = Stack()
    model = shard(ctx, copy.deepcopy(reference), STACK_UNITS)
    optimizer = OPTIMIZERS[name](model)
    ema = EMA(optimizer, decay=DECAY)
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses = []
    for number in range(4):
        models.step(ctx, model, optimizer, number)
        reference.load_state_dict(params(model))
        averaged.update_parameters(reference)
        before = params(model)
        with ema.swapped(model):
            same(params(model), params(averaged.module), f"step {number}")
            with torch.no_grad():
                losses.append(loss_of(model, ctx.rank))
                same(losses[-1], loss_of(averaged.module, ctx.rank), f"loss {number}")
        same(params(model), before)
        same(loss_of(model, ctx.rank).detach(), loss_of(reference, ctx.rank).detach(), f"loss {number}, own weights")
        model.zero_grad()
    assert changes(losses)


def averages(optimizer) -> list[torch.Tensor]:
    return full([optimizer.state[param]["ema"] for group in optimizer.param_groups for param in group["params"]])


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_sleep_and_exceptions(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    optimizer = fsdp2x.optim.Muon(fsdp2x.optim.muon_param_groups(model, exclude=["head.*"]), lr=1e-2)
    slow = EMA(optimizer, 0.9)
    train(ctx, model, optimizer)
    expected = averages(optimizer)
    fsdp2x.sleep(model, optimizer)
    fsdp2x.wake(model, optimizer)
    same(averages(optimizer), expected)
    own = params(model)
    with slow.swapped(model), pytest.raises(RuntimeError, match=r"inside of EMA\.swapped"):
        optimizer.step()
    same(params(model), own)
    with pytest.raises(ZeroDivisionError), slow.swapped(model):
        raise ZeroDivisionError
    same(params(model), own)
    with slow.swapped(model), pytest.raises(RuntimeError, match="already swapped in"), slow.swapped(model):
        pass
    train(ctx, model, optimizer, range(1))


REFUSED = {
    "checkpoint.save": lambda m, o, folder: fsdp2x.checkpoint.save(folder / "c", m, o, step=2, overwrite=True),
    "save of the model": lambda m, o, folder: fsdp2x.checkpoint.save(folder / "c", m, step=2, async_save=True),
    "checkpoint.load": lambda m, o, folder: fsdp2x.checkpoint.load(folder / "c", m, o),
    "load of the model": lambda m, o, folder: fsdp2x.checkpoint.load(folder / "c", m),
    "load_hf": lambda m, o, folder: fsdp2x.load_hf(m, folder / "hf"),
    "load_state_dict": lambda m, o, folder: m.load_state_dict(m.state_dict()),
    "sleep": lambda m, o, folder: fsdp2x.sleep(m, o),
    "sleep of the model": lambda m, o, folder: fsdp2x.sleep(m),
    "rebind_optimizer": lambda m, o, folder: fsdp2x.rebind_optimizer(o, m),
    "to": lambda m, o, folder: m.to(torch.float64),
    "step": lambda m, o, folder: o.step(),
    "step of another": lambda m, o, folder: torch.optim.SGD(m.parameters(), lr=1.0).step(),
    "optimizer.state_dict": lambda m, o, folder: o.state_dict(),
    "get_optimizer_state_dict": lambda m, o, folder: get_optimizer_state_dict(m, o),
    "optimizer.load_state_dict": lambda m, o, folder: o.load_state_dict({"state": {}, "param_groups": []}),
}
READ = {
    "full_tensors": lambda m, folder: dict(fsdp2x.full_tensors(m)),
    "state_dict": lambda m, folder: {name: full(value) for name, value in m.state_dict().items()},
    "save_hf": lambda m, folder: load_file(fsdp2x.save_hf(m, folder / "averages") / "model.safetensors"),
}


@distributed(world_sizes=(2, 3), only_fsdp2x=True)
def test_what_reads_the_averages_and_what_is_refused(ctx):
    """Each call that would keep, move or change the exchanged values; what it is afterwards is as if never called."""
    model = shard(ctx, Stack(), STACK_UNITS)
    optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-2)
    ema = EMA(optimizer, DECAY)
    train(ctx, model, optimizer)
    own = params(model)
    with shared_folder() as folder:
        fsdp2x.checkpoint.save(folder / "c", model, optimizer, step=1)
        fsdp2x.save_hf(model, folder / "hf")
        with ema.swapped(model):
            inside = params(model)
            for name, call in REFUSED.items():
                with pytest.raises(RuntimeError, match=r"inside of (EMA\.)?swapped") as raised:
                    call(model, optimizer, folder)
                same(params(model), inside, f"{name}: {raised.value}")
            for read in READ.values():
                same(read(model, folder), inside)
        same(params(model), own)
        assert not any(own[name].equal(inside[name]) for name in own)
        fsdp2x.sleep(model, optimizer)
        with pytest.raises(RuntimeError, match="asleep"), ema.swapped(model):
            pass
        fsdp2x.wake(model, optimizer)
        same(params(model), own)
        fsdp2x.checkpoint.load(folder / "c", model, optimizer)
        same(params(model), own)
        train(ctx, model, optimizer, range(1))
        assert [path.name for path in (folder / "c").glob("step-*")] == ["step-000001"]


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_frozen_parameters_and_those_without_gradients(ctx):
    """They have no average until they have a gradient; then it begins with the value of that step."""
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    model[2].requires_grad_(False)
    for layer in model:
        fsdp2x.fully_shard(layer, auto_wrap=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = EMA(optimizer, DECAY)
    x = torch.ones(2, 4)
    for step in range(2):
        (model[0](x).sum() + (model[1](x).sum() if step else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [["ema" in optimizer.state.get(param, {}) for param in layer.parameters()] for layer in model] == [
        [True, True],
        [True, True],
        [False, False],
    ]
    late, begun = model[1].weight, optimizer.state[model[1].weight]["ema"]
    same(full(begun), full(late.detach()))
    with ema.swapped(model):
        pass
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = fresh.state_dict() | {"state": {0: {"step": torch.tensor(1.0)}}}
    with pytest.warns(UserWarning, match="no 'ema', so the averages restart"):
        optimizer.load_state_dict(state)


def test_what_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    for options, said in (({"decay": 1.0}, "decay must be .* got 1.0"), ({"dtype": torch.bfloat16}, "dtype must be")):
        with pytest.raises(ValueError, match=said):
            EMA(optimizer, **options)
    EMA(optimizer)
    with pytest.raises(ValueError, match="has averages already"):
        EMA(optimizer)
