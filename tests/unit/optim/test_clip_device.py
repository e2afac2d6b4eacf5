"""Clipping through the device's kernels, run by their twins: the CPU's numbers, plans that stay, nothing read back."""

import copy
import gc
import math

import pytest
import torch
from torch import nn

import fsdp2x
from device_twins import Operations, clip_by_twins
from fsdp2x.optim import clip

SIZES = ((5, 7), (0, 3), (1033,), (), (6, 4, 3), (70001,))
DTYPES = {
    "float32": (torch.float32,),
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "float64": (torch.float64,),
    "mixed": (torch.float32, torch.bfloat16, torch.float64, torch.float16),
}


def with_gradients(dtypes=(torch.float32,), sizes=SIZES, seed=0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    params = []
    for index, size in enumerate(sizes):
        param = nn.Parameter(torch.zeros(size, dtype=dtypes[index % len(dtypes)]))
        # Every other gradient starts between two words of 16 bytes.
        memory = torch.randn(param.numel() + 1).to(param.dtype)
        param.grad = memory[index % 2 :][: param.numel()].view(size)
        params.append(param)
    return params


def both(params, max_norm, norm_type=2.0):
    """(norm, gradients) by the CPU's kernels and by the twins."""
    copies = copy.deepcopy(params)
    for param, other in zip(params, copies, strict=True):
        other.grad = None if param.grad is None else param.grad.clone()
    expected = fsdp2x.clip_grad_norm_(copies, max_norm, norm_type)
    with clip_by_twins() as kept:
        norm = fsdp2x.clip_grad_norm_(params, max_norm, norm_type)
    # The kernels compute in fp32: what is f64 is torch's.
    assert kept.num_plans > 0 or all(param.grad is None or param.grad.dtype is torch.float64 for param in params)
    grads = [[param.grad for param in ps if param.grad is not None] for ps in (copies, params)]
    return (expected, grads[0]), (norm, grads[1])


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("max_norm", [0.37, 1e9])
def test_numbers_of_the_cpu(dtypes, max_norm):
    params = with_gradients(DTYPES[dtypes])
    before = [param.grad.clone() for param in params]
    versions = [param.grad._version for param in params]
    (expected, theirs), (norm, ours) = both(params, max_norm)
    assert norm.dtype is expected.dtype and norm.shape == () and type(norm) is torch.Tensor
    # Squares are added in another order in float64: float32 rounds the difference away.
    torch.testing.assert_close(norm, expected, rtol=0.0 if norm.dtype is torch.float32 else 1e-14, atol=0.0)
    for got, want, old in zip(ours, theirs, before, strict=True):
        close = {"rtol": 1e-14, "atol": 0.0} if got.dtype is torch.float64 else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(got, want, **close)
        if max_norm > norm:
            assert torch.equal(got, old)
        elif got.numel() > 0:
            assert not torch.equal(got, old)
    if dtypes != "float64" or max_norm <= norm:  # torch leaves alone what a factor of 1 would not change
        assert all(param.grad._version > version for param, version in zip(params, versions, strict=True))


@pytest.mark.parametrize("norm_type", [1.0, 3.5, math.inf])
def test_other_norms_are_torchs_and_scaled_by_the_kernels(norm_type):
    (expected, theirs), (norm, ours) = both(with_gradients(sizes=((5, 7), (33,))), 0.5, norm_type)
    assert torch.equal(norm, expected) and norm > 0.5
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_that_are_not_finite(bad, dtype):
    params = with_gradients((dtype,))
    params[-1].grad[-1] = bad
    before = [param.grad.clone() for param in params]
    with clip_by_twins(), pytest.raises(RuntimeError, match=f"is {bad}"):
        fsdp2x.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.grad.nan_to_num(-7.0), old.nan_to_num(-7.0)), "refused, so nothing is scaled"
    (expected, theirs), (norm, ours) = both(params, 1.0)
    assert norm.isnan() == expected.isnan() and not norm.isfinite()
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def test_missing_and_empty_gradients():
    params = with_gradients()
    params[2].grad = None
    (expected, theirs), (norm, ours) = both(params, 0.1)
    assert torch.equal(norm, expected) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    empty = with_gradients(sizes=((0, 3),))
    none = [nn.Parameter(torch.ones(3))]
    with clip_by_twins():
        for params in (empty, none, [*empty, *none], []):
            assert torch.equal(fsdp2x.clip_grad_norm_(params, 1.0), torch.tensor(0.0))


def test_what_the_kernels_cannot_take_is_left_to_torch():
    """Strides with holes, next to gradients that lie densely in another order."""
    params = with_gradients(sizes=((6, 10), (10, 6)))
    params[0].grad = torch.randn(6, 20)[:, ::2]
    params[1].grad = torch.randn(6, 10).t()
    (expected, theirs), (norm, ours) = both(params, 0.1)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)


def test_plans_stay_while_sizes_and_dtypes_do():
    params = with_gradients(sizes=[(3,)] * 700)
    with clip_by_twins() as kept:
        for _ in range(3):
            fsdp2x.clip_grad_norm_(params, 1e-3)
            assert kept.num_plans == 3, "of 320 gradients at most"
            for param in params:
                param.grad = torch.randn(3)  # elsewhere
        params[0].grad = None
        params[0].data = params[0].bfloat16()
        params[0].grad = torch.randn(3).bfloat16()
        fsdp2x.clip_grad_norm_(params, 1e-3)
        assert kept.num_plans == 4


def test_kept_as_long_as_the_parameters_live():
    gc.collect()  # of earlier tests
    before = len(clip._kept)
    params = with_gradients()
    assert clip._kernels_for(params) is clip._kernels_for(params)
    fsdp2x.clip_grad_norm_(params, 1.0)
    assert len(clip._kept) == before + 1
    del params
    gc.collect()
    assert len(clip._kept) == before


@pytest.mark.parametrize("num", [3, 300])
def test_nothing_is_read_back_and_the_number_of_operations_is_constant(num):
    """On a device every number that the host asks for stops it, and so does every copy to it."""
    params = with_gradients(sizes=[(7, 5)] * num)
    with clip_by_twins():
        fsdp2x.clip_grad_norm_(params, 0.1)
        with Operations() as seen:
            norm = fsdp2x.clip_grad_norm_(params, 0.05)
    assert norm > 0.05
    asked = {"_local_scalar_dense", "item", "nonzero", "index", "index_put_", "is_nonzero", "equal"}
    assert not asked & set(seen.counts), seen.counts
    assert sum(seen.counts.values()) < 20, seen.counts
    assert not {"mul_", "linalg_vector_norm", "_foreach_mul_"} & set(seen.counts)


def test_more_tiles_than_one_block_adds_up():
    """Each gradient is a tile of its own at least: their sums are added up in two passes."""
    params = with_gradients(sizes=((2,),) * 9000)
    (expected, theirs), (norm, ours) = both(params, 0.37)
    torch.testing.assert_close(norm, expected, rtol=0.0, atol=0.0)
    assert all(map(torch.equal, ours, theirs))
