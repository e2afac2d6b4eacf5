"""Measures one training step of HuggingFace shapes on one GPU: fsdp2x against FSDP2, alternating, world size 1.

    python benchmarks/gpu/bench_step.py            # a table, and benchmarks/results/<gpu>-<date>.json
    python benchmarks/gpu/bench_step.py --quick    # the shape of the target, and a few wide blocks
    python benchmarks/gpu/bench_step.py --cases qwen3-0.6b:512 llama-8b:2048
    python benchmarks/gpu/bench_step.py --device cpu --json FILE    # a dry run: tiny models
    torchrun --nproc_per_node=8 benchmarks/gpu/bench_step.py --cases llama-8b:8192 qwen3-30b-a3b:2048    # on all GPUs

Models are built from configs with equal weights, over the same units (fsdp2x's plan). fsdp2x uses its own AdamW, and
FSDP2 uses torch's fused one, its fastest. Times come from events on the device, which is idle before each step. "host"
is the time that the host took to enqueue the step. If a shape does not fit twice with AdamW's state, it gets fewer
layers. Losses of both sides must agree at every step, or there is no row. No TF32.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import harness  # noqa: E402
import peers  # noqa: E402
from gpu import gpu_device, gpu_results, hf_shapes  # noqa: E402

LR = 1e-4
TARGETS = {"qwen3-0.6b:512": 1.2}  # speedup over FSDP2; all other shapes must not be slower
# Weights, gradients, and two moments in fp32 of two models, and 10 % for a full unit and its copies in flight.
BYTES_PER_ELEMENT = 2 * 16 * 1.1
# Of the free memory. Where a step fills the card, the allocator frees its cache and waits, which is no time of a step.
SHARE_OF_MEMORY = 0.6
# Per token and element of the vocabulary: logits, their gradient and fp32 copies of them, of one model at a time.
BYTES_PER_LOGIT = 16
PHASES = ("step", "forward", "backward", "optimizer", "host")


@dataclass(frozen=True)
class Case:
    name: str
    shape: hf_shapes.Shape
    tokens: int
    policy: str


CASES = ("qwen3-0.6b:512", "qwen3-0.6b:4096", "llama-1b:512", "llama-1b:4096", "llama-8b:2048", "qwen3-8b:2048")
QUICK = ("qwen3-0.6b:512", "llama-8b:2048")
DRY_RUN = ("qwen3-tiny:8", "llama-tiny:8")


def case_of(name: str, policy: str, free_bytes: int, ranks: int = 1) -> Case:
    """The case `shape:tokens`, with as many layers as fit.

    Raises:
        ValueError: no such shape.
    """
    shape, _, tokens = name.partition(":")
    known = {**hf_shapes.SHAPES, **hf_shapes.TINY}
    if shape not in known or not tokens.isdigit():
        raise ValueError(f"--cases takes shape:tokens with one of {[*known]}, got {name!r}")
    for_logits = BYTES_PER_LOGIT * known[shape].vocab * int(tokens)
    # Both models are whole on each rank before they are sharded, in fp32.
    per_element = max(BYTES_PER_ELEMENT / ranks, 2 * 4.4)
    left = SHARE_OF_MEMORY * free_bytes - for_logits
    return Case(name, known[shape].fitting(left, per_element), int(tokens), policy)


def shard_ours(model: nn.Module, mesh: DeviceMesh, policy: str) -> nn.Module:
    import fsdp2x

    return fsdp2x.fully_shard(model, mesh=mesh, mp_policy=hf_shapes.POLICIES[policy], transport="process_group")


def shard_stock(model: nn.Module, mesh: DeviceMesh, policy: str) -> nn.Module:
    return peers.shard_stock(model, mesh=mesh, mp_policy=hf_shapes.POLICIES[policy])


def adamw_of(side: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer that a side is measured with."""
    import fsdp2x

    return fsdp2x.optim.AdamW if side == "fsdp2x" else functools.partial(torch.optim.AdamW, fused=True)


def make_step(model: nn.Module, optimizer, inputs: dict, losses: list) -> Callable[[harness.PhaseTimer], None]:
    def step(timer: harness.PhaseTimer) -> None:
        loss = model(**inputs).loss
        timer.mark("forward")
        loss.backward()
        timer.mark("backward")
        optimizer.step()
        optimizer.zero_grad()
        timer.mark("optimizer")
        losses.append(loss.detach())

    return step


def same_losses(case: Case, ours: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    """The first loss comes from the same weights; later ones from weights that two optimizers have rounded.

    AdamW's first updates have the size of the learning rate, whatever the gradient's size, and attention may sum in any
    order. So a different last bit of a tiny gradient shows in later losses.
    """
    mine, theirs = torch.stack(ours).double().cpu(), torch.stack(stock).double().cpu()
    first, later = (1e-5, 1e-3) if case.policy == "fp32" else (1e-3, 5e-2)
    agree = torch.allclose(mine[:1], theirs[:1], rtol=first, atol=0.0) and torch.allclose(
        mine, theirs, rtol=later, atol=0.0
    )
    if not agree or not theirs[-1] < theirs[0]:
        raise AssertionError(
            f"{case.name} in {case.policy}: losses must agree and fall: fsdp2x {mine.tolist()}, stock {theirs.tolist()}"
        )


def run_case(case: Case, device: gpu_device.Device, steps: int) -> dict:
    inputs = hf_shapes.batch(case.shape, case.tokens, device.type)
    losses: dict[str, list[torch.Tensor]] = {"stock": [], "fsdp2x": []}
    with gpu_device.alone_in(device, world=1) as mesh:
        sides = {}
        for side, shard in (("stock", shard_stock), ("fsdp2x", shard_ours)):
            model = shard(hf_shapes.build(case.shape, device.type), mesh, case.policy)
            sides[side] = make_step(model, adamw_of(side)(model.parameters(), lr=LR), inputs, losses[side])
        samples = harness.alternate(
            sides,
            warmup=3,
            count=steps,
            before=device.synchronize,
            make_timer=functools.partial(gpu_device.DeviceTimer, device),
        )
        same_losses(case, losses["fsdp2x"], losses["stock"])
        del sides, model
    device.clear()
    return {"case": asdict(case), **{side: sample.summary() for side, sample in samples.items()}}


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: medians, and how many times faster than stock FSDP2 they are; what misses its target is marked."""
    rows = [["shape", "layers", "tokens", "precision", "phase", "stock FSDP2, ms", "fsdp2x, ms", "ratio", "target"]]
    for result in results:
        case = result["case"]
        shape = case["name"].partition(":")[0]
        for phase in PHASES:
            stock, ours = (result[side][phase]["median_ms"] for side in ("stock", "fsdp2x"))
            target = TARGETS.get(case["name"], 1.0) if phase == "step" else None
            mark = " (missed)" if target is not None and stock / ours < target else ""
            head = [shape, str(case["shape"]["layers"]), str(case["tokens"]), case["policy"], phase]
            shown = "" if target is None else f"{target:.1f}x"
            rows.append([*head, f"{stock:.2f}", f"{ours:.2f}", f"{stock / ours:.2f}x{mark}", shown])
    return rows


def targets_of(results: list[dict]) -> list[gpu_results.Target]:
    """Whole steps."""
    targets = []
    for result in results:
        case = result["case"]
        stock, ours = (result[side]["step"]["median_ms"] for side in ("stock", "fsdp2x"))
        what = f"{case['name']}, {case['shape']['layers']} layers, {case['policy']}: step"
        targets.append(gpu_results.times(what, stock, ours, TARGETS.get(case["name"], 1.0)))
    return targets


def main() -> int:
    parser = gpu_results.parser(__doc__)
    parser.add_argument("--cases", nargs="+", help=f"shape:tokens; default {' '.join(CASES)}")
    parser.add_argument("--policies", nargs="+", choices=[*hf_shapes.POLICIES], default=[*hf_shapes.POLICIES])
    parser.add_argument("--steps", type=int, help="default 15, quick 7")
    arguments = parser.parse_args()
    device = gpu_device.open_device(arguments.device)
    if device is None:
        return 0
    names = arguments.cases or (DRY_RUN if device.is_dry_run else QUICK if arguments.quick else CASES)
    steps = arguments.steps or (7 if arguments.quick or device.is_dry_run else 15)
    results = []
    for name in names:
        for policy in arguments.policies:
            ranks = int(os.environ.get("WORLD_SIZE", 1))
            results.append(run_case(case_of(name, policy, device.free_bytes(), ranks), device, steps))
            # Keeps these results if a later case fails.
            gpu_results.publish(arguments, device, "step", results, rows_of(results[-1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
