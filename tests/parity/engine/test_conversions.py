"""Operations that change a parameter's dtype, device, shape, or memory without the engine.

Each takes effect as on the unsharded model, or raises and leaves the model unchanged. Either way, the next steps
compute the same as the unsharded model.
"""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2x
from harness import distributed
from reference import TRANSPORTS, both_transports, full, grads, params, same, shard

UNITS = ("blocks.0", "blocks.1")


class Linear(nn.Linear):
    """Casts its input and bias, so that layers of several dtypes follow one another."""

    def forward(self, x):
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias.to(self.weight.dtype))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(Linear(8, 7), nn.Tanh(), Linear(7, 8)) for _ in range(2))
        self.head = Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def values(model):
    """Converts the full tensors of ``model`` and shards them like ``model``."""

    def cut(value, like):
        return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value

    whole = full(dict(model.state_dict()))
    return {name: cut(whole[name].double() * 0.5, like) for name, like in model.state_dict().items()}


def raise_half_way(part):
    seen = []

    def convert(tensor):
        seen.append(tensor)
        if len(seen) == 2:
            raise ZeroDivisionError
        return tensor.double()

    part._apply(convert)


def to_meta_and_back(part):
    kept = {name: value.clone() for name, value in part.state_dict().items()}
    part.to("meta")
    part.to_empty(device="cpu")
    part.load_state_dict(kept)


def locals_of(part):
    return [param._local_tensor if isinstance(param, DTensor) else param for param in part.parameters()]


def assign_data(tensors, change):
    for tensor in tensors:
        tensor.data = change(tensor.data)


@torch.no_grad()
def set_other_memory(part):
    for tensor in locals_of(part):
        tensor.set_(tensor.detach() * 2)


def swap_pairs(part):
    pairs = {}
    for param in part.parameters():
        pairs.setdefault(param.shape, []).append(param)
    for first, *_, last in filter(lambda pair: len(pair) > 1, pairs.values()):
        torch.utils.swap_tensors(first, last)


OPERATIONS = {
    "bfloat16": lambda part: part.bfloat16(),
    "double": lambda part: part.double(),
    "half_and_back": lambda part: part.half().float(),
    "cpu": lambda part: part.cpu(),
    "meta_and_back": to_meta_and_back,
    "raises": raise_half_way,
    "transposed": lambda part: part._apply(lambda tensor: tensor.t() if tensor.dim() == 2 else tensor),
    "data_of_another_dtype": lambda part: assign_data(part.parameters(), torch.Tensor.double),
    "local_data": lambda part: assign_data(locals_of(part), lambda data: data * 2),
    "local_set": set_other_memory,
    "swapped": swap_pairs,
    "assigned": lambda part: part.load_state_dict(values(part), assign=True),
}
PARTS = {"model": lambda model: model, "unit": lambda model: model.blocks[0], "layer": lambda model: model.blocks[0][2]}
MOMENTS = ("new", "stepped", "evaluated")


def step(model, optimizer=None):
    x = torch.linspace(-1, 1, 32).view(4, 8)
    output = model(x)
    output.float().square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return output.detach()


def facts(model):
    return params(model), [param.dtype for param in model.parameters()]


def outcome(operation, model, part):
    """Runs ``operation`` and a forward. Returns the type of the last error, or None if both returned."""
    raised = None
    for call in (lambda: operation(PARTS[part](model)), lambda: model(torch.ones(2, 8))):
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            raised = type(error)
    return raised


def reshard(model):
    for name in (*UNITS, ""):
        model.get_submodule(name).reshard()


def with_past(model, moment):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if moment == "stepped":
        step(model, optimizer)
    elif moment == "evaluated":
        with torch.no_grad():
            model(torch.ones(2, 8))
    return optimizer


@distributed(world_sizes=(1, 2), timeout=120, only_fsdp2x=True)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_model_is_as_the_unsharded_one(ctx, transport, part, moment):
    for name, operation in OPERATIONS.items():
        plain, model = Net(), Net()
        for param in model.parameters():
            param.lr_scale = 0.5
        shard(ctx, model, UNITS, transport=transport, reshard_after_forward=False)
        optimizer, _ = with_past(model, moment), with_past(plain, moment)
        before = facts(model)
        raised = outcome(operation, model, part)
        reshard(model)
        if name != "transposed" and outcome(operation, copy.deepcopy(plain), part) == raised:
            outcome(operation, plain, part)
        else:
            assert raised is not None, name
            same(facts(model), before, name)
        # .to("meta") makes other parameters of the unsharded model, and assigning makes others of both.
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if name == "assigned" else optimizer
        for _ in range(2):
            same(step(model, optimizer), step(plain, plain_optimizer), name, rtol=5e-2, atol=5e-2)
            step(model), step(plain)
            same(grads(model), grads(plain), name, rtol=5e-2, atol=5e-2)
            for one in (model, plain):
                one.zero_grad()
        reshard(model)
        same(facts(model), facts(plain), name, rtol=5e-2, atol=5e-2)
        assert name == "assigned" or all(hasattr(param, "lr_scale") for param in model.parameters()), name


@distributed(world_sizes=(2,), only_fsdp2x=True)
@both_transports
def test_wrong_moments_are_refused_before_anything_changes(ctx, transport):
    model = shard(ctx, Net(), UNITS, transport=transport)
    plain = Net()
    x = torch.linspace(-1, 1, 32).view(4, 8)
    model(x)
    before = facts(model)

    def convert(*args):
        model.blocks[1].double()

    handle = model.blocks[1][1].register_forward_hook(convert)
    with pytest.raises(RuntimeError, match="cannot be .*converted during forward"):
        model(x)
    handle.remove()
    same(facts(model), before)
    model.set_requires_gradient_sync(False)
    step(model)
    model.cpu()  # changes nothing
    for part in (model, model.blocks[0]):
        with pytest.raises(RuntimeError, match="gradients that are not reduced"):
            part.bfloat16()
    same(facts(model), before)
    model.set_requires_gradient_sync(True)
    step(model)
    for _ in range(2):
        step(plain)
    same(grads(model), grads(plain), rtol=1e-5, atol=1e-6)
    loss = model(x).sum()
    model.zero_grad()
    model.double()
    with pytest.raises(RuntimeError, match="have changed their dtype or device"):
        loss.backward()
    same(step(model), step(plain.double()), rtol=1e-5, atol=1e-6)


def freeze_on(model, how, value):
    """While the first block is gathered."""
    block = model.blocks[0]
    if how == "kept":  # by a forward without reshard
        with torch.no_grad():
            model(torch.ones(2, 8))
        block.requires_grad_(value)
    elif how == "in_context" and isinstance(block, fsdp2x.FSDPModule):
        with fsdp2x.unsharded(model):
            block.requires_grad_(value)
    else:
        if isinstance(block, fsdp2x.FSDPModule):
            block.unshard()
        block.requires_grad_(value)
        if isinstance(block, fsdp2x.FSDPModule) and how == "unshard":
            block.reshard()


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("reshard_after", [False, True, 2])
def test_requires_grad_of_gathered_parameters_takes_effect(ctx, transport, reshard_after):
    for how in ("kept", "in_context", "unshard", "still_gathered"):
        for trains in (True, False):
            plain, model = Net(), Net()
            for one in (plain, model):
                one.blocks[0].requires_grad_(not trains)
            shard(ctx, model, UNITS, transport=transport, reshard_after_forward=reshard_after)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
            for number in range(3):
                if number == 1:
                    for one in (model, plain):
                        freeze_on(one, how, trains)
                same(step(model, optimizers[0]), step(plain, optimizers[1]), how, rtol=1e-5, atol=1e-6)
            reshard(model)
            same(params(model), params(plain), how, rtol=1e-5, atol=1e-6)
            assert all(param.requires_grad == trains for param in model.blocks[0].parameters()), how


class Rotary(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return super().forward(x) + 0 * self.frequencies.nan_to_num() * self.scale.nan_to_num()


@distributed(world_sizes=(1,), only_fsdp2x=True)
def test_the_forward_after_to_empty_names_buffers_that_nobody_wrote(ctx):
    for written in ((), ("scale",), ("scale", "frequencies")):
        with torch.device("meta"):
            model = Rotary()
        shard(ctx, model)
        for _ in range(2):  # before the first forward, and later
            model.to_empty(device="cpu")
            for name in written:
                model.get_buffer(name).fill_(1)
            missing = [name for name in ("frequencies", "scale") if name not in written]
            warns = pytest.warns(UserWarning, match="nothing has written .*" + ", ".join(map(repr, missing)))
            with warns if missing else contextlib.nullcontext():
                model(torch.ones(2, 4))


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_sharing_memory_with_other_processes_is_refused(ctx):
    model = shard(ctx, Net(), UNITS)
    before = facts(model)
    for part in (model, model.blocks[0], nn.ModuleList([model])):
        with pytest.raises(NotImplementedError, match="full_tensors"):
            part.share_memory()
    same(facts(model), before)
