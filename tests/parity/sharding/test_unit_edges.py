"""The edges of a unit: views that it returns, members that run alone, losses that bypass its output, recomputation."""

import copy
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp2x
from harness import distributed
from models import Stack, inputs
from reference import both_transports, full, grads, mean_of_ranks, mesh_of, only_fsdp2x, same, shard, train_alike

CLOSE = {"rtol": 1e-5, "atol": 1e-7}
VIEWS = {
    "view": lambda y: y.view(-1, 3, 2),
    "transpose": lambda y: y.transpose(0, 1),
    "slice": lambda y: y[:, 1:5],
    "select": lambda y: y[:, 2],
    "view of a view": lambda y: y.view(-1, 3, 2)[..., :1],
    "broadcast first": lambda y: (y + torch.zeros(2, 1, 1)).flatten(0, 1),
}
WRITES = {
    "add": lambda o, scale: o.add_(1),
    "mul by another": lambda o, scale: o.mul_(scale),
    "masked": lambda o, scale: o.masked_fill_(o.detach() > 0, 0.5),
    "twice, in a part": lambda o, scale: (o[:1].mul_(2), o.add_(scale)),
}


class Viewing(nn.Module):
    def __init__(self, view, inner):
        super().__init__()
        torch.manual_seed(0)
        self.view = view
        self.linear = Viewing(lambda y: y.view(-1, 6), None) if inner else nn.Linear(6, 6)

    def forward(self, x):
        return self.view(self.linear(x))


class Writing(nn.Module):
    """Changes in place what the unit has returned."""

    def __init__(self, view, write, how):
        super().__init__()
        torch.manual_seed(1)
        self.how, self.write = how, write
        self.unit, self.scale = Viewing(view, inner=how == "nested"), nn.Linear(1, 1)

    def forward(self, x):
        x = x.clone().requires_grad_(self.how != "no input gradient")
        o = checkpoint(self.unit, x, use_reentrant=False) if self.how == "checkpoint" else self.unit(x)
        self.write(o, self.scale(x.new_ones(1)))
        return o.square().mean()


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("reshard", [None, False])
@both_transports
def test_writes_to_returned_views(ctx, transport, reshard):
    hows = ("plain", "nested", "checkpoint", "no input gradient")
    for number, view in enumerate(list(VIEWS.values()) * 2):
        write, how = list(WRITES.values())[number % 4], hows[(number + number // 4) % 4]
        plain = Writing(view, write, how)
        units = ("unit.linear", "unit") if how == "nested" else ("unit",)
        ours = shard(ctx, copy.deepcopy(plain), units, transport=transport, reshard_after_forward=reshard)
        train_alike(ctx, plain, ours, lambda m, rank, step: m(inputs(rank, step)), num_steps=1, **CLOSE)


class Members(nn.Module):
    """`norm` and `head` are one unit; `calls` names who runs, in which order, each on an output of its own."""

    def __init__(self, calls):
        super().__init__()
        torch.manual_seed(0)
        self.calls, self.inner = calls, nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        self.kept = []
        h = self.inner(x)
        for call in self.calls.split():
            run = getattr(self, call.strip("+!"))
            o = checkpoint(run, h, use_reentrant="!" in call) if call[-1] in "+!" else run(h)
            h = o if call == "norm" else h
            self.kept.append(o)
        return self.kept[0]

    def loss(self, x):
        self(x)
        return sum((i + 1) * kept.square().mean() for i, kept in enumerate(self.kept))


CALLS = ["norm head", "norm head head", "head norm head", "head", "norm", "head head", "head norm norm head"]
RECOMPUTED = ["norm head+", "norm+ head+ head+", "norm head! head", "head!", "norm! head!"]


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("reshard", [None, False])
@both_transports
def test_members_that_run_alone(ctx, transport, reshard):
    """In any order and number, also recomputed: every output of a member starts the unit's backward."""
    for calls in CALLS + RECOMPUTED:
        plain = Members(calls)
        ours = shard(
            ctx, copy.deepcopy(plain), ("inner", "norm+head"), transport=transport, reshard_after_forward=reshard
        )
        train_alike(ctx, plain, ours, lambda m, rank, step: m.loss(inputs(rank, step)), num_steps=2, **CLOSE)


class Bypassing(nn.Module):
    """Keeps a tensor besides its output. Tests also compute its second-order gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        self.aux = self.b(self.a(x).tanh())
        return self.a(x)


def bypassing_loss(model, x):
    model(x)
    return model.unit.aux.square().mean()


def penalty(model, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    return g.square().sum()


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("kind", ["bypasses the output", "second order"])
@both_transports
def test_losses_that_need_resharded_parameters(ctx, transport, kind):
    """The error names ways out, and each of them gives the unsharded model's gradients."""
    only_fsdp2x(ctx)
    loss_of = penalty if kind == "second order" else bypassing_loss
    plain = nn.Sequential()
    plain.add_module("unit", Bypassing())

    def make(**options):
        return shard(ctx, copy.deepcopy(plain), ("unit",), transport=transport, **options)

    with pytest.raises(RuntimeError, match="was used while it is resharded") as error:
        loss_of(make(), inputs(ctx.rank)).backward()
    for part in (
        "a tensor that its unit's forward returned",
        "reshard_after_forward=False",
        "set_reshard_after_backward(False)",
    ):
        assert part in str(error.value)
    ours = make(reshard_after_forward=False)
    if kind == "second order":
        ours.set_reshard_after_backward(False)

    mean_of_ranks(plain, lambda model, rank: loss_of(model, inputs(rank)), ctx.world)
    loss_of(ours, inputs(ctx.rank)).backward()
    for unit in (ours, ours.unit):
        unit.reshard()
    same(grads(ours), grads(plain), "gradients", **CLOSE)


class Recomputing(nn.Module):
    """`look` is called when the backward has come to the input."""

    def __init__(self, reentrant, span):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.span, self.look = reentrant, span, lambda: None
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        x = x.clone().requires_grad_()
        x.register_hook(lambda gradient: self.look())
        for i in range(0, 4, self.span):
            x = checkpoint(nn.Sequential(*self.blocks[i : i + self.span]), x, use_reentrant=self.reentrant)
        return x.square().mean()


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("span", [1, 2])
@both_transports
def test_prefetch_with_checkpoints(ctx, transport, reentrant, span):
    """Explicit forward prefetch gathers nothing again whose backward is over: as many gathers as without it."""
    only_fsdp2x(ctx)
    plain, gathers = Recomputing(reentrant, span), []
    for prefetches in (False, True):
        ours = shard(ctx, copy.deepcopy(plain), [f"blocks.{i}" for i in range(4)], transport=transport)
        seen = []
        ours.look = lambda model=ours, seen=seen: seen.extend(u.param_state for u in fsdp2x.describe(model).units[1:])
        for block, following in zip(ours.blocks, list(ours.blocks)[1:], strict=False):
            block.set_modules_to_forward_prefetch([following] if prefetches else [])
        train_alike(ctx, plain, ours, lambda m, rank, step: m(inputs(rank, step)), num_steps=2, **CLOSE)
        assert seen == ["SHARDED"] * 8, seen
        gathers.append(fsdp2x.describe(ours).stats["gathers"])
        plain = Recomputing(reentrant, span)
    assert gathers[0] == gathers[1], gathers


class Branches(nn.Module):
    """Units that run on every rank, with weights that one rank alone uses: before, inside, and around other units."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.extra, self.unused = (nn.Linear(6, 6) for _ in range(4))
        self.optional = Optional()

    def forward(self, x, uses):
        x = self.optional(self.first(x).tanh(), uses)
        x = self.last(x)
        return (self.extra(x) if uses else x).square().mean()


class Optional(nn.Module):
    """All of its weights are optional."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, uses):
        return self.b(self.a(x).tanh()) if uses else x * 2


@distributed(world_sizes=(2, 3, 4))
@pytest.mark.parametrize("reshard", [None, False])
@both_transports
@pytest.mark.each_world
def test_units_that_one_rank_alone_has_gradients_of(ctx, transport, reshard):
    """In the middle of a backward, and at its end; over all transports, without a setting; on 4 ranks with replicas."""
    only_fsdp2x(ctx)
    plain = Branches()
    options = {"mesh": mesh_of("2d" if ctx.world == 4 else "1d", ctx.world), "reshard_after_forward": reshard}
    ours = shard(ctx, copy.deepcopy(plain), ("first", "optional", "last"), transport=transport, **options)

    def loss_of(model, rank, step):
        return model(inputs(rank, step), uses=rank == (step + 1) % ctx.world)

    train_alike(ctx, plain, ours, loss_of, num_steps=3, **CLOSE)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("kind", ["inputs alone", "two losses"])
def test_what_ranks_share_costs_no_collective(ctx, kind):
    """Over a process group nothing is reduced for ranks that cannot have a gradient."""
    only_fsdp2x(ctx)
    model = shard(ctx, nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), ("0", "1"), transport="process_group")
    x = inputs(ctx.rank).requires_grad_()
    if kind == "inputs alone":
        torch.autograd.grad(model(x).sum(), x)
        expected = 0
    else:
        first, second = model(x), model(x)
        first.sum().backward()
        second.sum().backward()
        expected = 4
    assert fsdp2x.describe(model).stats["reductions"] == expected


def wrapped() -> nn.Module:
    """A wrapper around a model around a backbone of units, with weights of the root at each level."""
    return nn.Sequential(OrderedDict(model=nn.Sequential(OrderedDict(backbone=Stack(), head=nn.Linear(3, 3)))))


PAST = {
    "the model": lambda m, x: m.model(x),
    "backbone and head": lambda m, x: m.model.head(m.model.backbone(x)),
    "each alone": lambda m, x: m.model.backbone.norm(m.model.backbone.blocks[0](x)),
}


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("units", [("model.backbone.blocks.0", "model.backbone.blocks.1"), ()])
@both_transports
@pytest.mark.each_pair
def test_modules_called_past_the_root(ctx, transport, units):
    """After a forward without gradients, in which nothing stays gathered: each is a forward of the root."""
    only_fsdp2x(ctx)
    for name, call in PAST.items() if units else [("the model", PAST["the model"])]:
        plain = wrapped()
        ours = shard(ctx, copy.deepcopy(plain), units, transport=transport)

        def loss_of(model, rank, step, call=call):
            with torch.no_grad():
                reference = model(inputs(rank, step)).square().mean()
                same(call(model, inputs(rank, step)), call(model, inputs(rank, step)), "again")
            if step == 1:
                with pytest.raises(RuntimeError):
                    call(model, torch.zeros(2, 5))
            return call(model, inputs(rank, step)).square().mean() + reference

        train_alike(ctx, plain, ours, loss_of, num_steps=3, **CLOSE)
        with torch.no_grad():
            call(ours, inputs(ctx.rank))
        assert {unit.param_state for unit in fsdp2x.describe(ours).units} == {"SHARDED"}, name
        ours.unshard()
        with torch.no_grad():
            call(ours, inputs(ctx.rank))
        assert fsdp2x.describe(ours).units[0].param_state == "UNSHARDED", name
        ours.reshard()


STRIDED = {
    "transposed": lambda weight: weight.t().clone(memory_format=torch.preserve_format),
    "columns of more": lambda weight: torch.cat([weight, weight], dim=1)[:, ::2],
    "rows of more": lambda weight: torch.cat([weight, weight], dim=1)[:, : weight.shape[1]],
    "channels_last": lambda weight: weight.view(6, 3, 2, 1).to(memory_format=torch.channels_last),
}


class Flat(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.flatten(1), self.bias)


def after_a_step(kind):
    """A model with such a weight, and its optimizer after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(Flat(6, 6), nn.Linear(6, 2))
    model[0].weight = nn.Parameter(STRIDED[kind](model[0].weight.detach()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(inputs(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@distributed(world_sizes=(1, 2, 4))
@both_transports
@pytest.mark.parametrize("kind", STRIDED)
def test_parameters_that_are_not_contiguous(ctx, transport, kind):
    """They become contiguous. Values, moments of an optimizer that exists already, and state dicts stay."""
    only_fsdp2x(ctx)
    (model, optimizer), (ours, moved) = after_a_step(kind), after_a_step(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard(ctx, ours, ["0"], transport=transport)
    named = [str(one.message) for one in caught if "parameter 'weight' of Flat is not contiguous" in str(one.message)]
    assert len(named) == (kind != "channels_last")
    fsdp2x.rebind_optimizer(moved, ours)
    if transport == "shm":
        moved = fsdp2x.local_optimizer(moved)
    same(full(ours.state_dict()), dict(model.state_dict()))
    loss_of = lambda model, rank, step: model(inputs(rank, step)).square().mean()  # noqa: E731
    train_alike(ctx, model, ours, loss_of, [optimizer, moved], **CLOSE)


@distributed(world_sizes=(2,))
def test_a_parameter_whose_elements_share_memory_is_refused(ctx):
    only_fsdp2x(ctx)
    model = nn.Linear(6, 6)
    model.bias = nn.Parameter(torch.ones(1).expand(6))
    with pytest.raises(
        NotImplementedError, match=r"parameter 'bias' of Linear is not contiguous: .* \(0,\)\. Replace it"
    ):
        shard(ctx, model)


OUT_OF_ORDER = {
    "the root first": (["", "blocks.1"], "already belongs to the unit of Stack, so Mlp .* for 'blocks.1' first"),
    "a block first": (["blocks.1", "blocks.1.up", ""], "the unit of Mlp, so Linear .* for 'up' first"),
    "the root, then a list": (["", "blocks.1+blocks.2"], "the unit of Stack, so Mlp .* for 'blocks.1' first"),
    "a common part": (["blocks.0", "blocks.1"], "the unit of Mlp, so Mlp .* for Linear first, because both"),
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("order", OUT_OF_ORDER)
@pytest.mark.parametrize("gathered", [False, True])
def test_an_inner_module_after_the_outer_one(ctx, order, gathered):
    """Also while the outer unit is gathered, when its parameters look like plain ones. Nothing changes."""
    only_fsdp2x(ctx)
    model = Stack()
    if order == "a common part":
        model.blocks[1].up = model.blocks[0].up
    (first, *others), message = OUT_OF_ORDER[order]
    outer = fsdp2x.fully_shard(model.get_submodule(first))
    if gathered:
        outer.unshard()
    before = {name: (type(module), module._parameters) for name, module in model.named_modules()}
    parts = [model.get_submodule(name) for name in others[0].split("+")]
    with pytest.raises(ValueError, match=message):
        fsdp2x.fully_shard(parts if len(parts) > 1 else parts[0])
    assert before == {name: (type(module), module._parameters) for name, module in model.named_modules()}
    outer(inputs(ctx.rank)).sum().backward()


class Inner(nn.Module):
    """Takes inner gradients in its forward, through units that it calls, and uses its own weights afterwards."""

    def __init__(self, how, depth):
        super().__init__()
        torch.manual_seed(2)
        self.how = how
        self.first, self.energy, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        if depth:
            self.energy = Inner(how, depth - 1)

    def forward(self, x):
        x = self.first(x)
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            for _ in range(2 if self.how == "loop" else 1):
                energy = self.energy(z).square().sum()
                if self.how == "backward":
                    energy.backward(inputs=[z])
                    slope = z.grad
                else:
                    (slope,) = torch.autograd.grad(energy, z)
                z = z.detach().requires_grad_()
        return self.head(x + slope)


@distributed(world_sizes=(1, 2, 3))
@both_transports
@pytest.mark.parametrize("how", ["grad", "loop", "backward"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("units", [["energy"], ["first", "energy", "head"]])
def test_a_backward_inside_a_forward(ctx, transport, how, depth, units):
    """The forward keeps its parameters, also of a unit inside it, in training, accumulation, and evaluation."""
    only_fsdp2x(ctx)
    inner = ["energy.energy", "energy.first"] if depth else []
    reference, model = Inner(how, depth), shard(ctx, Inner(how, depth), [*inner, *units], transport=transport)
    loss_of = lambda model, rank, step: model(inputs(rank, step)).square().mean()  # noqa: E731
    train_alike(ctx, reference, model, loss_of, **CLOSE)
    with torch.no_grad():
        same(model(inputs(ctx.rank)), reference(inputs(ctx.rank)), **CLOSE)
    with fsdp2x.accumulate(model, last=False):
        loss_of(model, ctx.rank, 7).backward()
    model.zero_grad()
    train_alike(ctx, reference, model, loss_of, **CLOSE)


@distributed(world_sizes=(1,))
def test_parameters_that_share_memory_are_refused(ctx):
    """PEFT ties adapters of tied embeddings so: a contiguous copy would untie them."""
    import fsdp2x

    only_fsdp2x(ctx)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    with pytest.raises(NotImplementedError, match="'1.weight' .* shares its memory with '0.weight'"):
        fsdp2x.fully_shard(model)
    model[1].weight = nn.Parameter(model[0].weight.detach().t().clone(memory_format=torch.preserve_format))
    fsdp2x.fully_shard(model)
