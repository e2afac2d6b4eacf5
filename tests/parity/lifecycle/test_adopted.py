"""Parameters registered after `fully_shard` train as in the unsharded model, from the first rank's values."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp2x
from harness import distributed
from memory import LEDGER
from models import inputs
from reference import adamw_of, both_transports, mesh_of, only_fsdp2x, params, same, shard, train_alike
from training import shared_folder

EXACT = {"rtol": 1e-5, "atol": 1e-6}
UNITS = ("parts.0", "parts.1")


class Part(nn.Module):
    """A layer that uses what it is given later: a bias, a scale, adapters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)
        self.adapters = nn.ModuleDict()

    def forward(self, x):
        y = self.layer(x)
        for adapter in self.adapters.values():
            y = y + adapter(x)
        return torch.tanh(y * self.scale if hasattr(self, "scale") else y)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.extra = nn.ModuleList()

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x) + sum(head(x) for head in self.extra)


def a_head(model):
    model.extra.append(nn.Linear(6, 3))


def parameters_of_a_unit_below(model):
    model.parts[1].scale = nn.Parameter(torch.randn(6))
    model.parts[0].layer.bias = nn.Parameter(torch.randn(6))


def adapters(model):
    for part in model.parts:
        part.adapters["low rank"] = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False))


def a_head_in_place_of_another(model):
    model.head = nn.Linear(6, 3)


def a_frozen_adapter(model):
    adapters(model)
    model.parts[0].adapters.requires_grad_(False)


def one_adapter_in_two_units(model):
    adapters(model)
    model.parts[1].adapters = model.parts[0].adapters


def a_head_with_a_units_weight(model):
    a_head(model)
    model.extra[0].weight = model.head.weight


def everything(model):
    a_head(model)
    parameters_of_a_unit_below(model)
    adapters(model)


ATTACH = [
    a_head,
    parameters_of_a_unit_below,
    adapters,
    a_head_in_place_of_another,
    a_frozen_adapter,
    one_adapter_in_two_units,
    a_head_with_a_units_weight,
]


def loss_of(model, rank, step):
    return model(inputs(rank, step)).square().mean()


def grow(ctx, attach, twin, model):
    """Attaches to both; each rank of the sharded model draws other values, and the first one's count."""
    torch.manual_seed(0)
    attach(twin)
    torch.manual_seed(ctx.rank)
    attach(model)


@distributed(world_sizes=(2, 3))
@both_transports
@pytest.mark.parametrize("when", ["first forward", "between steps"])
@pytest.mark.parametrize("attach", ATTACH)
def test_trains_as_unsharded(ctx, attach, when, transport):
    only_fsdp2x(ctx)
    model, twin = Growing(), Growing()
    shard(ctx, model, UNITS, transport=transport)
    if when == "between steps":
        train_alike(ctx, twin, model, loss_of, num_steps=1, **EXACT)
    grow(ctx, attach, twin, model)
    optimizers = adamw_of(twin, model)

    def clip():
        norms = [fsdp2x.clip_grad_norm_(one.parameters(), 0.05) for one in (model, twin)]
        assert norms[1] > 0.05
        same(*norms, **EXACT)

    train_alike(ctx, twin, model, loss_of, optimizers, before_step=clip, **EXACT)
    held = {id(param) for param in optimizers[1].param_groups[0]["params"]}
    assert held == {id(param) for param in model.parameters() if param.requires_grad}


def by_assignment(model, step):
    for param in model.parameters():
        if type(param) is nn.Parameter:
            param.data = param.data * (1 + step / 8)


def by_swapping(model, step):
    for module in model.modules():
        for name, param in module._parameters.items():
            if type(param) is nn.Parameter:
                module.load_state_dict({name: param.detach() + step / 8}, strict=False, assign=True)


@distributed(world_sizes=(2,))
@both_transports
@pytest.mark.parametrize("change", [by_assignment, by_swapping])
def test_values_that_somebody_assigns_count(ctx, change, transport):
    only_fsdp2x(ctx)
    model, twin = Growing(), Growing()
    shard(ctx, model, UNITS, transport=transport)
    grow(ctx, everything, twin, model)
    names = [name for name, param in model.named_parameters() if type(param) is nn.Parameter]
    for step in range(3):
        train_alike(ctx, twin, model, lambda m, rank, _, step=step: loss_of(m, rank, step), num_steps=1, **EXACT)
        change(model, step)
        for name, param in twin.named_parameters():
            if name in names:
                param.data = param.data * (1 + step / 8) if change is by_assignment else param.data + step / 8


@distributed(world_sizes=(2,))
def test_another_dtype_takes_effect(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, Growing(), UNITS)
    everything(model)
    loss_of(model, ctx.rank, 0).backward()
    model.extra.bfloat16()
    with pytest.raises(RuntimeError, match="must have the same dtype"):  # from the layer itself
        model(inputs(ctx.rank))
    model.extra.float()
    model.zero_grad()
    loss_of(model, ctx.rank, 0).backward()
    assert all(param.grad.dtype == torch.float32 for param in model.extra.parameters())


# ---- under settings: as what was attached before


def pair(ctx, **options):
    """A model that was sharded before it grew, and one that grew before; with the same values."""
    late, early = Growing(), Growing()
    shard(ctx, late, UNITS, **options)
    grow(ctx, everything, early, late)
    return late, shard(ctx, early, UNITS, **options)


def steps(ctx, model, optimizer, numbers=range(2), **accumulation):
    """Losses of steps of two micro-batches, and the norms of their gradients."""
    seen = []
    for number in numbers:
        for micro in range(2):
            with fsdp2x.accumulate(model, last=micro == 1, **accumulation):
                loss = loss_of(model, ctx.rank, 2 * number + micro)
                loss.backward()
            seen.append(loss.detach())
        seen.append(fsdp2x.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return seen


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS = {
    "bf16": lambda ctx: {"mp_policy": BF16},
    "replicas": lambda ctx: {"mesh": mesh_of("hsdp", ctx.world)},
    "offload": lambda ctx: {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "int": lambda ctx: {"reshard_after_forward": 2},
    "kept": lambda ctx: {"reshard_after_forward": False},
}
OPTIMIZERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fsdp2x": lambda params: fsdp2x.optim.AdamW(params, lr=1e-2),
    "8 bits": lambda params: fsdp2x.optim.AdamW(params, lr=1e-2, moments_dtype="int8"),
}


@distributed(world_sizes=(4,))
@both_transports
@pytest.mark.parametrize("before_last", ["nothing", "reduce_scatter"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_settings_act_as_on_what_was_attached_before(ctx, optimizer, setting, before_last, transport):
    only_fsdp2x(ctx)
    late, early = pair(ctx, transport=transport, **SETTINGS[setting](ctx))
    seen = []
    for model in (late, early):
        stepped = OPTIMIZERS[optimizer](model.parameters())
        losses = steps(ctx, model, stepped, before_last=before_last)
        seen.append([losses, params(model)])
    exact = {"rtol": 1e-2, "atol": 1e-2} if setting == "bf16" or optimizer == "8 bits" else EXACT
    same(*seen, **exact)
    values = torch.cat([p.detach().flatten() for p in late.parameters() if type(p) is nn.Parameter])
    everyone = [torch.empty_like(values) for _ in range(ctx.world)]
    dist.all_gather(everyone, values)
    same(everyone, [values] * ctx.world)


# ---- saved and loaded


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("form", ["sharded", "full"])
@pytest.mark.parametrize("optimizer", ["torch", "fsdp2x"])
def test_a_run_goes_on_from_a_checkpoint(ctx, form, optimizer, after_forward):
    only_fsdp2x(ctx)
    make = OPTIMIZERS[optimizer]

    def begun():
        model = shard(ctx, Growing(), UNITS)
        torch.manual_seed(ctx.rank)
        everything(model)
        return model, make(model.parameters())

    first, held = begun()
    steps(ctx, first, held)
    with shared_folder(ctx) as folder:
        fsdp2x.checkpoint.save(folder / "saved", first, held, step=2, form=form)
        expected = steps(ctx, first, held, range(2, 4)), params(first)
        second, other = begun()
        if after_forward:
            steps(ctx, second, other, range(7, 8))
        fsdp2x.checkpoint.load(folder / "saved", second, other)
        same([steps(ctx, second, other, range(2, 4)), params(second)], list(expected))


@distributed(world_sizes=(2,))
@both_transports
def test_reports_count_them(ctx, transport):
    only_fsdp2x(ctx)
    model = shard(ctx, Growing(), UNITS, transport=transport)
    everything(model)
    counts = []
    for step in range(3):
        loss_of(model, ctx.rank, step).backward()
        model.zero_grad()
        stats = fsdp2x.describe(model).stats
        counts.append([stats["gathers"], stats["reductions"]])
    report = fsdp2x.memory_report(model)
    assert {name: getattr(report, name) for name in LEDGER} == report.measured
    made = [after - before for before, after in zip(*counts[1:], strict=True)]
    assert made == [report.traffic.gathers, report.traffic.reductions]
    num_elements = sum(param.numel() for param in model.parameters())
    assert sum(unit.num_elements for unit in fsdp2x.describe(model).units) == num_elements
