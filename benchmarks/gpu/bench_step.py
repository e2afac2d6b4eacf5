"""Measures one training step of HuggingFace shapes on one GPU: fsdp2x, FSDP2, and the unsharded model, world size 1.

    python benchmarks/gpu/bench_step.py            # a table, and benchmarks/results/<gpu>-<date>.json
    python benchmarks/gpu/bench_step.py --quick    # the shape of the target, and a few wide blocks
    python benchmarks/gpu/bench_step.py --cases qwen3-0.6b:512 llama-8b:2048
    python benchmarks/gpu/bench_step.py --device cpu --json FILE    # a dry run: tiny models
    torchrun --nproc_per_node=8 benchmarks/gpu/bench_step.py --cases llama-8b:8192 qwen3-30b-a3b:2048    # on all GPUs

Models are built from configs with equal weights, over the same units (fsdp2x's plan). fsdp2x uses its own AdamW, and
FSDP2 uses torch's fused one, its fastest. The unsharded model keeps its parameters in the compute dtype, so its forward
and backward are a lower bound, and its optimizer steps fewer bytes. Only one side is in memory at a time, in rounds
that change their order. A shape gets as many layers as fit into 60 % of free memory. If the allocator had to free its
cache, there is no row.

Times come from events on the device, which is idle before each step. "host" is the time that the host took to enqueue
the step. "device busy" is how long any kernel or copy of one more step ran, from a profiler's trace. Losses of fsdp2x
and FSDP2 must agree at every step, and the unsharded one's at the first step, or there is no row. No TF32.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import harness  # noqa: E402
import peers  # noqa: E402
from gpu import device_work, gpu_device, gpu_results, hf_shapes  # noqa: E402

LR = 1e-4
TARGETS = {"qwen3-0.6b:512": 1.2}  # speedup over FSDP2; all other shapes must not be slower
# Of the free memory. Where a step fills the card, the allocator frees its cache and waits, which is no time of a step.
SHARE_OF_MEMORY = 0.6
# Per token and element of the vocabulary: logits, their gradient and fp32 copies of them, of one model at a time.
BYTES_PER_LOGIT = 16
PHASES = ("step", "forward", "backward", "optimizer", "host", "device busy")
ROUNDS = 3


@dataclass(frozen=True)
class Case:
    name: str
    shape: hf_shapes.Shape
    tokens: int
    policy: str
    world: int = 1


class NoRow(Exception):
    """A measurement that would mislead."""


CASES = ("qwen3-0.6b:512", "qwen3-0.6b:4096", "llama-1b:512", "llama-1b:4096", "llama-8b:2048", "qwen3-8b:2048")
QUICK = ("qwen3-0.6b:512", "llama-8b:2048")
DRY_RUN = ("qwen3-tiny:8", "llama-tiny:8")


def case_of(name: str, policy: str, world: int, free_bytes: int) -> Case:
    """The case `shape:tokens`, with as many layers as fit: built whole in fp32, then sharded, one side at a time.

    Raises:
        ValueError: no such shape.
    """
    shape, _, tokens = name.partition(":")
    known = {**hf_shapes.SHAPES, **hf_shapes.TINY}
    if shape not in known or not tokens.isdigit():
        raise ValueError(f"--cases takes shape:tokens with one of {[*known]}, got {name!r}")
    sizes = known[shape]
    for_logits = BYTES_PER_LOGIT * sizes.vocab * int(tokens)
    for_units = 10 * 4 * max(sizes.block_numel, sizes.vocab * sizes.hidden)  # slots, gradients, buffers
    # Weights, gradients, and two moments in fp32.
    per_element = (4 + 16 / world) * 1.1
    left = SHARE_OF_MEMORY * free_bytes - for_logits - for_units
    return Case(name, sizes.fitting(left, per_element), int(tokens), policy, world)


def shard_ours(model: nn.Module, mesh: DeviceMesh, policy: str) -> nn.Module:
    import fsdp2x

    return fsdp2x.fully_shard(model, mesh=mesh, mp_policy=hf_shapes.POLICIES[policy], transport="process_group")


def shard_stock(model: nn.Module, mesh: DeviceMesh, policy: str) -> nn.Module:
    return peers.shard_stock(model, mesh=mesh, mp_policy=hf_shapes.POLICIES[policy])


def leave_unsharded(model: nn.Module, mesh: DeviceMesh, policy: str) -> nn.Module:
    return model.to(hf_shapes.POLICIES[policy].param_dtype or torch.float32)


SIDES = {"stock": shard_stock, "fsdp2x": shard_ours, "unsharded": leave_unsharded}


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


def run_side(
    side: str,
    case: Case,
    device: gpu_device.Device,
    mesh: DeviceMesh,
    steps: int,
    samples: harness.Samples,
    losses: list[torch.Tensor],
) -> list[device_work.Work]:
    """Adds a round of one side, whose memory is free before and after it, and returns the work of one more step.

    Raises:
        NoRow: memory was short.
    """
    device.clear()
    retries = device.num_retries()
    model = SIDES[side](hf_shapes.build(case.shape, device.type), mesh, case.policy)
    inputs = hf_shapes.batch(case.shape, case.tokens, device.type)
    step = make_step(model, adamw_of(side)(model.parameters(), lr=LR), inputs, losses)
    timer = functools.partial(gpu_device.DeviceTimer, device)
    found = harness.alternate({side: step}, warmup=3, count=steps, before=device.synchronize, make_timer=timer)[side]
    if device.num_retries() != retries:
        raise NoRow(f"{case.name} in {case.policy}, {side}: the allocator freed its cache, which takes time")
    uncounted = harness.PhaseTimer(harness.Samples(), counted=False)
    work = device_work.work_of(device_work.trace_of(lambda: step(uncounted), device.type))
    found.add("device busy", device_work.busy_us(work) / 1e6)
    samples.extend(found)
    return work


def run_case(case: Case, device: gpu_device.Device, steps: int, sides: Sequence[str]) -> dict:
    samples = {side: harness.Samples() for side in sides}
    losses: dict[str, list[torch.Tensor]] = {}
    with gpu_device.alone_in(device, world=1) as mesh:
        for number in range(ROUNDS):
            for side in sides if number % 2 == 0 else reversed(sides):
                losses[side] = []
                run_side(side, case, device, mesh, -(-steps // ROUNDS), samples[side], losses[side])
    if {"stock", "fsdp2x"} <= set(sides):
        same_losses(case, losses["fsdp2x"], losses["stock"])
    first = [side_losses[0].float() for side_losses in losses.values()]
    torch.testing.assert_close(torch.stack(first), torch.stack([first[0]] * len(first)), rtol=1e-3, atol=0.0)
    device.clear()
    return {"case": asdict(case), **{side: sample.summary() for side, sample in samples.items()}}


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: medians, and how many times faster than stock FSDP2 they are; what misses its target is marked."""
    head = ["shape", "layers", "tokens", "precision", "phase", "stock FSDP2, ms", "fsdp2x, ms", "unsharded, ms"]
    rows = [[*head, "ratio", "target"]]
    for result in results:
        case = result["case"]
        for phase in PHASES:
            times = [result.get(side, {}).get(phase, {}).get("median_ms") for side in SIDES]
            stock, ours, _ = times
            if not any(times):
                continue
            first = [case["name"].partition(":")[0], str(case["shape"]["layers"]), str(case["tokens"]), case["policy"]]
            shown = ["" if time is None else f"{time:.2f}" for time in times]
            target = TARGETS.get(case["name"], 1.0) if phase == "step" and stock and ours else None
            ratio = f"{stock / ours:.2f}x" if stock and ours else ""
            mark = " (missed)" if target is not None and stock / ours < target else ""
            rows.append([*first, phase, *shown, ratio + mark, "" if target is None else f"{target:.1f}x"])
    return rows


def targets_of(results: list[dict]) -> list[gpu_results.Target]:
    """Whole steps."""
    targets = []
    for result in results:
        case = result["case"]
        if {"stock", "fsdp2x"} <= set(result):
            stock, ours = (result[side]["step"]["median_ms"] for side in ("stock", "fsdp2x"))
            what = f"{case['name']}, {case['shape']['layers']} layers, {case['policy']}: step"
            targets.append(gpu_results.times(what, stock, ours, TARGETS.get(case["name"], 1.0)))
    return targets


def main() -> int:
    parser = gpu_results.parser(__doc__)
    parser.add_argument("--cases", nargs="+", help=f"shape:tokens; default {' '.join(CASES)}")
    parser.add_argument("--policies", nargs="+", choices=[*hf_shapes.POLICIES], default=[*hf_shapes.POLICIES])
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], help="default: all, without unsharded under torchrun")
    parser.add_argument("--steps", type=int, help=f"in {ROUNDS} rounds; default 15, quick 9")
    arguments = parser.parse_args()
    device = gpu_device.open_device(arguments.device)
    if device is None:
        return 0
    names = arguments.cases or (DRY_RUN if device.is_dry_run else QUICK if arguments.quick else CASES)
    steps = arguments.steps or (3 if device.is_dry_run else 9 if arguments.quick else 15)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    sides = arguments.sides or [side for side in SIDES if ranks == 1 or side != "unsharded"]
    results = []
    for name in names:
        for policy in arguments.policies:
            try:
                results.append(run_case(case_of(name, policy, ranks, device.free_bytes()), device, steps, sides))
            except NoRow as error:
                print(f"no row: {error}", flush=True)
                continue
            # Keeps these results if a later case fails.
            gpu_results.publish(arguments, device, "step", results, rows_of(results[-1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
