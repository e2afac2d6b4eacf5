"""Sharded parameters, their gradients, and optimizer states are ordinary tensors on every rank.

fsdp2x allows every operation on them that FSDP2 allows. It has the same result, and training continues alike.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness import distributed
from reference import TRANSPORTS, grads, same, shard, shard_stock
from shard_operations import CRASHES, READS, UNSEEN, WRITES, outcome

# How shards came to be what they are.
HISTORIES = ("new", "stepped", "assigned", "materialized", "half_materialized", "kept_in_pairs", "columns")


class Awkward(nn.Module):
    """Shards that are short or empty from two ranks on, another dtype, a tie."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 5)
        self.last = nn.Linear(5, 1)
        self.tied = self.last
        self.table = nn.Parameter(torch.arange(6).view(3, 2), requires_grad=False)
        self.rows = nn.Parameter(torch.randn(4, 12))

    def forward(self, x):
        return self.last(self.first(x)).sum() + (self.rows * self.table.sum()).mean()


def step(ctx, model):
    loss = model(torch.arange(24.0).view(2, 12) + ctx.rank)
    loss.backward()
    model.reshard()
    return loss.detach()


def made(ctx, history, transport):
    """A model sharded by stock, then one by us; both have the same past."""
    for way in ("stock", "ours"):
        model = Awkward()
        if history == "materialized":
            model.to("meta")
        if history == "half_materialized":
            model.first.to("meta")
        options = {"kept_in_pairs": {"reshard_after_forward": 2}, "columns": {"shard_placement_fn": columns}}
        options = options.get(history, {})
        if way == "stock":
            shard_stock(model, ("first",), **options)
        else:
            shard(ctx, model, ("first",), transport=transport, **options)
        if "materialized" in history:
            model.to_empty(device="cpu") if history == "materialized" else model.first.to_empty(device="cpu")
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(2)
        if history == "assigned":
            whole = {name: torch.ones(value.shape, dtype=value.dtype) for name, value in model.state_dict().items()}
            parts = {
                name: distribute_tensor(whole[name], value.device_mesh, value.placements)
                for name, value in model.state_dict().items()
            }
            model.load_state_dict(parts, assign=True)
        if history in ("stepped", "kept_in_pairs"):
            step(ctx, model)
            model.zero_grad()
        yield model


def columns(param):
    return Shard(1) if param.dim() > 1 and param.shape[1] == 12 else Shard(0)


def tensors(model):
    for name in ("first.weight", "last.bias", "table"):
        param = model.get_parameter(name)
        yield name, param
        yield f"{name}, local", param._local_tensor


def compare(operations, pairs, found, *, places=True):
    """Where stock succeeds, so must we, with the same outcome."""
    for name, operation in operations.items():
        for (where, theirs), (_, ours) in pairs():
            if name in (CRASHES if isinstance(theirs, DTensor) else UNSEEN):
                continue
            expected = outcome(operation, theirs, places=places)
            got = outcome(operation, ours, places=places)
            if expected[0] == "ok" and got != expected:
                found.append(f"{name} of {where}:\n  stock: {str(expected)[:300]}\n  ours:  {str(got)[:300]}")


def histories(world):
    return [one for one in HISTORIES if world % 2 == 0 or one != "kept_in_pairs"]


@distributed(world_sizes=(3,), timeout=120)
def test_reading(ctx):
    read(ctx, "auto")


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(1, 2, 3, 4), timeout=240)
def test_reading_on_every_transport(ctx, transport):
    read(ctx, transport)


def read(ctx, transport):
    found = []
    for history in histories(ctx.world):
        theirs, ours = made(ctx, history, transport)
        before = len(found)
        compare(READS, lambda a=theirs, b=ours: zip(tensors(a), tensors(b), strict=True), found)
        found[before:] = [f"{history}: {one}" for one in found[before:]]
    assert not found, f"{len(found)} differ\n" + "\n".join(found[:20])


@pytest.mark.parametrize("transport", ["shm", pytest.param("process_group", marks=pytest.mark.full)])
@distributed(world_sizes=(2,), timeout=120)
def test_gradients_and_states(ctx, transport):
    """Stock's gradients lie somewhere in the buffer of a reduction, ours in a pool: values are compared, not places."""
    theirs, ours = made(ctx, "new", transport)
    for model in (theirs, ours):
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
        step(ctx, model)
        optimizer.step()
        model.states = [entry["exp_avg"] for entry in optimizer.state.values()]

    def values(model):
        kept = [(name, param.grad) for name, param in model.named_parameters() if param.grad is not None]
        for name, value in [*kept, *(("exp_avg", state) for state in model.states)]:
            yield name, value
            yield f"{name}, local", value._local_tensor

    found = []
    # The storages of FSDP2's gradients, and their size in torch.save, need not agree.
    operations = {name: op for name, op in READS.items() if "storage" not in name and name != "address"}
    compare(operations, lambda: zip(values(theirs), values(ours), strict=True), found, places=False)
    assert not found, f"{len(found)} differ\n" + "\n".join(found[:20])


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(2,), timeout=120)
def test_training_goes_on_after_writing(ctx, transport):
    write(ctx, transport, "stepped")


@pytest.mark.full
@pytest.mark.parametrize("history", ("new", "stepped", "assigned"))
@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(1, 2, 3), timeout=240)
def test_training_goes_on_after_writing_in_every_history(ctx, transport, history):
    write(ctx, transport, history)


def write(ctx, transport, history):
    """After each operation, the test updates the parameters like an optimizer. The model must see the update."""
    found = []
    for name, operation in WRITES.items():
        theirs, ours = made(ctx, history, transport)
        compare({name: operation}, lambda a=theirs, b=ours: zip(tensors(a), tensors(b), strict=True), found)
        results = []
        for model in (theirs, ours):
            seen = []
            for _ in range(2):
                seen.append(step(ctx, model))
                seen.append(grads(model))
                model.zero_grad()
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(2)
            results.append(seen)
        same(results[1], results[0], name, rtol=1e-5, atol=1e-6)
    assert not found, f"{len(found)} differ\n" + "\n".join(found[:20])
