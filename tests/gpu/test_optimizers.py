"""One GPU: optimizers and clipping with the device's kernels, against the CPU's and against torch's on the device."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2x
from device_reference import clip_by_reference, step_by_reference
from fsdp2x.base.native import _C
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from one_gpu import device_work, needs_traces
from reference import same, shard

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and finds none"),
    pytest.mark.skipif(not _C.has_device_kernels(), reason="needs the CUDA kernels, and fsdp2x was built without"),
    pytest.mark.shows("optimizers"),
]

SIZES = ((5, 7), (0, 3), (1033,), (), (6, 4, 3), (300001,))
OPTIMIZERS = {
    "float32": {"weight_decay": 0.1},
    "int8": {"moments_dtype": "int8"},
}
DTYPES = {
    "float32": (torch.float32,),
    "bfloat16": (torch.bfloat16,),
    "mixed": (torch.float32, torch.bfloat16, torch.float64, torch.float16),
}


def parameters(dtypes=(torch.float32,), sizes=SIZES) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtypes[i % len(dtypes)])) for i, size in enumerate(sizes)]


def on_gpu(params) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().cuda()) for param in params]


def set_gradients(step: int, *lists) -> None:
    """Sets equal gradients on every device. Every other one starts between two 16-byte words."""
    for params in lists:
        torch.manual_seed(100 + step)
        for index, param in enumerate(params):
            memory = torch.randn(param.numel() + 1).to(param.dtype).to(param.device)
            param.grad = memory[index % 2 :][: param.numel()].view(param.shape)


@contextlib.contextmanager
def host_never_waits():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launches(call) -> list[str]:
    """Returns the names of kernels, copies, and fills on the device during `call`."""
    torch.cuda.synchronize()
    return [work.name for work in device_work.work_of(device_work.trace_of(call))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_the_cpu_and_of_the_twins(name):
    here = parameters()
    twin, there = copy.deepcopy(here), on_gpu(here)
    optimizers = [fsdp2x.optim.AdamW(params, lr=1e-2, **OPTIMIZERS[name]) for params in (here, twin, there)]
    step_by_reference(optimizers[1])
    for step in range(4):
        set_gradients(step, here, twin, there)
        for optimizer in optimizers:
            optimizer.step()
    for first, second, third in zip(here, twin, there, strict=True):
        assert torch.equal(first, second) and torch.equal(first, third.cpu())
        for key, value in optimizers[0].state[first].items():
            assert torch.equal(value, optimizers[2].state[third][key].cpu()), key
    assert optimizers[2]._on_device.num_plans == 1


def test_steps_are_torchs_in_one_launch_without_waiting():
    ours, theirs = on_gpu(parameters()), on_gpu(parameters())
    optimizer, torchs = (make(p, lr=1e-2) for make, p in ((fsdp2x.optim.AdamW, ours), (torch.optim.AdamW, theirs)))
    for step in range(3):
        set_gradients(step, ours, theirs)
        with host_never_waits() if step > 0 else contextlib.nullcontext():
            optimizer.step()
        torchs.step()
    for param, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
    set_gradients(3, ours)
    needs_traces()
    names = launches(optimizer.step)
    assert len([name for name in names if "run_tiles" in name]) == 1 and len(names) == 1, names


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("max_norm", [0.37, 1e9])
def test_clipping_has_the_bits_of_the_twins(dtypes, max_norm):
    here = parameters(DTYPES[dtypes])
    there = on_gpu(here)
    set_gradients(0, here, there)
    with clip_by_reference():
        expected = fsdp2x.clip_grad_norm_(here, max_norm)
    norm = fsdp2x.clip_grad_norm_(there, max_norm)
    assert norm.is_cuda and norm.dtype is expected.dtype and norm.shape == ()
    assert torch.equal(norm.cpu(), expected)
    for param, other in zip(here, there, strict=True):
        assert torch.equal(param.grad, other.grad.cpu())


@pytest.mark.parametrize("num", [3, 300])
def test_clipping_neither_waits_nor_launches_more_for_more_gradients(num):
    params = on_gpu(parameters(sizes=[(7, 5)] * num))
    set_gradients(0, params)
    fsdp2x.clip_grad_norm_(params, 0.1)
    with host_never_waits():
        norm = fsdp2x.clip_grad_norm_(params, 0.05)
    assert norm > 0.05
    needs_traces()
    names = launches(lambda: fsdp2x.clip_grad_norm_(params, 0.04))
    assert len(names) <= 12, names
    assert sum("sum_squares_kernel" in name for name in names) == sum("run_tiles" in name for name in names) == 1, names


@distributed(world_sizes=(1, 2), timeout=300)
def test_sharded_models_on_a_stream_of_the_user(ctx):
    """Clipping and steps follow the gradients in stream order, with gloo ranks on one device."""
    torch.cuda.set_device(0)
    model = Stack(width=64, hidden=96)
    reference = shard(ctx, copy.deepcopy(model), STACK_UNITS, mesh=init_device_mesh("cpu", (ctx.world,)))
    ours = shard(ctx, model, STACK_UNITS, mesh=init_device_mesh("cuda", (ctx.world,)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    results = []
    for one, device in ((ours, "cuda"), (reference, "cpu")):
        optimizer = fsdp2x.local_optimizer(torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9))
        norms = []
        with torch.cuda.stream(stream) if device == "cuda" else contextlib.nullcontext():
            for step in range(3):
                one(inputs(ctx.rank, step, rows=16, width=64).to(device)).square().mean().backward()
                norms.append(fsdp2x.clip_grad_norm_(one.parameters(), 0.05))
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        results.append([norm.cpu() for norm in norms] + [param.to_local().detach().cpu() for param in one.parameters()])
    same(results[0], results[1], "norms and parameters", rtol=1e-4, atol=1e-6)
