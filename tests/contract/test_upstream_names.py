"""Upstream's private names on our units, groups and parameters: each acts as there, or is refused by name."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.tensor import DTensor

import fsdp2x
from fsdp2x.conformance.behavior import cases
from harness import distributed
from models import inputs
from reference import TORCH_MINOR, both_transports, grads, only_fsdp2x, same, shard, shard_stock

UNITS = ("0", "2")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def names_of(thing) -> set[str]:
    """All that upstream's object keeps, computes or does."""
    kinds = [kind for kind in type(thing).__mro__ if kind.__module__.startswith("torch.distributed.fsdp")]
    return set(vars(thing)) | {name for kind in kinds for name in vars(kind) if not name.startswith("__")}


def read(thing, name):
    """The value, None for an attribute that does not exist yet, or what refused it."""
    try:
        return getattr(thing, name)
    except AttributeError as error:
        return error


@distributed(world_sizes=(1,))
def test_every_name_of_upstreams_is_supported_or_refused(ctx):
    """Read: a value, or an error that names it and the way out. Written: it acts, or the same error; never in vain."""
    only_fsdp2x(ctx)
    if TORCH_MINOR < 15:
        pytest.skip("the names are those of torch 2.15")
    things = []
    for make in (shard_stock, lambda *args: shard(ctx, *args)):
        model = make(net(), UNITS)
        model(inputs(0)).sum().backward()
        state = model[0]._get_fsdp_state()
        group = state._fsdp_param_group
        things.append((state, group, group.fsdp_params[0], state._state_ctx))
    num_refused = 0
    for theirs, ours in zip(*things, strict=True):
        for name in names_of(theirs):
            value = read(ours, name)
            where = f"{type(theirs).__name__}.{name}"
            if isinstance(value, AttributeError):
                num_refused += 1
                assert repr(name) in str(value), where
                assert str(value).startswith("fsdp2x: ") and ": " in str(value)[8:], (where, value)
            elif callable(value) and not isinstance(value, nn.Module):
                continue
            assert name not in vars(ours), f"{where}: a write changes only an attribute of ours"
            try:
                setattr(ours, name, True)
            except (AttributeError, TypeError) as error:
                assert name in str(error) or "cannot be set to" in str(error), (where, error)
            else:
                assert read(ours, name) is True, f"{where} was written and is {read(ours, name)}"
    assert num_refused > 100


def train(ctx, model, change=None, num=3):
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(num):
        if change is not None and number == 1:
            change(model)
        loss = model(inputs(ctx.rank, number)).square().mean()
        results += [loss.detach(), [is_gathered(unit) for unit in (model, model[0], model[2])]]
        loss.backward()
        results.append(grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return results


def is_gathered(module) -> bool:
    return any(not isinstance(param, DTensor) for param in module.parameters(recurse=False))


def through_names(value):
    """Sets the internals as verl does on torch versions whose method does not reach the root."""

    def change(model):
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                state = module._get_fsdp_state()
                state._auto_reshard_after_forward = False
                if group := state._fsdp_param_group:
                    group.post_forward_mesh_info = _get_post_forward_mesh_info(value, group.mesh_info)

    return change


@distributed(world_sizes=(2,))
@both_transports
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("first", [True, False, None])
@pytest.mark.parametrize("value", [True, False])
def test_resharding_is_set_through_private_names(ctx, transport, when, first, value):
    results = []
    for make in (shard_stock, lambda *args, **options: shard(ctx, *args, transport=transport, **options)):
        model, change = make(net(), UNITS, reshard_after_forward=first), through_names(value)
        if when == "before":
            change(model)
        results.append(train(ctx, model, change if when == "between" else None))
        last = [module._get_fsdp_state()._fsdp_param_group for module in (model[0], model[2])]
        assert [group.post_forward_mesh_info is not None for group in last] == [value, value]
    same(*results)


@distributed(world_sizes=(4,))
def test_resharding_to_fewer_ranks_is_an_argument(ctx):
    """Upstream's next forward fails where this is written; its parameters have a mesh of their own."""
    only_fsdp2x(ctx)
    model = shard(ctx, net(), UNITS)
    with pytest.raises(AttributeError, match="reshard_after_forward=2"):
        through_names(2)(model)


@distributed(world_sizes=(1,))
def test_resharding_after_backward_is_read_from_the_group(ctx):
    """A tiled MLP reads it, sets False while it runs several backwards, and sets it back."""
    values = []
    for make in (shard_stock, lambda *args: shard(ctx, *args)):
        model = make(net(), UNITS)
        model[2].set_reshard_after_backward(False)
        groups = [model[index]._get_fsdp_state()._fsdp_param_group for index in (0, 2)]
        values.append([group.reshard_after_backward for group in groups])
    assert values == [[True, False]] * 2


@distributed(world_sizes=(4,))
def test_meshes_are_described_as_upstream_does(ctx):
    for shape, names, kind in (((4,), ("dp",), FSDPMeshInfo), ((2, 2), ("replicate", "shard"), HSDPMeshInfo)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        theirs, ours = (
            make(net(), mesh=mesh)._get_fsdp_state()._fsdp_param_group.mesh_info
            for make in (shard_stock, lambda *args, **options: shard(ctx, *args, **options))
        )
        assert type(ours) is type(theirs) is kind
        assert ours == theirs
        assert (ours.shard_mesh_size, ours.shard_mesh_rank) == (theirs.shard_mesh_size, theirs.shard_mesh_rank)


@distributed(world_sizes=(2,))
def test_the_training_state_is_told_only_what_it_is(ctx):
    """Frameworks write IDLE before they move a model: right when it is idle, an error while it runs."""
    only_fsdp2x(ctx)
    model = shard(ctx, net(), UNITS)
    groups = [model[index]._get_fsdp_state()._fsdp_param_group for index in (0, 2)]
    loss = model(inputs(ctx.rank)).sum()
    loss.backward()
    for group in groups:
        group._training_state = TrainingState.IDLE
    with pytest.raises(AttributeError, match="reset_iter_state"):
        groups[0]._training_state = TrainingState.FORWARD


@distributed(world_sizes=(2,))
def test_the_last_backward_is_told_through_the_context(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, net(), UNITS)
    model(inputs(ctx.rank)).sum().backward()
    model[0]._get_fsdp_state()._state_ctx.is_last_backward = False
    assert model._get_fsdp_state()._state_ctx.is_last_backward is False
    assert model._get_fsdp_state().shared.settings.is_last_backward is False


class Stage(nn.Sequential):
    """As `net`, and nothing runs through what comes after."""

    def forward(self, x):
        return self[2](self[1](self[0](x)))


def end_by_hand(model, has_callback):
    """Ends the last micro-batch of a pipeline stage, as frameworks do."""
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    for state in model._get_fsdp_state()._state_ctx.all_states:
        if state._fsdp_param_group:
            state._fsdp_param_group.post_backward()
    if has_callback:
        model._get_fsdp_state()._root_post_backward_final_callback()


@distributed(world_sizes=(2,))
@both_transports
@pytest.mark.parametrize("has_callback", [True, False])
@pytest.mark.parametrize("is_unit", [False, True])
def test_stages_end_their_backwards_by_hand(ctx, transport, has_callback, is_unit):
    """Micro-batches two by two, as in 1F1B; `is_unit`: what nothing runs through is a unit of its own."""
    results = []
    for make in (shard_stock, lambda *args, **options: shard(ctx, *args, transport=transport, **options)):
        model = make(Stage(*net(), nn.Linear(4, 4)), (*UNITS, *["3"] * is_unit))
        optimizer, result = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            losses = []
            for number in range(4):
                model.set_is_last_backward(False)
                model.set_reshard_after_backward(False)
                model.set_requires_gradient_sync(False)
                losses.append(model(inputs(ctx.rank, 4 * step + number)).square().mean())
                result.append(losses[-1].detach())
                if len(losses) == 2:
                    losses.pop(0).backward()
            losses.pop().backward()
            end_by_hand(model, has_callback)
            result += [grads(model), is_gathered(model[0])]
            optimizer.step()
            optimizer.zero_grad()
        results.append(result)
    same(*results)


@distributed(world_sizes=(2,))
def test_a_backward_cannot_be_ended_while_it_runs(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, net(), UNITS)
    group = model[0]._get_fsdp_state()._fsdp_param_group
    group.post_backward()  # nothing was run, nothing is done
    hidden = model(inputs(ctx.rank))
    hidden.register_hook(lambda _: group.post_backward())
    with pytest.raises(RuntimeError, match="unit '0' must be called after"):
        hidden.sum().backward()


# ---- public names


@pytest.mark.parametrize("name", ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"])
def test_policies_are_those_of_torch(name):
    """DataParallelMeshDims came with torch 2.12: where torch has none, we have none."""
    assert (name in fsdp2x.__all__) == hasattr(stock, name)
    assert getattr(fsdp2x, name, None) is getattr(stock, name, None)


OURS = [name for name, member in vars(fsdp2x.FSDPModule).items() if inspect.isfunction(member) and name[0] != "_"]


@pytest.mark.parametrize("name", [name for name in OURS if hasattr(stock.FSDPModule, name)])
def test_arguments_of_methods_are_named_as_upstream(name):
    """fsdp2x's methods may take more arguments after them."""
    ours, theirs = (
        list(inspect.signature(getattr(cls, name)).parameters) for cls in (fsdp2x.FSDPModule, stock.FSDPModule)
    )
    assert ours[: len(theirs)] == theirs


def test_each_call_has_a_row_and_a_behavior():
    """docs/decisions/upstream.md lists what the installed torch has. Its last column names behaviors or files."""
    root = Path(__file__).parents[2]
    rows = re.findall(
        r"^\| (.*) \| [\d.main]+ \| .* \| `(.*)` \|$", (root / "docs/decisions/upstream.md").read_text(), re.M
    )
    listed = {name for calls, _ in rows for name in re.findall(r"`(\w+)", calls)}
    theirs = [name for name, member in vars(stock.FSDPModule).items() if inspect.isfunction(member) and name[0] != "_"]
    assert {*theirs, "register_fsdp_forward_method", "share_comm_ctx"} <= listed
    known = {name for _, name, _ in cases()}
    assert [where for _, where in rows if where not in known and not (root / where).exists()] == []
