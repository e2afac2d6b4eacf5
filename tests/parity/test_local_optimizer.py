"""fsdp2x.local_optimizer: bit for bit what the optimizer computes on DTensors; all around a step is as before."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs, train
from reference import full, only_fsdp2x, params, same, shard, shard_stock

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
}
# torch's fused step refuses a part of DTensors' operations, and its single-tensor one is another arithmetic.
TWINS = {"adamw_fused": OPTIMIZERS["adamw_foreach"]}


def ours(ctx) -> torch.nn.Module:
    only_fsdp2x(ctx)
    return shard(ctx, Stack(), STACK_UNITS)


@distributed(world_sizes=(1, 2, 4))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.each_value
def test_steps_and_states(ctx, name):
    model = ours(ctx)
    optimizer = OPTIMIZERS[name](model.parameters())
    assert fsdp2x.local_optimizer(optimizer) is optimizer and isinstance(optimizer, torch.optim.Optimizer)
    losses = train(ctx, model, optimizer)
    twin = shard_stock(Stack(), STACK_UNITS)
    expected = TWINS.get(name, OPTIMIZERS[name])(twin.parameters())
    loose = {} if ctx.world <= 2 and name not in TWINS else {"rtol": 1e-5, "atol": 1e-6}
    try:
        stock_losses = train(ctx, twin, expected)
    except NotImplementedError as error:  # Rprop writes with a mask, which DTensors of torch 2.11 do not know
        pytest.skip(f"DTensors of this torch cannot be stepped by {name} themselves: {error}")
    same(losses, stock_losses, **loose)
    same(params(model), params(twin), **loose)
    mine, theirs = (full(one.state_dict()["state"]) for one in (optimizer, expected))
    same(mine, theirs, **loose)
    for param, state in optimizer.state.items():
        assert isinstance(param, DTensor) and all(
            isinstance(value, DTensor) == (value.ndim > 0) for value in state.values() if value is not None
        )
    assert all(local.grad is None for local in (param._local_tensor for param in model.parameters()))


@distributed(world_sizes=(2,))
def test_states_load_both_ways_and_through_torchs_utilities(ctx):
    model = ours(ctx)
    optimizer = fsdp2x.local_optimizer(torch.optim.NAdam(model.parameters(), lr=1e-2))
    train(ctx, model, optimizer)
    # Copies: training goes on with the tensors themselves.
    saved, direct = (copy.deepcopy(one) for one in (get_optimizer_state_dict(model, optimizer), optimizer.state_dict()))
    weights = copy.deepcopy(full(model.state_dict()))
    expected = train(ctx, model, optimizer, range(3, 6))
    for wrap in (fsdp2x.local_optimizer, lambda one: one):
        for load in ("utilities", "direct"):
            again = ours(ctx)
            for name, param in again.named_parameters():
                begin = weights[name].chunk(ctx.world)
                local = begin[ctx.rank] if ctx.rank < len(begin) else weights[name][:0]
                param.to_local().data.copy_(local)
            other = wrap(torch.optim.NAdam(again.parameters(), lr=1e-2))
            if load == "utilities":
                set_optimizer_state_dict(again, other, copy.deepcopy(saved))
            else:
                other.load_state_dict(copy.deepcopy(direct))
            same(train(ctx, again, other, range(3, 6)), expected)
    dist.barrier()


@distributed(world_sizes=(2,))
def test_schedulers_hooks_and_closures(ctx):
    model = ours(ctx)
    whole = [id(param) for param in model.parameters()]
    optimizer = fsdp2x.local_optimizer(torch.optim.RMSprop(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []

    def hook(one, args, kwargs):
        seen.append([id(param) for group in one.param_groups for param in group["params"]])

    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs(ctx.rank)).square().mean()
        loss.backward()
        return loss

    before = params(model)
    assert optimizer.step(closure).requires_grad
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3
    assert seen == [whole, whole]
    assert all(not torch.equal(value, before[name]) for name, value in params(model).items())
    assert fsdp2x.local_optimizer(optimizer) is optimizer


@distributed(world_sizes=(2,))
def test_an_error_in_a_step_leaves_the_optimizer_whole(ctx):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("on purpose")

    model = ours(ctx)
    optimizer = fsdp2x.local_optimizer(Failing(model.parameters(), lr=0.1))
    model(inputs(ctx.rank)).sum().backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert all(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])


@distributed(world_sizes=(2,))
def test_what_is_refused(ctx):
    class Factored(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                self.state[param]["rows"] = torch.zeros(param.shape[0] + 1)

    model = ours(ctx)
    with pytest.raises(NotImplementedError, match="LBFGS is not element-wise"):
        fsdp2x.local_optimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(NotImplementedError, match="Adafactor is not element-wise"):
        fsdp2x.local_optimizer(torch.optim.Adafactor(model.parameters()))
    for name in (
        "LAMB",
        "PagedLars",
        "DistributedShampoo",
        "SingleDeviceMuon",
    ):  # of others, whose states look like Adam's
        theirs = type(f"My{name}", (type(name, (torch.optim.AdamW,), {}),), {})
        with pytest.raises(NotImplementedError, match=f"{name} is not element-wise.* fsdp2x.optim.(Muon|AdamW)"):
            fsdp2x.local_optimizer(theirs(model.parameters()))
    with pytest.raises(TypeError, match="got FSDPStack"):
        fsdp2x.local_optimizer(model)
    with pytest.raises(
        NotImplementedError, match="keeps 'rows' of shape.* if it steps DTensors, or one of fsdp2x.optim"
    ):
        fsdp2x.local_optimizer(Factored(model.parameters())).step()
    adamw = fsdp2x.optim.AdamW(model.parameters())
    assert fsdp2x.local_optimizer(adamw) is adamw and type(adamw) is fsdp2x.optim.AdamW


@distributed(world_sizes=(1,))
def test_plain_parameters_are_stepped_as_before(ctx):
    only_fsdp2x(ctx)
    results = []
    for wrap in (fsdp2x.local_optimizer, lambda one: one):
        model = Stack()
        train(ctx, model, wrap(torch.optim.Adam(model.parameters(), lr=1e-2)))
        results.append(params(model))
    same(*results)
