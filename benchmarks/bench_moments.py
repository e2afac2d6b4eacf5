"""Measures a step of AdamW by the format of its moments: time, and bytes of state per parameter.

    python benchmarks/bench_moments.py [--steps 15] [--json FILE]

One process, plain float32 parameters (16.8 M in 16 matrices). All sides step alternately, on their own parameters with
the same gradients. ``torch`` is ``torch.optim.AdamW(fused=True)``. A row counts only if its parameters agree with those
of float32 moments, to a tenth of the distance that they moved.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import harness

NUM_PARAMS, SHAPE, LR = 16, (1024, 1024), 1e-3
STOCHASTIC = {"stochastic_rounding": True, "seed": 0}
SIDES: dict[str, dict] = {
    "float32": {},
    "bfloat16": {"moments_dtype": torch.bfloat16},
    "bfloat16, stochastic": {"moments_dtype": torch.bfloat16, **STOCHASTIC},
    "int8": {"moments_dtype": "int8"},
    "int8, stochastic": {"moments_dtype": "int8", **STOCHASTIC},
}


def make_params(grads: list[torch.Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(SHAPE)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of tensors an element, counters of steps left out."""
    tensors = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]
    numel = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors) / numel


def run(steps: int) -> dict:
    import fsdp2x

    torch.manual_seed(0)
    grads = [torch.randn(SHAPE) * 10 ** (-number / 4) for number in range(NUM_PARAMS)]
    params = {name: make_params(grads) for name in ("torch", *SIDES)}
    optimizers: dict[str, torch.optim.Optimizer] = {
        "torch": torch.optim.AdamW(params["torch"], lr=LR, fused=True, weight_decay=0.0)
    }
    for name, settings in SIDES.items():
        optimizers[name] = fsdp2x.optim.AdamW(params[name], lr=LR, weight_decay=0.0, **settings)

    def make(optimizer: torch.optim.Optimizer):
        def step(timer: harness.PhaseTimer) -> None:
            optimizer.step()
            timer.mark("optimizer")

        return step

    samples = harness.alternate(
        {name: make(optimizer) for name, optimizer in optimizers.items()},
        warmup=3,
        count=steps,
        before=lambda: None,
    )
    taken = LR * (3 + steps)
    for name in SIDES:
        for param, other in zip(params[name], params["float32"], strict=True):
            off = ((param - other).norm() / (taken * other.numel() ** 0.5)).item()
            assert off < 0.1, f"{name}: parameters are {off:.3f} of their way from float32's"
    return {
        name: {**samples[name].summary(), "state_bytes": state_bytes(optimizer)}
        for name, optimizer in optimizers.items()
    }


def rows_of(results: dict) -> list[list[str]]:
    rows = [["moments", "bytes of state a parameter", "step, ms", "range", "of float32's time"]]
    base = results["float32"]["step"]["median_ms"]
    for name, found in results.items():
        step = found["step"]
        spread = f"{step['min_ms']:.1f} to {step['max_ms']:.1f}"
        times = f"{step['median_ms'] / base:.2f}x"
        rows.append([name, f"{found['state_bytes']:.2f}", f"{step['median_ms']:.1f}", spread, times])
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    results = run(args.steps)
    print(harness.table(rows_of(results)), flush=True)
    harness.save(args.json, "moments", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
