"""fsdp2x.optim and fsdp2x.clip_grad_norm_ against torch's on the same sharded model, and on plain tensors."""

import copy
import math

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import TORCH_MINOR, full, only_fsdp2x, params, same, shard

CLOSE = {"rtol": 1e-6, "atol": 1e-6}
# Which multiply-adds torch rounds once differs between its versions; the kernels follow 2.15.
EXACT = {} if TORCH_MINOR == 15 and torch.backends.cpu.get_cpu_capability() != "DEFAULT" else CLOSE

ADAMW = {
    "default": {},
    "decay": {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6},
    "no_decay": {"weight_decay": 0.0},
    "amsgrad": {"amsgrad": True, "lr": 0.05},
    "maximize": {"maximize": True, "weight_decay": 0.2},
    "slow_beta": {"betas": (0.2, 0.9)},
    "lr_tensor": {"lr": torch.tensor(0.013)},
}
SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.5, "maximize": True, "weight_decay": 0.2},
}


def options_of(options):
    return {"lr": 1e-2, **copy.deepcopy(options)}


def loss_of(model, ctx, step=0):
    return model(inputs(ctx.rank, step)).square().mean()


def train(ctx, model, optimizer, steps=3, first=0):
    for step in range(first, first + steps):
        loss_of(model, ctx, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model, optimizer):
    return params(model), full(optimizer.state_dict())


def twins_of(ctx, model=None, **options):
    only_fsdp2x(ctx)
    model = Stack() if model is None else model
    return shard(ctx, copy.deepcopy(model), STACK_UNITS, **options), shard(ctx, model, STACK_UNITS, **options)


def compare(ctx, ours_class, torch_class, options, exact):
    ours, theirs = twins_of(ctx)
    optimizer = ours_class(ours.parameters(), **options_of(options))
    reference = torch_class(theirs.parameters(), **options_of(options))
    before = params(ours)
    train(ctx, ours, optimizer)
    train(ctx, theirs, reference)
    same(snapshot(ours, optimizer), snapshot(theirs, reference), **exact)
    assert all(not torch.equal(before[name], value) for name, value in params(ours).items())


@distributed(world_sizes=(1, 2, 3, 4))
@pytest.mark.parametrize("name", ADAMW)
@pytest.mark.each_value
def test_adamw_steps(ctx, name):
    """Four ranks leave a shard of the head empty."""
    compare(ctx, fsdp2x.optim.AdamW, torch.optim.AdamW, ADAMW[name], CLOSE)


@distributed(world_sizes=(3,))
@pytest.mark.parametrize("name", ADAMW)
def test_moments_are_torchs_bits(ctx, name):
    """Of equal gradients; torch's default square root is not correctly rounded, so its parameters may differ."""
    ours, theirs = twins_of(ctx)
    optimizer = fsdp2x.optim.AdamW(ours.parameters(), **options_of(ADAMW[name]))
    reference = torch.optim.AdamW(theirs.parameters(), **options_of(ADAMW[name]))
    for step in range(4):
        loss_of(theirs, ctx, step).backward()
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            param.grad = other.grad
        optimizer.step()
        reference.step()
        theirs.zero_grad()
    same(full(optimizer.state_dict()), full(reference.state_dict()), **EXACT)
    same(params(ours), params(theirs), **CLOSE)


@distributed(world_sizes=(1, 2, 3, 4))
@pytest.mark.parametrize("name", SGD)
@pytest.mark.each_value
def test_sgd_steps(ctx, name):
    compare(ctx, fsdp2x.optim.SGD, torch.optim.SGD, SGD[name], EXACT)


@distributed(world_sizes=(2,))
def test_groups_frozen_parameters_and_missing_gradients(ctx):
    ours, theirs = twins_of(ctx)
    snapshots = []
    for model, optimizer_class in ((ours, fsdp2x.optim.AdamW), (theirs, torch.optim.AdamW)):
        model.norm.requires_grad_(False)
        biases = [param for param in model.parameters() if param.ndim == 1]
        weights = [param for param in model.parameters() if param.ndim > 1]
        groups = [{"params": biases, "weight_decay": 0.0, "lr": 0.03}, {"params": weights, "amsgrad": True}]
        optimizer = optimizer_class(groups, lr=1e-2)
        for step in range(4):
            loss_of(model, ctx, step).backward()
            if step % 2 == 0:
                model.blocks[1].up.weight.grad = None  # its step count falls behind
            optimizer.step()
            optimizer.zero_grad()
        snapshots.append(snapshot(model, optimizer))
    same(snapshots[0], snapshots[1], **CLOSE)
    counts = {state["step"].item() for state in snapshots[0][1]["state"].values()}
    assert counts == {2.0, 4.0}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("way", ["torch_to_ours", "ours_to_torch"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.each_value
def test_states_load_both_ways(ctx, kind, way):
    ours, theirs = twins_of(ctx)
    options = {"amsgrad": True} if kind == "AdamW" else {"momentum": 0.9}
    classes = [getattr(torch.optim, kind), getattr(fsdp2x.optim, kind)]
    if way == "ours_to_torch":
        classes.reverse()
    writer = classes[0](ours.parameters(), lr=1e-2, **options)
    train(ctx, ours, writer)
    reader = classes[1](theirs.parameters(), lr=0.5, **options)
    theirs.load_state_dict(ours.state_dict())
    reader.load_state_dict(copy.deepcopy(writer.state_dict()))  # loading shares tensors
    assert reader.param_groups[0]["lr"] == 1e-2
    train(ctx, ours, writer, first=3)
    train(ctx, theirs, reader, first=3)
    same(snapshot(theirs, reader), snapshot(ours, writer), **(CLOSE if kind == "AdamW" else EXACT))


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("full_state", [False, True])
@pytest.mark.each_value
def test_checkpoint_utilities(ctx, full_state):
    ours, theirs = twins_of(ctx)
    options = dcp.StateDictOptions(full_state_dict=full_state)
    writer = fsdp2x.optim.AdamW(ours.parameters(), lr=1e-2, amsgrad=True)
    train(ctx, ours, writer)
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(ours, writer, options=options))
    expected = snapshot(ours, writer)
    if full_state and ctx.rank == 0:
        assert not any(isinstance(value, DTensor) for state in saved["state"].values() for value in state.values())
    reader = fsdp2x.optim.AdamW(theirs.parameters(), lr=0.5, amsgrad=True)
    options = dcp.StateDictOptions(full_state_dict=full_state, broadcast_from_rank0=full_state)
    dcp.set_optimizer_state_dict(theirs, reader, saved, options=options)
    theirs.load_state_dict(ours.state_dict())
    same(snapshot(theirs, reader)[1]["state"], expected[1]["state"])
    train(ctx, ours, writer, first=3)
    train(ctx, theirs, reader, first=3)
    same(params(theirs), params(ours))


@distributed(world_sizes=(2,))
def test_closure_and_copies(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS)
    optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-2, moments_dtype=torch.float32)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, ctx)
        loss.backward()
        return loss.detach()

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses[2] < losses[0]
    assert copy.copy(optimizer).moments_dtype is torch.float32


@distributed(world_sizes=(2,))
def test_the_kernel_steps_every_shard(ctx):
    """Nothing falls to torch's functions on a sharded float32 model, and autograd sees the change."""
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS)
    optimizer = fsdp2x.optim.AdamW(model.parameters())
    optimizer._step_by_torch = None
    versions = [param._version for param in model.parameters()]
    train(ctx, model, optimizer, 2)
    assert all(param._version > version for param, version in zip(model.parameters(), versions, strict=True))


# --- plain tensors ---------------------------------------------------------------------------------------------------


def plain_pair(dtype=torch.float32, sizes=((5, 7), (0, 3), (33,), ())):
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(size, dtype=torch.float32).to(dtype)) for size in sizes]
    return first, [nn.Parameter(param.detach().clone()) for param in first]


def set_grads(*lists, step):
    for tensors in lists:
        torch.manual_seed(100 + step)
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape).to(tensor.dtype)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_plain_parameters(kind, dtype):
    """Other dtypes are torch's own computation."""
    ours, theirs = plain_pair(dtype)
    options = {"weight_decay": 0.1} if kind == "AdamW" else {"momentum": 0.9, "nesterov": True}
    optimizer = getattr(fsdp2x.optim, kind)(ours, lr=1e-2, **options)
    reference = getattr(torch.optim, kind)(theirs, lr=1e-2, **options)
    for step in range(4):
        set_grads(ours, theirs, step=step)
        optimizer.step()
        reference.step()
    exact = EXACT if dtype is torch.float32 else {}
    close = CLOSE if dtype is torch.float32 and kind == "AdamW" else exact
    same([param.detach() for param in ours], [param.detach() for param in theirs], **close)
    same(optimizer.state_dict(), reference.state_dict(), **exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_in_float32(dtype):
    """A 16-bit parameter is stepped as its float32 copy and rounded after each step; states keep float32."""
    ours, _ = plain_pair(dtype)
    optimizer = fsdp2x.optim.AdamW(ours, lr=1e-2, moments_dtype=torch.float32)
    wide = [nn.Parameter(param.detach().float()) for param in ours]
    reference = torch.optim.AdamW(wide, lr=1e-2)
    loaded = fsdp2x.optim.AdamW(ours, moments_dtype=torch.float32)
    for step in range(4):
        set_grads(ours, step=step)
        for param, copied in zip(ours, wide, strict=True):
            copied.grad = param.grad.float()
        if step == 2:
            loaded.load_state_dict(optimizer.state_dict())
            optimizer = loaded
        optimizer.step()
        reference.step()
        for param, copied in zip(ours, wide, strict=True):
            same(param.detach().float(), copied.detach(), rtol=2.0**-8, atol=1e-6)
            copied.data = param.detach().float()
    same(optimizer.state_dict()["state"], reference.state_dict()["state"], **EXACT)


@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_memory_formats(layout):
    """Dense memory in any order is stepped as it lies, anything else by torch."""
    torch.manual_seed(0)
    base = torch.randn(6, 10)

    def parameter():
        return nn.Parameter(base.clone().t() if layout == "transposed" else base.clone()[:, ::2])

    ours, theirs = parameter(), parameter()
    optimizer, reference = fsdp2x.optim.AdamW([ours]), torch.optim.AdamW([theirs])
    for step in range(3):
        set_grads([ours], [theirs], step=step)
        optimizer.step()
        reference.step()
    same(ours.detach(), theirs.detach(), **CLOSE)


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
def test_unsupported_arguments_are_refused(name):
    param = nn.Parameter(torch.ones(3))
    with pytest.raises(NotImplementedError, match=name):
        fsdp2x.optim.AdamW([param], **{name: True})
    with pytest.raises(NotImplementedError, match=name):
        fsdp2x.optim.AdamW([{"params": [param], name: True}])
    if name == "differentiable":
        with pytest.raises(NotImplementedError, match=name):
            fsdp2x.optim.SGD([param], differentiable=True)
    state = torch.optim.AdamW([param]).state_dict()
    state["param_groups"][0][name] = True
    with pytest.raises(NotImplementedError, match=name):
        fsdp2x.optim.AdamW([param]).load_state_dict(state)


def test_wrong_settings_are_refused():
    param = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="learning rate"):
        fsdp2x.optim.AdamW([param], lr=-1.0)
    with pytest.raises(ValueError, match="moments_dtype"):
        fsdp2x.optim.AdamW([param], moments_dtype=torch.float64)
    with pytest.raises(ValueError, match="Nesterov"):
        fsdp2x.optim.SGD([param], nesterov=True)
    fsdp2x.optim.AdamW([param], foreach=True, fused=True)
    param.grad = torch.ones(3).to_sparse()
    for optimizer in (fsdp2x.optim.AdamW([param]), fsdp2x.optim.SGD([param])):
        with pytest.raises(RuntimeError, match="layout"):
            optimizer.step()


@distributed(world_sizes=(2,))
def test_gradients_cut_otherwise_are_redistributed(ctx):
    """A Partial gradient of a Replicate parameter has the parameter's local shape but not its values."""
    mesh = init_device_mesh("cpu", (ctx.world,))
    torch.manual_seed(0)
    whole = torch.randn(4, 6)
    results = []
    for optimizer_class in (fsdp2x.optim.AdamW, torch.optim.AdamW):
        param = nn.Parameter(distribute_tensor(whole.clone(), mesh, [Replicate()]))
        optimizer = optimizer_class([param], lr=1e-2)
        param.grad = DTensor.from_local(torch.full((4, 6), float(ctx.rank + 1)), mesh, [Partial()])
        norm = fsdp2x.clip_grad_norm_([param], math.inf)
        same(norm, torch.tensor(3.0 * math.sqrt(24.0)), rtol=1e-6, atol=0.0)
        optimizer.step()
        results.append((full(param), full(optimizer.state_dict()["state"])))
    same(results[0], results[1], **CLOSE)


# --- clipping --------------------------------------------------------------------------------------------------------


def clip_parity(ctx, ours, theirs, norm_type=2.0, max_norm=0.05, loss=loss_of):
    for model in (ours, theirs):
        loss(model, ctx).backward()
    norm = fsdp2x.clip_grad_norm_(ours.parameters(), max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    assert type(norm) is torch.Tensor and norm.ndim == 0 and norm > 0.0
    same(norm, full(expected), "norm", rtol=1e-6, atol=1e-7)
    for (name, param), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        same(param.grad.to_local(), other.grad.to_local(), name, rtol=1e-6, atol=1e-8)
    return norm


def check_gathered(model, norm_type, max_norm):
    whole = torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()])
    expected = torch.linalg.vector_norm(whole, norm_type)
    assert expected > max_norm
    norm = fsdp2x.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    same(norm, expected, "norm", rtol=1e-5, atol=1e-7)
    clipped = torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()])
    same(clipped, whole * (max_norm / float(norm)), "gradients", rtol=1e-4, atol=1e-8)


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.05, 1e4])
@pytest.mark.each_value
def test_clipping_is_torchs(ctx, norm_type, max_norm):
    ours, theirs = twins_of(ctx)
    assert clip_parity(ctx, ours, theirs, norm_type, max_norm) > 0.05


@distributed(world_sizes=(2, 4))
@pytest.mark.parametrize("norm_type", [2.0, 3.5, math.inf])
@pytest.mark.each_value
def test_the_norm_is_that_of_the_gathered_gradients(ctx, norm_type):
    """With an empty shard on the last of four ranks, where torch's infinity norm raises."""
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS)
    loss_of(model, ctx).backward()
    check_gathered(model, norm_type, 0.02)


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_counts_replicas_once(ctx, norm_type):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    clip_parity(ctx, *twins_of(ctx, mesh=mesh), norm_type)


def tensor_parallel(ctx, mesh):
    model = Stack(width=8, hidden=12)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return shard(ctx, model, STACK_UNITS, mesh=mesh["dp"])


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
def test_clipping_under_tensor_parallelism(ctx, norm_type):
    """Weights cut by both axes, biases of the second linear by one, and norms and heads on a mesh of their own.

    Torch refuses gradients of several meshes in one call, so the gathered gradients are what is compared with.
    """
    only_fsdp2x(ctx)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(ctx, mesh)
    model(inputs(mesh["dp"].get_local_rank(), 0, width=8)).square().mean().backward()
    check_gathered(model, norm_type, 0.01)


@distributed(world_sizes=(4,))
def test_steps_under_tensor_parallelism(ctx):
    only_fsdp2x(ctx)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for optimizer_class in (fsdp2x.optim.AdamW, torch.optim.AdamW):
        model = tensor_parallel(ctx, mesh)
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        for step in range(3):
            model(inputs(mesh["dp"].get_local_rank(), step, width=8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.to_local().detach().clone() for param in model.parameters()])
    same(results[0], results[1], **CLOSE)


@distributed(world_sizes=(2,))
def test_clipping_needs_one_all_reduce(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS)
    loss_of(model, ctx).backward()
    calls = []
    all_reduce = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *a, **k: (calls.append(a), all_reduce(*a, **k))[1]
    try:
        fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
    finally:
        torch.distributed.all_reduce = all_reduce
    assert len(calls) == 1


@distributed(world_sizes=(2,))
def test_clipping_without_gradients_on_one_rank(ctx):
    """A rank without gradients takes part in the reduction."""
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS)
    loss_of(model, ctx).backward()
    rows = [param.grad.to_local().clone() for param in model.parameters()]
    if ctx.rank == 1:
        model.zero_grad()
    norm = fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
    own = sum(row.double().square().sum() for row in rows) if ctx.rank == 0 else torch.zeros((), dtype=torch.float64)
    torch.distributed.all_reduce(own)
    same(norm.double(), own.sqrt(), rtol=1e-6, atol=1e-9)


def test_clipping_plain_tensors():
    params, twins = plain_pair()
    set_grads(params, twins, step=0)
    params[0].grad[0, 0] = twins[0].grad[0, 0] = 50.0
    norm = fsdp2x.clip_grad_norm_((param for param in params), 0.5)
    same(norm, torch.nn.utils.clip_grad_norm_(twins, 0.5), rtol=1e-6, atol=0.0)
    same([param.grad for param in params], [twin.grad for twin in twins], rtol=1e-6, atol=0.0)
    same(fsdp2x.clip_grad_norm_([], 1.0), torch.tensor(0.0))
    single = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    single.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    same(fsdp2x.clip_grad_norm_(single, 1.0), torch.tensor(5.0, dtype=torch.float64))
    same(single.grad, torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=1e-6, atol=0.0)


def test_norms_that_are_not_finite():
    params, _ = plain_pair(sizes=((3,), (2,)))
    set_grads(params, step=0)
    params[0].grad[1] = math.inf
    with pytest.raises(RuntimeError, match="is inf"):
        fsdp2x.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert params[1].grad.abs().min() > 0.0
    assert fsdp2x.clip_grad_norm_(params, 1.0).isinf()
    assert params[1].grad.abs().max() == 0.0
    with pytest.raises(ValueError, match="norm_type"):
        fsdp2x.clip_grad_norm_(params, 1.0, norm_type=0.0)
