"""Steps and clipping through the device's kernels, run by their twins: the bits of the CPU's."""

import copy
import math

import pytest
import torch
from torch import nn

import fsdp2x
from device_reference import Operations, clip_by_reference, step_by_reference
from fsdp2x.optim import AdamW

SIZES = ((5, 7), (0, 3), (1033,), (), (6, 4, 3), (70000,))
SETTINGS = {
    "float32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True, "maximize": True}),
    "bf16 moments": (torch.float32, {"moments_dtype": torch.bfloat16}),
    "bf16": (torch.bfloat16, {"moments_dtype": torch.bfloat16, "amsgrad": True}),
    "fp16": (torch.float16, {"moments_dtype": torch.float32}),
    "int8 moments": (torch.float32, {"moments_dtype": "int8"}),
    "fp16, int8 moments": (torch.float16, {"moments_dtype": "int8", "amsgrad": True}),
    "stochastic, int8 moments": (torch.bfloat16, {"moments_dtype": "int8", "stochastic_rounding": True, "seed": 7}),
    "stochastic": (torch.bfloat16, {"moments_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 7}),
    "float64, by torch": (torch.float64, {}),
}


def parameters(dtype=torch.float32, sizes=SIZES) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def pair(params, **options):
    """The optimizer of the CPU kernel, and that of the twins over copies of the parameters."""
    ours = copy.deepcopy(params)
    groups = [[{"params": ps[::2], "lr": 1e-2}, {"params": ps[1::2], "weight_decay": 0.1}] for ps in (params, ours)]
    on_cpu, on_device = (AdamW(one, **options) for one in groups)
    return on_cpu, step_by_reference(on_device), ours


def step(number: int, *optimizers, skip=()) -> None:
    for optimizer in optimizers:
        torch.manual_seed(100 + number)
        for index, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            param.grad = None if index in skip else torch.randn_like(param)
        optimizer.step()


def same_bits(one, other) -> None:
    for first, second in zip(one.param_groups, other.param_groups, strict=True):
        for a, b in zip(first["params"], second["params"], strict=True):
            assert torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0))
            assert one.state[a].keys() == other.state[b].keys()
            for name, value in one.state[a].items():
                assert torch.equal(value.nan_to_num(-7.0), other.state[b][name].nan_to_num(-7.0)), name


@pytest.mark.parametrize("setting", SETTINGS)
def test_bits_of_the_cpu_kernel(setting):
    dtype, options = SETTINGS[setting]
    params = parameters(dtype)
    before = [param.detach().clone() for param in params]
    on_cpu, on_device, ours = pair(params, **options)
    versions = [param._version for param in ours]
    for number in range(4):
        # Parameters that join later: first and later momentum in one launch.
        step(number, on_cpu, on_device, skip={0: (3, 4), 2: (0,)}.get(number, ()))
        same_bits(on_cpu, on_device)
    assert all(param._version > version for param, version in zip(ours, versions, strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(ours, before, strict=True) if a.numel() > 1)
    assert (on_device._on_device.num_plans > 0) == (dtype is not torch.float64) and on_cpu._on_device.num_plans == 0


def test_memory_that_is_not_aligned_or_transposed():
    """Nothing starts at a multiple of 16 bytes, and some of it lies in another order."""
    torch.manual_seed(0)
    memory = torch.randn(6001)
    params = [nn.Parameter(memory[1:5000]), nn.Parameter(memory[5001:5361].view(36, 10).t())]
    on_cpu, on_device, ours = pair(params)
    ours[0].data = torch.cat([torch.zeros(3), ours[0].detach()])[3:]
    for number in range(3):
        step(number, on_cpu, on_device)
    assert ours[0].data_ptr() % 16 != 0 and not ours[1].is_contiguous()
    assert on_device._on_device.num_plans > 0
    same_bits(on_cpu, on_device)


def test_more_than_a_launch_can_name():
    """700 parameters, and 80 that skipped different numbers of steps: each has corrections of its own."""
    on_cpu, on_device, _ = pair(parameters(sizes=[(3,)] * 700))
    for number in range(2):
        step(number, on_cpu, on_device)
    assert on_device._on_device.num_plans > 1
    same_bits(on_cpu, on_device)
    on_cpu, on_device, _ = pair(parameters(sizes=[(3,)] * 80))
    for number in range(40):
        step(number, on_cpu, on_device, skip=range(0, 2 * number, 2))
    step(40, on_cpu, on_device)
    assert on_device._on_device.num_plans > 1
    same_bits(on_cpu, on_device)


class OnDevice(torch.Tensor):
    """A count that says it is a device's."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def cpu(self) -> torch.Tensor:
        return torch.tensor(float(self.as_subclass(torch.Tensor)))


def test_counts_of_torchs_fused_adamw_come_to_the_host():
    """Else every parameter is stepped by torch's functions, each of which reads its count from the device."""
    params = parameters()
    saved = torch.optim.AdamW(params)
    step(0, saved)
    state = copy.deepcopy(saved.state_dict())
    for one in state["state"].values():
        one["step"] = one["step"].as_subclass(OnDevice)
    ours = AdamW(copy.deepcopy(params))
    ours.load_state_dict(state)
    counts = [one["step"] for one in ours.state.values()]
    assert len(counts) == len(params)
    for count in counts:
        assert type(count) is torch.Tensor and count.device.type == "cpu" and count == 1


GRADIENT_SIZES = ((5, 7), (0, 3), (1033,), (), (6, 4, 3), (70001,))
DTYPES = {
    "float32": (torch.float32,),
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "float64": (torch.float64,),
    "mixed": (torch.float32, torch.bfloat16, torch.float64, torch.float16),
}


def with_gradients(dtypes=(torch.float32,), sizes=GRADIENT_SIZES, seed=0) -> list[nn.Parameter]:
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
    with clip_by_reference() as kept:
        norm = fsdp2x.clip_grad_norm_(params, max_norm, norm_type)
    # The kernels compute in fp32: what is f64 is torch's.
    assert kept.num_plans > 0 or all(param.grad is None or param.grad.dtype is torch.float64 for param in params)
    grads = [[param.grad for param in ps if param.grad is not None] for ps in (copies, params)]
    return (expected, grads[0]), (norm, grads[1])


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("max_norm", [0.37, 1e9])
@pytest.mark.each_pair
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


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_that_are_not_finite(bad, dtype):
    params = with_gradients((dtype,))
    params[-1].grad[-1] = bad
    before = [param.grad.clone() for param in params]
    with clip_by_reference(), pytest.raises(RuntimeError, match=f"is {bad}"):
        fsdp2x.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.grad.nan_to_num(-7.0), old.nan_to_num(-7.0)), "refused, so nothing is scaled"
    (expected, theirs), (norm, ours) = both(params, 1.0)
    assert norm.isnan() == expected.isnan() and not norm.isfinite()
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def test_what_the_kernels_cannot_take_is_left_to_torch():
    """Strides with holes, next to gradients that lie densely in another order."""
    params = with_gradients(sizes=((6, 10), (10, 6)))
    params[0].grad = torch.randn(6, 20)[:, ::2]
    params[1].grad = torch.randn(6, 10).t()
    (expected, theirs), (norm, ours) = both(params, 0.1)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("num", [3, 300])
def test_nothing_is_read_back_and_the_number_of_operations_is_constant(num):
    """On a device every number that the host asks for stops it, and so does every copy to it."""
    params = with_gradients(sizes=[(7, 5)] * num)
    with clip_by_reference():
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
