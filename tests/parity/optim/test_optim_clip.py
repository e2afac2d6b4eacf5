"""Clipping against torch's, by the CPU's kernels and by the twins of a device's; within steps; under install()."""

import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2x
import models
from device_reference import clip_by_reference, step_by_reference
from fsdp2x.base.agreement import Agreement
from fsdp2x.optim import AdamW
from fsdp2x.optim.clip import replacements
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import full, params, same, shard

KINDS = {
    "float32": {},
    "maximize": {"maximize": True, "amsgrad": True},
    "bf16": {"moments_dtype": torch.bfloat16},
    "int8": {"moments_dtype": "int8"},
}


def gradients(model):
    return {name: param.grad.to_local().clone() for name, param in model.named_parameters() if param.grad is not None}


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_the_method_of_fsdp1_clips(ctx):
    ours, method = (shard(ctx, Stack(), STACK_UNITS) for _ in range(2))
    for model in (ours, method):
        models.step(ctx, model, None, 0)
    same(method.clip_grad_norm_(0.1), fsdp2x.clip_grad_norm_(ours.parameters(), 0.1))
    same(gradients(method), gradients(ours))


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_gathered_parameters_are_refused(ctx):
    """Their gradients are those of the shards, so that a norm without them would be too small."""
    whole = Stack()
    before = list(whole.parameters())
    model = shard(ctx, whole, STACK_UNITS)
    model.set_reshard_after_backward(False)
    sharded = list(model.parameters())
    model(inputs(0, ctx.rank)).sum().backward()
    _, with_norm, by_value = (ours for _, ours in replacements())
    for params_, kind in ((list(model.parameters()), "gathered"), (before, "from before fully_shard")):
        for call in (
            lambda given: fsdp2x.clip_grad_norm_(given, 1.0),
            lambda given: by_value(given, 1.0),
            lambda given: with_norm(given, 1.0, torch.tensor(2.0)),
        ):
            with pytest.raises(RuntimeError, match=kind):
                call(params_)
    with pytest.raises(RuntimeError, match="gathered"):
        model.clip_grad_norm_(1.0)
    norm = fsdp2x.clip_grad_norm_(sharded, 1e-3)
    for unit in model.modules():
        if hasattr(unit, "reshard"):
            unit.reshard()
    assert norm > 1e-3
    same(fsdp2x.clip_grad_norm_(model.parameters(), 1.0), torch.tensor(1e-3), rtol=1e-3, atol=0.0)


@distributed(world_sizes=(1, 2, 3), only_fsdp2x=True)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_clipping_first(ctx, kind):
    """The bits agree for every way to clip and step.

    Cases: uneven and empty shards, a parameter without a gradient, and a norm that needs no clipping.
    """
    sharded = [shard(ctx, Stack(), STACK_UNITS) for _ in range(4)]
    # By the CPU and by twins: after clipping, and with clipping in the step.
    first, there, fused, fused_there = optimizers = [
        AdamW(model.parameters(), lr=1e-2, **KINDS[kind]) for model in sharded
    ]
    assert fused.grad_norm is None
    for optimizer in (there, fused_there):
        step_by_reference(optimizer)
    for number, max_norm in enumerate((0.1, 1e9, 0.1)):
        fused.max_grad_norm = fused_there.max_grad_norm = max_norm
        for model in sharded:
            models.step(ctx, model, None, number)
            if number == 1:
                model.blocks[1].up.weight.grad = None
        before = gradients(sharded[2])
        norm = fsdp2x.clip_grad_norm_(sharded[0].parameters(), max_norm)
        with clip_by_reference():
            same(fsdp2x.clip_grad_norm_(sharded[1].parameters(), max_norm), norm, "norm")
            fused_there.step()
        for optimizer in (first, there, fused):
            optimizer.step()
        same(gradients(sharded[1]), gradients(sharded[0]), "clipped gradients")
        for model, optimizer in zip(sharded[2:], (fused, fused_there), strict=True):
            same(optimizer.grad_norm, norm, "norm")
            same(gradients(model), before, "gradients, which stay as they are")
        for model in sharded[1:]:
            same(params(model), params(sharded[0]), "parameters")
        for optimizer in optimizers:
            optimizer.zero_grad()
    for optimizer in optimizers[1:]:
        same(full(optimizer.state_dict()), full(first.state_dict()), "states")
    assert there._on_device.num_plans >= 2 and first._on_device.num_plans == 0


@distributed(world_sizes=(2,))
def test_gradients_that_torch_steps(ctx):
    """The norm covers an f64 parameter, one whose gradient has another placement, and a plain one."""
    mesh = init_device_mesh("cpu", (ctx.world,))
    torch.manual_seed(0)
    values = [torch.randn(4, 6), torch.randn(5, dtype=torch.float64), torch.randn(3)]
    results = []
    for fuses in (False, True):
        whole = nn.Parameter(distribute_tensor(values[0].clone(), mesh, [Replicate()]))
        wide, plain = (nn.Parameter(value.clone()) for value in values[1:])
        every = [whole, wide, plain]
        optimizer = AdamW(every, lr=1e-2, max_grad_norm=0.5 if fuses else None)
        whole.grad = DTensor.from_local(torch.full((4, 6), float(ctx.rank + 1)), mesh, [Partial()])
        wide.grad, plain.grad = torch.full((5,), 2.0, dtype=torch.float64), torch.full((3,), -1.0)
        norm = None if fuses else fsdp2x.clip_grad_norm_(every, 0.5)
        optimizer.step()
        norm = optimizer.grad_norm if fuses else norm
        same(norm, torch.tensor(24 * 9.0 + 5 * 4.0 + 3.0, dtype=torch.float64).sqrt(), "norm", rtol=1e-12, atol=0.0)
        results.append((full(every), full(optimizer.state_dict()["state"])))
    same(results[1], results[0], rtol=1e-6, atol=1e-7)


def plain_params(*dtypes):
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(37).to(dtype)) for dtype in dtypes]
    for param in made:
        param.grad = torch.randn(37).to(param.dtype)
    return made


def test_half_precision_gradients_are_not_rounded_again():
    """Clipped gradients in bf16 would lose bits: the step is that of their product with the factor in float32."""
    (param,) = plain_params(torch.bfloat16)
    wide = nn.Parameter(param.detach().float())
    wide.grad = param.grad.float()
    fused = AdamW([param], lr=1e-2, moments_dtype=torch.float32, max_grad_norm=0.3)
    first = AdamW([wide], lr=1e-2)
    norm = fsdp2x.clip_grad_norm_([wide], 0.3)
    fused.step()
    first.step()
    assert torch.equal(fused.grad_norm, norm)
    assert torch.equal(param, wide.to(torch.bfloat16))
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(fused.state[param][name], first.state[wide][name]), name


def test_settings():
    every = plain_params(torch.float32)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"max_grad_norm must be .* got {wrong}"):
            AdamW(every, lr=1e-2, max_grad_norm=wrong)
    optimizer = AdamW(every, lr=1e-2, max_grad_norm=0.1)
    optimizer.step()
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.max_grad_norm == 0.1
    copied.load_state_dict(optimizer.state_dict())
    assert copied.max_grad_norm == 0.1
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.grad_norm == 0.0
    measures = AdamW(every, lr=1e-2, max_grad_norm=math.inf)
    every[0].grad = torch.full((37,), 2.0)
    measures.step()
    same(measures.grad_norm, torch.tensor(2.0 * math.sqrt(37)), rtol=1e-6, atol=0.0)
    every[0].grad = torch.ones(37).to_sparse()
    with pytest.raises(RuntimeError, match="layout"):
        optimizer.step()


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("in_step", [True, False])
def test_a_clipped_model_can_move(ctx, in_step):
    """The move swaps parameters, which torch can only do if they have no weak references."""
    model = shard(ctx, Stack(), STACK_UNITS)
    optimizer = AdamW(model.parameters(), max_grad_norm=0.1 if in_step else None)
    model(inputs(ctx.rank)).square().mean().backward()
    if in_step:
        optimizer.step()
    else:
        fsdp2x.clip_grad_norm_(model.parameters(), 0.1)
    before = params(model)
    model.to("cpu").float()
    same(params(model), before)


# --- clipping alone --------------------------------------------------------------------------------------------------


def clip(model, max_norm, norm_type=2.0):
    """The same gradients by the CPU's kernels, and then by the twins; returns the norm and the number of plans."""
    before = gradients(model)
    expected = fsdp2x.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    clipped = gradients(model)
    for param, grad in zip(model.parameters(), before.values(), strict=True):
        param.grad.to_local().copy_(grad)
    with clip_by_reference() as kept:
        norm = fsdp2x.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert type(norm) is torch.Tensor and norm.ndim == 0
    same(norm, expected, "norm", rtol=1e-7, atol=0.0)
    same(gradients(model), clipped, "gradients", rtol=1e-6, atol=0.0)
    return norm, kept.num_plans


def clip_gathered(model, norm_type, max_norm):
    whole = torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()])
    norm, num_plans = clip(model, max_norm, norm_type)
    assert norm > max_norm
    same(norm, torch.linalg.vector_norm(whole, norm_type), "norm", rtol=1e-5, atol=1e-7)
    clipped = torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()])
    same(clipped, whole * (max_norm / float(norm)), "gradients", rtol=1e-4, atol=1e-8)
    return num_plans


def tensor_parallel(ctx, mesh):
    model = Stack(width=8, hidden=12)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return shard(ctx, model, STACK_UNITS, mesh=mesh["dp"])


@distributed(world_sizes=(4,), only_fsdp2x=True)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
def test_tensor_parallelism(ctx, norm_type):
    """Weights cut by both axes, biases of the second linear by one, and norms and heads on a mesh of their own.

    Torch refuses gradients of several meshes in one call, so the gathered gradients are what is compared with. A launch
    per set of process groups, an all-reduce per group; then a step.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours, theirs = (tensor_parallel(ctx, mesh) for _ in range(2))
    optimizers = AdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for number in range(2 if norm_type == 2.0 else 1):
        ours(inputs(mesh["dp"].get_local_rank(), number, width=8)).square().mean().backward()
        assert clip_gathered(ours, norm_type, 0.01) >= 2 or norm_type != 2.0
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = param.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        same(param.to_local().detach(), other.to_local().detach(), rtol=1e-6, atol=1e-6)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_partial_gradients_are_scaled_where_they_lie(ctx):
    """Summed by torch after the reduction that they wait for; the plan stays the same for sum and product."""
    mesh = init_device_mesh("cpu", (ctx.world,))
    torch.manual_seed(0)
    model = nn.ParameterDict()
    model["whole"] = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [Replicate()]))
    model["plain"] = nn.Parameter(torch.randn(5))
    model["whole"].grad = DTensor.from_local(torch.full((4, 6), float(ctx.rank + 1)), mesh, [Partial()])
    model["plain"].grad = torch.full((5,), 2.0)
    with clip_by_reference() as kept:
        norm = fsdp2x.clip_grad_norm_(list(model.parameters()), 1.0)
        assert kept.num_plans == 2
    expected = torch.tensor(24 * 9.0 + 5 * 4.0).sqrt()
    same(norm, expected, "norm", rtol=1e-6, atol=0.0)
    same(model["whole"].grad.to_local(), torch.full((4, 6), ctx.rank + 1.0) / expected, rtol=1e-5, atol=0.0)
    same(model["plain"].grad, torch.full((5,), 2.0) / expected, rtol=1e-5, atol=0.0)


@distributed(world_sizes=(2, 3), only_fsdp2x=True)
def test_a_rank_without_gradients_takes_part(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    models.step(ctx, model)
    if ctx.rank == ctx.world - 1:
        model.zero_grad()
    own = sum((grad.double().square().sum() for grad in gradients(model).values()), torch.zeros(()).double())
    torch.distributed.all_reduce(own)
    norms = [fsdp2x.clip_grad_norm_(model.parameters(), 1e9)]
    with clip_by_reference():
        norms.append(fsdp2x.clip_grad_norm_(model.parameters(), 0.01))
    for norm in norms:
        same(norm.double(), own.sqrt(), "norm", rtol=1e-6, atol=1e-9)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_clipping_needs_one_all_reduce(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    models.step(ctx, model)
    calls = []
    all_reduce = Agreement.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "all_reduce", lambda self, *a: (calls.append(a), all_reduce(self, *a)))
        fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
    assert len(calls) == 1


# Norms and `foreach`: each value of both.
NORMS = ((1.0, None), (2, True), (3.0, False), (math.inf, None))
# What is not finite, in which norm, and in which row.
BROKEN = ((math.nan, 2.0, 0), (math.inf, 2.0, -1), (math.nan, math.inf, -1), (math.inf, math.inf, 0))


def places_of(arrangement: str, world: int) -> list:
    """Mesh and placements of each gradient in turn; None: it is plain."""
    one, two = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    return {
        "plain among sharded": [(one, [Shard(0)]), None],
        "two meshes": [(one, [Shard(0)]), (two, [Replicate(), Shard(0)]), (two, [Shard(0), Shard(1)])],
        "all kinds": [None, (one, [Replicate()]), (two, [Replicate(), Shard(1)]), (one, [Shard(1)])],
        "one mesh": [(two, [Replicate(), Shard(0)]), (two, [Replicate(), Replicate()]), (two, [Shard(0), Shard(1)])],
    }[arrangement]


def parameters(places: list, *, broken: float | None = None, row: int = 0) -> tuple[list, list]:
    """With gradients, cut as ``places`` says, and the same ones plain; one parameter has no gradient."""
    generator = torch.Generator().manual_seed(0)
    cut, plain = [], []
    for index, shape in enumerate([(5, 3), (4, 4), (1, 2), (7, 6), (3, 8), (2, 2)]):
        weight, grad = torch.randn(2, *shape, generator=generator, dtype=torch.float64 if index == 3 else torch.float32)
        if broken is not None and index == 3:
            grad[row, row] = broken
        plain.append(nn.Parameter(weight.clone()))
        place = places[index % len(places)]
        cut.append(nn.Parameter(weight if place is None else distribute_tensor(weight, *place)))
        if index != 4:
            plain[-1].grad = grad.clone()
            cut[-1].grad = grad if place is None else distribute_tensor(grad, *place)
    return cut, plain


def numbers(grad: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of the full gradient, in which a NaN is a number that equals itself."""
    return None if grad is None else full(grad).nan_to_num(nan=777.0)


def assert_alike(cut: list, plain: list, what) -> None:
    for one, other in zip(cut, plain, strict=True):
        same(numbers(one.grad), numbers(other.grad), what, rtol=1e-5, atol=1e-7)


@distributed(world_sizes=(2, 4), only_fsdp2x=True)
@pytest.mark.parametrize("arrangement", ["plain among sharded", "two meshes", "all kinds", "one mesh"])
def test_clips_as_if_unsharded(ctx, arrangement):
    places = places_of(arrangement, ctx.world)
    with fsdp2x.install():
        for norm_type, foreach in NORMS:
            cut, plain = parameters(places)
            what = f"norm {norm_type}, foreach {foreach}"
            expected = nn.utils.clip_grad_norm_(plain, 0.7, norm_type)
            with CommDebugMode() as comm:
                norm = nn.utils.clip_grad_norm_((param for param in cut), 0.7, norm_type, foreach=foreach)
            if arrangement == "one mesh" and norm_type == math.inf:
                counted = comm.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
                assert counted == sum(size > 1 for size in norm.device_mesh.shape), "one for each axis"
            assert isinstance(norm, DTensor), "callers of torch's function ask for full_tensor()"
            if arrangement != "one mesh" or norm_type == math.inf:  # torch's own is partial there
                assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
            same(norm.full_tensor().double(), expected.double(), what, rtol=1e-5, atol=0.0)
            assert_alike(cut, plain, what)
        # In two calls, with a DTensor or a plain norm between them, as frameworks do.
        for whole in (True, False):
            cut, plain = parameters(places)
            norm = nn.utils.get_total_norm([param.grad for param in cut if param.grad is not None])
            nn.utils.clip_grads_with_norm_(cut, 0.7, norm.full_tensor() if whole else norm)
            nn.utils.clip_grad_norm_(plain, 0.7)
            assert_alike(cut, plain, f"two calls, whole {whole}")
        cut, plain = parameters(places)
        nn.utils.clip_grad_value_(cut, 0.3)
        nn.utils.clip_grad_value_(plain, 0.3)
        assert_alike(cut, plain, "values")


@distributed(world_sizes=(2, 4), only_fsdp2x=True)
@pytest.mark.parametrize("arrangement", ["all kinds", "one mesh"])
def test_one_rank_alone_has_a_gradient_that_is_not_finite(ctx, arrangement):
    places = places_of(arrangement, ctx.world)
    for broken, norm_type, row in BROKEN:
        what = f"{broken} in row {row}, norm {norm_type}"
        cut, plain = parameters(places, broken=broken, row=row)
        ours = fsdp2x.clip_grad_norm_(cut, 1.0, norm_type)
        same(numbers(ours), numbers(nn.utils.clip_grad_norm_(plain, 1.0, norm_type)).to(ours.dtype), what)
        assert_alike(cut, plain, what)
        for step in (fsdp2x.optim.AdamW, fsdp2x.optim.Muon):
            cut, _ = parameters(places, broken=broken, row=row)
            cut = [param for param in cut if step is fsdp2x.optim.AdamW or param.ndim == 2]
            whole = [torch.cat([numbers(param), numbers(param.grad)]) for param in cut if param.grad is not None]
            if all(part.isfinite().all() for part in whole):
                continue
            optimizer = step(cut, max_grad_norm=1.0, error_if_nonfinite=True)
            with pytest.raises(RuntimeError, match="nothing was changed"):
                optimizer.step()
            after = [torch.cat([numbers(param), numbers(param.grad)]) for param in cut if param.grad is not None]
            same(after, whole, what)
            assert not optimizer.state and not optimizer.grad_norm.isfinite()
        with fsdp2x.install():
            cut, plain = parameters(places, broken=broken, row=row)
            before = [numbers(param.grad) for param in cut]
            with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
                nn.utils.clip_grad_norm_(cut, 1.0, norm_type, error_if_nonfinite=True)
            same([numbers(param.grad) for param in cut], before, what)
            nn.utils.clip_grad_norm_(cut, 1.0, norm_type)
            nn.utils.clip_grad_norm_(plain, 1.0, norm_type)
            assert_alike(cut, plain, what)
    if arrangement == "all kinds":
        with fsdp2x.install(), pytest.raises(ValueError, match="norm_type must be .* got 0.0"):
            nn.utils.get_total_norm([param.grad for param in cut if param.grad is not None], 0)
