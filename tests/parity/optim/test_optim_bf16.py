"""AdamW with moments of a dtype of their own: rounding to nearest and stochastically, states, what ranks agree on."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp2x
from fsdp2x.plan.optimizers import optimizer_bytes as count
from harness import distributed
from reference import TORCH_MINOR, full, same

BF16 = {"moments_dtype": torch.bfloat16}
STOCHASTIC = {**BF16, "stochastic_rounding": True}
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
# Which multiply-adds torch rounds once differs between its versions; the kernels follow 2.15.
FOLLOWS = TORCH_MINOR == 15 and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
EXACT = {} if FOLLOWS else {"rtol": 2.0**-7, "atol": 1e-9}
SIZES = ((5, 7), (0, 3), (1033,), (), (6, 4, 3))


def plain(dtype=torch.float32, sizes=SIZES):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def set_grads(parameters, step, scale=1.0):
    torch.manual_seed(100 + step)
    for param in parameters:
        param.grad = (scale * torch.randn(param.shape)).to(param.dtype)


def moments_of(optimizer, param):
    return {name: value for name, value in optimizer.state[param].items() if name != "step"}


# --- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_to_nearest_is_a_float32_step_that_is_rounded(dtype, moments, amsgrad):
    """16-bit parameters as their float32 copies, which are rounded after each step; a state is loaded on the way."""
    ours = plain(dtype)
    optimizer, loaded = (fsdp2x.optim.AdamW(ours, lr=1e-2, amsgrad=amsgrad, moments_dtype=moments) for _ in range(2))
    wide = [nn.Parameter(param.detach().float()) for param in ours]
    reference = torch.optim.AdamW(wide, lr=1e-2, amsgrad=amsgrad)
    for step in range(4):
        set_grads(ours, step)
        for param, copied in zip(ours, wide, strict=True):
            copied.grad = param.grad.float()
        if step == 2:
            loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = loaded
        optimizer.step()
        reference.step()
        for param, copied in zip(ours, wide, strict=True):
            for name, value in moments_of(reference, copied).items():
                assert optimizer.state[param][name].dtype is moments
                value.copy_(value.to(moments))
                same(optimizer.state[param][name].float(), value, name, **EXACT)
            tolerance = CLOSE if dtype is torch.float32 else {"rtol": 2.0**-7, "atol": 1e-6}
            same(param.detach().float(), copied.detach(), **tolerance)
            copied.data = param.detach().float()


def test_stochastic_rounding_is_right_on_average():
    """Every stored value is one of the two neighbors. Their mean is the unrounded value, within 5 standard errors."""
    numel, beta1, beta2 = 200_000, 0.9, 0.999
    param = nn.Parameter(torch.full((numel,), 1.0, dtype=torch.bfloat16))
    optimizer = fsdp2x.optim.AdamW([param], lr=1e-3, betas=(beta1, beta2), weight_decay=0.0, seed=7, **STOCHASTIC)
    gradient = 0.328125  # a bfloat16
    param.grad = torch.full_like(param, gradient)
    optimizer.step()
    exact = {"exp_avg": (1 - beta1) * gradient, "exp_avg_sq": (1 - beta2) * gradient**2, "param": 1.0 - 1e-3}
    draws = []
    for name, value in exact.items():
        stored = (param.detach() if name == "param" else optimizer.state[param][name]).double()
        low, high = stored.min().item(), stored.max().item()
        assert low < value < high and (high - low) / value <= 2.0**-7
        assert stored.unique().numel() == 2
        chance = (value - low) / (high - low)
        error = math.sqrt(chance * (1 - chance) / numel)
        up = (stored == high).double()
        assert abs(up.mean().item() - chance) < 5 * error
        draws.append((up - up.mean()) / up.std())
        neighbours = (draws[-1][1:] * draws[-1][:-1]).mean().item()
        assert abs(neighbours) < 5 / math.sqrt(numel), name
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs((draws[first] * draws[second]).mean().item()) < 5 / math.sqrt(numel)


def run(seed, steps=3, dtype=torch.float32, resume=None):
    ours = plain(dtype)
    optimizer = fsdp2x.optim.AdamW(ours, lr=1e-2, seed=seed, **STOCHASTIC)
    for step in range(steps):
        if step == resume:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = fsdp2x.optim.AdamW(ours, lr=1e-2, seed=seed, **STOCHASTIC)
            optimizer.load_state_dict(state)
        set_grads(ours, step)
        optimizer.step()
    return [[param.detach(), *moments_of(optimizer, param).values()] for param in ours]


def test_the_seed_decides():
    same(run(1), run(1))
    same(run(1, resume=2), run(1))
    assert not torch.equal(run(1)[2][1], run(2)[2][1])
    assert not torch.equal(run(1)[2][1], run(2**63 + 1)[2][1])
    same(run(3, dtype=torch.bfloat16, resume=1), run(3, dtype=torch.bfloat16))


# --- sharded ---------------------------------------------------------------------------------------------------------


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_round_as_the_whole(ctx, dtype):
    """However parameters are cut: by rows (uneven, empty), by columns, or by both on a mesh of two axes."""
    meshes = {"1d": init_device_mesh("cpu", (ctx.world,)), "2d": init_device_mesh("cpu", (1, ctx.world))}
    cuts = [("1d", [Shard(0)]), ("1d", [Shard(1)]), ("1d", [Replicate()]), ("2d", [Shard(0), Shard(1)])]
    for mesh, placements in cuts:
        whole = plain(dtype, ((7, 5), (2, 11), (33, 3, 2)))
        cut = [nn.Parameter(distribute_tensor(param.detach(), meshes[mesh], placements)) for param in whole]
        optimizers = [fsdp2x.optim.AdamW(side, lr=1e-2, seed=5, **STOCHASTIC) for side in (whole, cut)]
        for step in range(3):
            set_grads(whole, step)
            for param, other in zip(whole, cut, strict=True):
                other.grad = distribute_tensor(param.grad, meshes[mesh], placements)
            for optimizer in optimizers:
                optimizer.step()
        for param, other in zip(whole, cut, strict=True):
            same(other.full_tensor().detach(), param.detach())
            same(full(moments_of(optimizers[1], other)), moments_of(optimizers[0], param))


@distributed(world_sizes=(4,))
def test_cuts_without_a_rule_are_refused(ctx):
    mesh = init_device_mesh("cpu", (2, 2))
    param = nn.Parameter(distribute_tensor(torch.ones(2, 4, 6), mesh, [Shard(1), Shard(2)]))
    param.grad = torch.ones_like(param)
    with pytest.raises(NotImplementedError, match=r"cut along dims \[1, 2\]"):
        fsdp2x.optim.AdamW([param], **STOCHASTIC).step()
    fsdp2x.optim.AdamW([param], **BF16).step()


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [BF16, STOCHASTIC])
def test_states_are_torchs_in_form_and_load_both_ways(options):
    ours, theirs = plain(), plain()
    optimizer = fsdp2x.optim.AdamW(ours, lr=1e-2, amsgrad=True, **options)
    reference = torch.optim.AdamW(theirs, lr=1e-2, amsgrad=True)
    for step in range(3):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step()
        reference.step()
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert {key: list(value) for key, value in saved["state"].items()} == {
        key: list(value) for key, value in expected["state"].items()
    }
    reference.load_state_dict(copy.deepcopy(saved))
    for param, other in zip(ours, theirs, strict=True):
        for name, value in moments_of(optimizer, param).items():
            assert reference.state[other][name].dtype is torch.float32
            same(reference.state[other][name], value.float())
    set_grads(theirs, 3)
    reference.step()
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for param, other in zip(ours, theirs, strict=True):
        for name, value in moments_of(reference, other).items():
            same(optimizer.state[param][name], value.bfloat16())
    set_grads(ours, 4)
    optimizer.step()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_moments_share_memory_but_not_storages(dtype):
    ours = plain()
    optimizer = fsdp2x.optim.AdamW(ours, moments_dtype=dtype)
    set_grads(ours, 0)
    report_before = optimizer_bytes(optimizer)
    optimizer.step()
    assert optimizer_bytes(optimizer) == report_before
    moments = [moment for param in ours for moment in moments_of(optimizer, param).values()]
    starts = sorted(moment.data_ptr() for moment in moments if moment.numel())
    held = sum((moment.nbytes + 63) // 64 * 64 for moment in moments)
    assert starts[-1] - starts[0] < held
    assert len({moment.untyped_storage()._cdata for moment in moments}) == len(moments)
    for moment in moments:
        assert moment.untyped_storage().nbytes() == moment.nbytes
        buffer = io.BytesIO()
        torch.save(moment, buffer)
        assert buffer.tell() < moment.nbytes + 4096
        same(copy.deepcopy(moment), moment)


def optimizer_bytes(optimizer):
    return count(optimizer)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_wrong_settings_are_refused():
    param = nn.Parameter(torch.ones(3))
    for dtype in (torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn, "fp8"):
        with pytest.raises(ValueError, match="moments_dtype must be .*, got"):
            fsdp2x.optim.AdamW([param], moments_dtype=dtype)
    with pytest.raises(ValueError, match="needs moments_dtype"):
        fsdp2x.optim.AdamW([param], stochastic_rounding=True)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            fsdp2x.optim.AdamW([param], seed=seed, **STOCHASTIC)


@pytest.mark.parametrize("moments", [torch.bfloat16, "int8"])
def test_what_the_kernel_cannot_take_is_stepped_by_torch_and_rounded(moments):
    """A strided parameter also keeps its moments in their dtype."""
    base = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    strided, dense = nn.Parameter(base.clone()[:, ::2]), nn.Parameter(base.clone()[:, ::2].contiguous())
    optimizers = [fsdp2x.optim.AdamW([param], lr=1e-2, moments_dtype=moments) for param in (strided, dense)]
    for step in range(5):
        for param, optimizer in zip((strided, dense), optimizers, strict=True):
            set_grads([param], step)
            optimizer.step()
    close = CLOSE if moments is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    same(strided.detach().contiguous(), dense.detach(), **close)
    for name, value in moments_of(optimizers[0], strided).items():
        assert value.dtype is {"int8": torch.uint8}.get(moments, moments) or name.endswith("_scales")
        if moments is torch.bfloat16:
            same(value.contiguous(), optimizers[1].state[dense][name], name, **EXACT)
    with pytest.raises(NotImplementedError, match="stochastic_rounding needs"):
        fsdp2x.optim.AdamW([strided], moments_dtype=moments, stochastic_rounding=True).step()
