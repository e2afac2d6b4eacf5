"""AdamW through the device's kernels, run by their twins: the bits of the CPU kernel, and plans that stay."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fsdp2x
from fsdp2x.runtime.native import _C

SIZES = ((5, 7), (0, 3), (1033,), (), (6, 4, 3), (70000,))
SETTINGS = {
    "float32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True, "maximize": True}),
    "bf16 moments": (torch.float32, {"moments_dtype": torch.bfloat16}),
    "bf16": (torch.bfloat16, {"moments_dtype": torch.bfloat16, "amsgrad": True}),
    "fp16": (torch.float16, {"moments_dtype": torch.float32}),
    "stochastic": (torch.bfloat16, {"moments_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 7}),
}


def parameters(dtype, sizes=SIZES) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def pair(params, **options):
    """The optimizer of the CPU kernel, and that of the twins over copies of the parameters."""
    ours = copy.deepcopy(params)
    groups = [[{"params": ps[::2], "lr": 1e-2}, {"params": ps[1::2], "weight_decay": 0.1}] for ps in (params, ours)]
    on_cpu, on_device = (fsdp2x.optim.AdamW(one, **options) for one in groups)
    on_device._on_device = _C.DeviceSteps(with_twins=True)
    return on_cpu, on_device, ours


def step(number: int, *optimizers, skip=()) -> None:
    for optimizer in optimizers:
        torch.manual_seed(100 + number)
        for index, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            param.grad = None if index in skip else torch.randn(param.shape).to(param.dtype)
        optimizer.step()


def same_bits(one, other) -> None:
    for first, second in zip(one.param_groups, other.param_groups, strict=True):
        for a, b in zip(first["params"], second["params"], strict=True):
            assert torch.equal(a, b)
            for name, value in one.state[a].items():
                assert torch.equal(value, other.state[b][name]), name


@pytest.mark.parametrize("setting", SETTINGS)
def test_bits_of_the_cpu_kernel(setting):
    dtype, options = SETTINGS[setting]
    params = parameters(dtype)
    on_cpu, on_device, ours = pair(params, **options)
    versions = [param._version for param in ours]
    for number in range(4):
        step(number, on_cpu, on_device, skip=(0,) if number == 2 else ())
        same_bits(on_cpu, on_device)
    assert all(param._version > before for param, before in zip(ours, versions, strict=True))
    assert on_device._on_device.num_plans > 0 == on_cpu._on_device.num_plans


def test_a_plan_is_built_once_and_again_when_memory_moves():
    on_cpu, on_device, ours = pair(parameters(torch.float32))
    step(0, on_cpu, on_device)
    assert on_device._on_device.num_plans == 1, "two groups share a launch"
    for number in range(1, 4):
        step(number, on_cpu, on_device)
    assert on_device._on_device.num_plans == 1
    ours[0].data = ours[0].data.clone()
    step(4, on_cpu, on_device)
    assert on_device._on_device.num_plans == 2
    same_bits(on_cpu, on_device)


def test_more_parameters_and_counts_than_a_launch_can_name():
    params = parameters(torch.float32, [(3,)] * 700)
    on_cpu, on_device, _ = pair(params)
    step(0, on_cpu, on_device)
    assert on_device._on_device.num_plans == 3
    # Parameters that skipped different numbers of steps have corrections of their own: more than 32 of them.
    for number in range(1, 40):
        step(number, on_cpu, on_device, skip=range(0, 10 * number, 2))
    step(40, on_cpu, on_device)
    same_bits(on_cpu, on_device)


def test_an_optimizer_that_was_pickled_goes_on():
    params = parameters(torch.float32, [(4,)])
    optimizer = fsdp2x.optim.AdamW(params)
    again = pickle.loads(pickle.dumps(optimizer))
    for one in (optimizer, again, copy.deepcopy(again)):
        step(0, one)
    same_bits(optimizer, again)


def test_without_kernels_for_its_memory_torch_steps():
    params = parameters(torch.float64)
    on_cpu, on_device, _ = pair(params)
    step(0, on_cpu, on_device)
    same_bits(on_cpu, on_device)
    assert on_device._on_device.num_plans == 0
