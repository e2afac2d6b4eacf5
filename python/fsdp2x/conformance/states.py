"""State dicts of models and optimizers, and torch's checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2x.conformance.behavior import UNITS, Context, Net, behavior, close, data, full, mean_square, same_weights

RESHARDS = (None, True, False)


def _other(seed: int = 5) -> Net:
    model = Net()
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param))
    return model


@behavior(rows=RESHARDS)
def state_dicts_are_sharded(t: Context, reshard: bool | None) -> None:
    """state_dict() has DTensors, also while a forward has left parameters gathered, and they alias the parameters."""
    model = t.shard(Net(), UNITS, reshard_after_forward=reshard)
    model(data(t.rank))
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    with torch.no_grad():
        model.head.weight.zero_()
    assert not state["head.weight"].to_local().any()


@behavior(rows=("copied", "assigned"))
def loads_sharded_state_dicts(t: Context, how: str) -> None:
    """load_state_dict takes DTensors, with assign=False and True, and training goes on from there."""
    plain, model = _other(), t.shard(Net(), UNITS)
    model(data(t.rank))
    state = {
        name: distribute_tensor(plain.state_dict()[name].clone(), value.device_mesh, value.placements)
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state, assign=how == "assigned")
    same_weights(model, plain, rtol=0, atol=0)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    mean_square(model, t.rank).backward()
    t.backward(plain)
    for one in optimizers:
        one.step()
    same_weights(model, plain)


@behavior()
def loads_part_of_a_state_dict(t: Context) -> None:
    """strict=False reports missing and unexpected keys."""
    model = t.shard(Net(), UNITS)
    state = model.state_dict()
    state["extra"] = state.pop("head.weight")
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["head.weight"] and found.unexpected_keys == ["extra"]


@behavior(rows=(True, False))
def gathers_full_state_dicts(t: Context, offload: bool) -> None:
    """get_model_state_dict(full_state_dict=True) has full tensors; with cpu_offload only on rank 0."""
    model = t.shard(_other(), UNITS)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    if offload and t.rank:
        assert not state
        return
    for name, value in _other().state_dict().items():
        assert type(state[name]) is torch.Tensor and torch.equal(state[name], value), name


@behavior(rows=(True, False))
def loads_full_state_dicts(t: Context, broadcast: bool) -> None:
    """set_model_state_dict shards full tensors, of all ranks or of rank 0 only."""
    model = t.shard(Net(), UNITS)
    state: Any = _other().state_dict() if not broadcast or t.rank == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast))
    same_weights(model, _other(), rtol=0, atol=0)


@behavior()
def loads_full_state_dicts_into_meta(t: Context) -> None:
    """A model on the meta device gets values by to_empty() and a broadcast full state dict."""
    with torch.device("meta"):
        model = Net()
    model = t.shard(model, UNITS)
    model.to_empty(device="cpu")
    state: Any = _other().state_dict() if t.rank == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    same_weights(model, _other(), rtol=0, atol=0)
    close(model(data(t.rank)), _other()(data(t.rank)), "output")


def _train(t: Context, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        loss = mean_square(model, t.rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@behavior()
def optimizer_states_are_dtensors(t: Context) -> None:
    """An optimizer's moments are DTensors placed like the parameters."""
    model = t.shard(Net(), UNITS)
    optimizer = torch.optim.AdamW(model.parameters())
    _train(t, model, optimizer, range(1))
    for param, state in optimizer.state.items():
        assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].placements == param.placements


@behavior(rows=(True, False))
def resumes_from_state_dicts(t: Context, whole: bool) -> None:
    """State dicts of model and optimizer, full or sharded, restore training bit for bit."""
    options = StateDictOptions(full_state_dict=whole)
    model = t.shard(Net(), UNITS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(t, model, optimizer, range(2))
    saved = copy.deepcopy(get_model_state_dict(model, options=options))
    saved_optimizer = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    expected = _train(t, model, optimizer, range(2, 4))
    model = t.shard(_other(), UNITS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    set_model_state_dict(model, saved, options=options)
    set_optimizer_state_dict(model, optimizer, saved_optimizer, options=options)
    assert torch.equal(torch.stack(_train(t, model, optimizer, range(2, 4))), torch.stack(expected))


@behavior()
def resumes_from_checkpoints(t: Context) -> None:
    """torch.distributed.checkpoint saves and loads the sharded state dicts of model and optimizer."""
    model = t.shard(Net(), UNITS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(t, model, optimizer, range(2))
    folder = str(t.folder / "checkpoint")
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    expected = _train(t, model, optimizer, range(2, 4))
    model = t.shard(_other(), UNITS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert torch.equal(torch.stack(_train(t, model, optimizer, range(2, 4))), torch.stack(expected))
    dist.barrier()


@behavior()
def saves_with_torch_save(t: Context) -> None:
    """A sharded state dict passes through torch.save and torch.load on each rank."""
    model, other = t.shard(_other(), UNITS), t.shard(Net(), UNITS)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    same_weights(other, _other(), rtol=0, atol=0)


@behavior()
def values_written_to_shards_are_used(t: Context) -> None:
    """In-place writes to sharded parameters act in the next forward."""
    model, plain = t.shard(Net(), UNITS), Net()
    model(data(t.rank))
    with torch.no_grad():
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            param.mul_(0.5)
            other.mul_(0.5)
    close(model(data(t.rank)), plain(data(t.rank)), "output")


@behavior()
def keeps_parameter_objects(t: Context) -> None:
    """Forward, backward, and loading keep the sharded Parameter objects, which optimizers hold."""
    model = t.shard(Net(), UNITS)
    before = list(model.parameters())
    mean_square(model, t.rank).backward()
    model.load_state_dict(model.state_dict())
    model.to("cpu")
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert all(full(param).isfinite().all() for param in before)
