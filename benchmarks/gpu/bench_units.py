"""Measures the cost of a unit on a GPU: host time, kernels, and copies of forward and backward, against FSDP2.

    python benchmarks/gpu/bench_units.py            # a table, and benchmarks/results/<gpu>-<date>.json
    python benchmarks/gpu/bench_units.py --quick
    python benchmarks/gpu/bench_units.py --device cpu --json FILE    # a dry run: no kernels are counted

The model and the method are those of ``bench_host.py``: small units of 11 parameters, so the host is the limit. The
cost of the unsharded model is subtracted. Losses and gradients of both sides must agree, or there is no row.

The host's target is a time. A ratio to FSDP2 would say as much about the CPU, because both sides scale differently
with it.

World size 1 needs no communication. At 8, the process group is torch's fake one and collectives are empty, so their own
launches are not counted. There fsdp2x gathers once packed, like small parameters, and once each parameter alone, like
large ones. Counts come from a profiler's trace of one step. The same trace shows the host's waits. A steady step should
have none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_host  # noqa: E402
from gpu import device_work, gpu_device, gpu_results, hf_shapes  # noqa: E402

TARGET_HOST_US = (150.0, 200.0)  # at most, for a pass of a unit: on one rank, on several
TARGET_LAUNCHES = 2.0  # times less than stock
SIDES = ("stock", "fsdp2x", "unsharded")


@dataclass(frozen=True)
class Case:
    world: int
    policy: str
    num_units: int = 16
    gathers: str = "packed"  # or "alone", each parameter


CASES = [Case(1, policy) for policy in ("fp32", "bf16")]
CASES += [Case(8, policy, gathers=gathers) for gathers in ("packed", "alone") for policy in ("fp32", "bf16")]


@contextlib.contextmanager
def gathering(how: str) -> Iterator[None]:
    """fsdp2x takes the fake group for a backend that gathers so; many gathers are what one is, each in turn."""
    from fsdp2x.base import torch_private
    from fsdp2x.sharding import transport

    def gather_each(group: dist.ProcessGroup, outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for output, source in zip(outputs, sources, strict=True):
            gather(output, source, group=group)

    below = 0 if how == "alone" else None
    with (
        mock.patch.object(transport, "pack_below_bytes", lambda gathers, world: below),
        mock.patch.object(torch_private, "all_gather_group", gather_each),
    ):
        yield


def work_of_step(model: nn.Module, device: gpu_device.Device, dtype: torch.dtype | None) -> dict:
    """Counts of one steady forward and backward, and the runtime's calls by which the host waited.

    ``dtype``: what a sharded model would cast its inputs to, for one that does not.
    """
    x = bench_host.input_of(device.type)
    params = list(model.parameters())

    def step() -> None:
        model(x if dtype is None else x.to(dtype)).sum().backward()
        for param in params:
            param.grad = None
        x.grad = None

    with bench_host.collectives(bench_host.nothing, bench_host.nothing):
        for _ in range(3):
            step()
        device_work.trace_of(step, device.type)  # the profiler's own first allocations
        trace = device_work.trace_of(step, device.type)
    # The trace's end waits for the device, and one of these calls is this script's.
    return {**device_work.counts(device_work.work_of(trace)), "waits": device_work.waits_of(trace)}


def run_case(case: Case, device: gpu_device.Device, steps: int) -> dict:
    policy = hf_shapes.POLICIES[case.policy]
    host_case = bench_host.Case("world", world=case.world, num_units=case.num_units)
    with gpu_device.alone_in(device, case.world) as mesh, gathering(case.gathers):
        models = bench_host.make_sides(host_case, mesh, mp_policy=policy)
        plain_dtype = policy.param_dtype
        if plain_dtype is not None:
            models["unsharded"].to(plain_dtype)
        times = bench_host.time_sides(host_case, models, device.type, steps, before=device.synchronize)
        work = {
            side: work_of_step(models[side], device, plain_dtype if side == "unsharded" else None) for side in SIDES
        }
    waits = {side: work[side].pop("waits") for side in SIDES}
    return {
        "case": asdict(case),
        "host_us": {side: times[side]["us_per_unit"] for side in ("stock", "fsdp2x")},
        "launches": {
            side: device_work.per_unit(work[side], work["unsharded"], case.num_units) for side in ("stock", "fsdp2x")
        },
        "waits": {side: sorted(waits[side]) for side in SIDES},
    }


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: a unit above the unsharded model; what misses its target is marked."""
    rows = [["world", "gathers", "precision", "of a unit", "stock FSDP2", "fsdp2x", "ratio", "target"]]
    for result in results:
        head = [str(result["case"]["world"]), result["case"]["gathers"], result["case"]["policy"]]
        for phase in ("forward", "backward"):
            stock, ours = (result["host_us"][side][phase] for side in ("stock", "fsdp2x"))
            limit = TARGET_HOST_US[result["case"]["world"] > 1]
            ratio, _ = _ratio(stock, ours, None)
            mark = " (missed)" if ours > limit else ""
            rows.append([*head, f"host, {phase}, µs", f"{stock:.0f}", f"{ours:.0f}{mark}", ratio, f"{limit:.0f} µs"])
        for kind in ("kernels", "copies", "fills", "all"):
            stock, ours = (result["launches"][side][kind] for side in ("stock", "fsdp2x"))
            target = TARGET_LAUNCHES if kind == "all" else None
            title = "kernels, copies and fills" if kind == "all" else kind
            rows.append([*head, title, f"{stock:.1f}", f"{ours:.1f}", *_ratio(stock, ours, target)])
    return rows


def targets_of(results: list[dict]) -> list[gpu_results.Target]:
    """The host's time, launches and waits of a unit."""
    targets = []
    for result in results:
        alone = ", alone" if result["case"]["gathers"] == "alone" else ""
        head = f"{result['case']['world']} ranks{alone}, {result['case']['policy']}"
        for phase in ("forward", "backward"):
            ours, limit = result["host_us"]["fsdp2x"][phase], TARGET_HOST_US[result["case"]["world"] > 1]
            what = f"{head}: host, {phase}"
            targets.append(gpu_results.Target(what, f"{ours:.0f} µs", f"{limit:.0f} µs", ours <= limit))
        stock, ours = (result["launches"][side]["all"] for side in ("stock", "fsdp2x"))
        targets.append(gpu_results.times(f"{head}: kernels, copies and fills", stock, ours, TARGET_LAUNCHES))
        more = len(result["waits"]["fsdp2x"]) - len(result["waits"]["unsharded"])
        targets.append(gpu_results.Target(f"{head}: the host's waits in a step", str(more), "0", more <= 0))
    return targets


def _ratio(stock: float, ours: float, target: float | None) -> tuple[str, str]:
    if ours <= 0:
        return ("none of ours" if stock > 0 else "", "" if target is None else f"{target:.0f}x")
    mark = " (missed)" if target is not None and stock / ours < target else ""
    return f"{stock / ours:.1f}x{mark}", "" if target is None else f"{target:.0f}x"


def main() -> int:
    arguments = gpu_results.parser(__doc__).parse_args()
    device = gpu_device.open_device(arguments.device)
    if device is None:
        return 0
    cases, steps = CASES, 20
    if arguments.quick or device.is_dry_run:
        cases, steps = [Case(1, "fp32", 8), Case(1, "bf16", 8)], 5
    if device.is_dry_run:
        cases = [Case(1, "fp32", 2), Case(2, "fp32", 2), Case(2, "fp32", 2, "alone")]
    results = [run_case(case, device, steps) for case in cases]
    gpu_results.publish(arguments, device, "units", results, rows_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
