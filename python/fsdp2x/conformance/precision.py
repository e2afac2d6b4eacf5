"""MixedPrecisionPolicy: the dtypes of parameters, inputs, outputs, and reductions."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.conformance.behavior import UNITS, Context, Net, behavior, close, data, full, mean_square, same_gradients

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Recording(Net):
    """Keeps the dtypes of the parameters and inputs of the norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {"param": self.norm.weight.dtype, "input": x.dtype}
        return super().forward(x)


@behavior(rows=(BF16, F16))
def computes_in_param_dtype(t: Context, dtype: torch.dtype) -> None:
    """In forward, parameters and floating-point inputs have param_dtype; sharded parameters keep theirs."""
    model = t.shard(Recording(), UNITS, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    output = model(data(t.rank))
    assert model.seen == {"param": dtype, "input": dtype} and output.dtype == dtype
    output.float().sum().backward()
    assert {param.dtype for param in model.parameters()} == {F32}
    assert {param.grad.dtype for param in model.parameters()} == {F32}


@behavior()
def casts_output(t: Context) -> None:
    """output_dtype is the dtype of floating-point outputs."""
    model = t.shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32))
    assert model(data(t.rank)).dtype == F32


@behavior()
def leaves_inputs(t: Context) -> None:
    """With cast_forward_inputs=False, inputs keep their dtype."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    model = t.shard(Recording(), mp_policy=policy)
    assert model(data(t.rank).bfloat16()).dtype == BF16 and model.seen["input"] == BF16
    try:
        model(data(t.rank))
    except RuntimeError:
        return
    raise AssertionError("float32 inputs met bfloat16 weights, so the forward should have failed")


@behavior()
def leaves_integers(t: Context) -> None:
    """Integer inputs are not cast."""
    model = t.shard(nn.Embedding(11, 6), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert model(torch.arange(4)).dtype == BF16


POLICIES = {
    "bf16": (BF16, None),
    "bf16, fp32": (BF16, F32),
    "bf16, bf16": (BF16, BF16),
    "fp32, bf16": (None, BF16),
    "fp16, fp32": (F16, F32),
}


@behavior(rows=POLICIES)
def gradients_follow_the_policy(t: Context, param_dtype: Any, reduce_dtype: Any) -> None:
    """Gradients are those of a model in param_dtype, averaged over ranks, in the dtype of the parameters."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    plain = Net()
    model = t.shard(copy.deepcopy(plain), UNITS, mp_policy=policy)
    for step in range(2):
        mean_square(model, t.rank, step).backward()
    dtype = param_dtype or F32
    for param in plain.parameters():
        param.grad = torch.zeros_like(param)
    for rank in range(t.world):
        for step in range(2):
            twin = copy.deepcopy(plain).to(dtype)
            twin.zero_grad()
            twin(data(rank, step).to(dtype)).float().square().mean().backward()
            for param, one in zip(plain.parameters(), twin.parameters(), strict=True):
                assert param.grad is not None and one.grad is not None
                param.grad += one.grad.float() / t.world
    assert {param.grad.dtype for param in model.parameters()} == {F32}
    same_gradients(model, plain, rtol=2e-2, atol=3e-3)


@behavior(rows=(F32, BF16))
def accumulates_in_reduce_dtype(t: Context, reduce_dtype: torch.dtype) -> None:
    """Gradients that wait for a later reduction add up in reduce_dtype."""
    model = t.shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype))
    plain = Net()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        mean_square(model, t.rank, step).backward()
        t.backward(plain, step)
    same_gradients(model, plain, rtol=5e-2, atol=1e-2)


@behavior()
def units_differ_in_policy(t: Context) -> None:
    """Each unit has its own policy."""
    model = Net()
    t.engine(model.blocks[0], **t.options, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32))
    t.engine(model, **t.options)
    assert model(data(t.rank)).dtype == F32
    plain = Net()
    mean_square(model, t.rank).backward()
    t.backward(plain)
    same_gradients(model, plain, rtol=5e-2, atol=1e-2)


@behavior(torch=(2, 15))
def overrides_single_parameters(t: Context) -> None:
    """param_dtype_override_fn chooses between param_dtype and the stored dtype for single parameters."""
    policy = MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=F32, param_dtype_override_fn=lambda param: F32 if param.dim() == 1 else None
    )
    model = t.shard(nn.Linear(6, 6, bias=True), mp_policy=policy)
    model.unshard()
    assert model.weight.dtype == BF16 and model.bias.dtype == F32


@behavior(rows=(BF16, torch.float64))
def converts_sharded_models(t: Context, dtype: torch.dtype) -> None:
    """model.to(dtype) converts the sharded parameters, and training goes on in the new dtype."""
    plain, model = Net().to(dtype), t.shard(Net(), UNITS).to(dtype)
    assert {param.dtype for param in model.parameters()} == {dtype}
    output = model(data(t.rank).to(dtype))
    close(output, plain(data(t.rank).to(dtype)), "output", rtol=2e-2, atol=1e-2)
    output.sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {dtype}


@behavior(rows=[(dtype, how) for dtype in (F16, F32) for how in ("good", "bad", "bad, unscaled and clipped")])
def scales_gradients(t: Context, reduce_dtype: torch.dtype, how: str) -> None:
    """torch's GradScaler skips a step on all ranks, and halves its scale, if the loss of one rank is infinite."""
    policy = MixedPrecisionPolicy(param_dtype=F16, reduce_dtype=reduce_dtype)
    options = {"mesh": t.mesh(2, -1, names=("replicate", "shard"))} if t.world > 2 else {}
    model = t.shard(Net(), UNITS, mp_policy=policy, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bad = {} if how == "good" else {1: t.world - 1, 3: 0}
    for step, scale in enumerate((1, 0.5, 0.5, 0.25, 0.25) if bad else (1, 2, 2, 4, 4)):
        before = full(model.head.weight).clone()
        loss = mean_square(model, t.rank, step) * (math.inf if bad.get(step) == t.rank else 1.0)
        scaler.scale(loss).backward()
        if "clipped" in how:
            scaler.unscale_(optimizer)
            assert (full(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) < 1e3) == (step not in bad)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 4096.0 * scale, f"step {step}: scale {scaler.get_scale()}"
        assert torch.equal(full(model.head.weight), before) == (step in bad), f"step {step}"
