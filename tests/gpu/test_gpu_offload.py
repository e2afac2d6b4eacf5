"""One GPU: what each mode of HostOffloadPolicy computes, keeps on the device, and copies."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
from fsdp2x.base.native import _C
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from one_gpu import clean_base, needs_gpu, requested_bytes
from reference import same, shard

pytestmark = [needs_gpu, pytest.mark.shows("offload")]

WIDTH = 64
BIG_UNITS = [f"blocks.{i}" for i in range(4)]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MODES = ("optimizer", "gradients", "all")


def on_gpu(ctx, model: nn.Module, mode: str, units=STACK_UNITS, **options) -> nn.Module:
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (ctx.world,))
    if mode == "budget":  # half of the bytes, so that units span the GPU and the CPU
        model = copy.deepcopy(model)
        policies = fsdp2x.cpu_offload_by_budget(model, sum(param.nbytes for param in model.parameters()) // 2)
        return fsdp2x.fully_shard(model, mesh=mesh, auto_wrap=True, offload_policy=policies, **options)
    policy = fsdp2x.HostOffloadPolicy(mode)
    return shard(ctx, copy.deepcopy(model), units, mesh=mesh, offload_policy=policy, **options)


def measured(ctx, mode: str) -> tuple[int, nn.Module, fsdp2x.optim.AdamW]:
    """Returns the device's bytes before a large model existed, and that model."""
    torch.cuda.set_device(0)
    base = clean_base()
    model = on_gpu(ctx, Stack(num=4, width=1024, hidden=1024), mode, BIG_UNITS)
    return base, model, fsdp2x.optim.AdamW(model.parameters(), lr=1e-5)


def train(model, optimizer, ctx, steps, width: int = WIDTH) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        loss = model(inputs(ctx.rank, step, rows=16, width=width).cuda()).float().square().mean()
        loss.backward()
        fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def values(model) -> list[torch.Tensor]:
    return [param.detach().to_local().cpu().clone() for param in model.parameters()]


def moments(optimizer) -> list[torch.Tensor]:
    return [state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


@distributed(world_sizes=(1, 2), timeout=300)
@pytest.mark.parametrize("mode", [*MODES, "budget"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16])
def test_trains_as_without_offloading(ctx, mode, policy):
    model = Stack(width=WIDTH, hidden=96)
    results = []
    for one in ("none", mode):
        trained = on_gpu(ctx, model, one, mp_policy=policy, reshard_after_forward=True)
        optimizer = fsdp2x.optim.AdamW(trained.parameters(), lr=1e-2)
        losses = train(trained, optimizer, ctx, range(5))
        results.append([*losses, *values(trained)])
    # Device steps are equal bit for bit. The host's norm is summed in another order.
    close = {} if mode == "optimizer" else {"rtol": 1e-3, "atol": 1e-5}
    same(results[1], results[0], "losses and parameters", **close)
    state = moments(optimizer)
    assert all(moment.device.type == "cpu" for moment in state)
    if mode == "optimizer":
        assert all(moment.is_pinned() for moment in state if moment.numel())
        assert all(param.to_local().is_cuda and param.grad is None for param in trained.parameters())


@distributed(world_sizes=(1,), timeout=300)
@pytest.mark.parametrize("moments_dtype", [torch.float32, torch.bfloat16])
def test_16_bit_parameters_keep_their_rounding(ctx, moments_dtype):
    if not _C.has_device_kernels():
        pytest.skip("built without kernels for CUDA")
    model = Stack(width=WIDTH, hidden=96).bfloat16()
    results = []
    for mode in ("none", "optimizer"):
        trained = on_gpu(ctx, model, mode)
        optimizer = fsdp2x.optim.AdamW(
            trained.parameters(), lr=1e-2, moments_dtype=moments_dtype, stochastic_rounding=True, seed=5
        )
        for step in range(4):
            x = inputs(ctx.rank, step, rows=16, width=WIDTH).cuda().bfloat16()
            trained(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([*values(trained), *(moment.cpu() for moment in moments(optimizer))])
    same(results[1], results[0], "parameters and moments")


@distributed(world_sizes=(1,), timeout=300)
@pytest.mark.parametrize("mode", MODES)
def test_the_device_holds_what_the_report_says(ctx, mode):
    base, model, optimizer = measured(ctx, mode)
    plan = fsdp2x.memory_report(model, optimizer)
    for step in range(3):
        train(model, optimizer, ctx, range(step, step + 1), width=1024)
    report = fsdp2x.memory_report(model, optimizer)
    assert {name: getattr(plan, name) for name in report.measured} == report.measured
    held = requested_bytes() - base
    # Counters, flags, and kernel plans. Gradients on the device stay until the next forward.
    assert abs(held - plan.device_resting_bytes) <= 2**20, (held, str(plan))
    x = inputs(ctx.rank, 9, rows=16, width=1024).cuda()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert abs(peak - plan.optimizer_step_bytes) <= 2**20, (peak, plan.optimizer_step_bytes)


def copies(run, kind: str) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.key.startswith(f"Memcpy {kind}"))


@distributed(world_sizes=(1,), timeout=300)
def test_copies_of_a_step(ctx):
    """Copies from pinned memory, one per unit each way. The gradients mode only uploads in forward."""
    counts = {}
    for mode in ("gradients", "all"):
        model = on_gpu(ctx, Stack(num=4, width=256, hidden=256), mode, BIG_UNITS, reshard_after_forward=True)
        x = inputs(ctx.rank, 0, rows=16, width=256).cuda()

        def step(model=model, x=x) -> None:
            model(x).square().mean().backward()
            model.zero_grad()

        step()
        step()
        counts[mode] = {"in": copies(step, "HtoD (Pinned"), "out": copies(step, "DtoH (Device -> Pinned")}
    assert counts["all"]["out"] == counts["gradients"]["out"] == 5, counts
    assert counts["gradients"]["in"] == 5 and 8 <= counts["all"]["in"] <= 10, counts
