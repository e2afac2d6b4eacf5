"""Measures the peak of a training step on one GPU: fsdp2x against FSDP2, one after the other, alone and as rank 0 of 8.

    python benchmarks/gpu/bench_memory.py            # a table, and benchmarks/results/<gpu>-<date>.json
    python benchmarks/gpu/bench_memory.py --quick
    python benchmarks/gpu/bench_memory.py --device cpu --json FILE    # a dry run: nothing is counted

HuggingFace shapes as in ``bench_step.py``. With eight ranks, the process group is torch's fake one, and memory is that
of rank 0. Gathered weights are this rank's rows eight times over, and parameters are gathered as NCCL gathers them.
NCCL's own buffers are not included. The first losses of both sides must agree, or there is no row.

``backward`` is the peak of allocated memory in forward and backward of the third step. ``step`` is the peak until the
optimizer has stepped. ``resting`` is the memory after it and ``zero_grad``. ``reserved`` is the most that the allocator
held in the third step, and ``retries`` how often it freed its cache in all steps. ``model`` is the memory of any
implementation: weights, buffers, and moments of this rank. ``plan`` is memory_report's estimate for fsdp2x between
steps and at the peak, without activations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_host  # noqa: E402
from gpu import bench_step, gpu_device, gpu_results, hf_shapes  # noqa: E402

SHARDERS = {"stock": bench_step.shard_stock, "fsdp2x": bench_step.shard_ours}


@dataclass(frozen=True)
class Case:
    name: str
    shape: hf_shapes.Shape
    tokens: int
    policy: str
    world: int


CASES = (("qwen3-0.6b:512", 1), ("llama-1b:512", 1), ("llama-1b:512", 8), ("llama-8b:512", 1), ("llama-8b:512", 8))
QUICK = (("llama-1b:512", 1), ("llama-1b:512", 8), ("llama-8b:512", 1), ("llama-8b:512", 8))
QUICK_LAYERS = 4  # of the untied model
RESTING_BYTES = 1 << 20  # allowed in addition to the model
DRY_RUN = (("qwen3-tiny:8", 1), ("llama-tiny:8", 2))


def case_of(name: str, policy: str, world: int, free_bytes: int) -> Case:
    """With as many layers as fit: built whole in fp32, then sharded with gradients and moments; one side at a time."""
    shape, _, tokens = name.partition(":")
    known = {**hf_shapes.SHAPES, **hf_shapes.TINY}[shape]
    for_logits = bench_step.BYTES_PER_LOGIT * known.vocab * int(tokens)
    for_units = 10 * 4 * max(known.block_numel, known.vocab * known.hidden)  # slots, gradients, buffers
    per_element = (4 + 16 / world) * 1.1
    return Case(name, known.fitting(free_bytes - for_logits - for_units, per_element), int(tokens), policy, world)


@contextmanager
def as_nccl() -> Iterator[None]:
    """fsdp2x takes the fake group for one that gathers many parameters at once, and sums are those of ranks alike.

    The fake group gathers, but its reductions may leave memory as it was, and in it is who has used which parameter.
    """
    from fsdp2x.base.native import _C
    from fsdp2x.sharding import transport

    with (
        mock.patch.object(transport, "pack_below_bytes", lambda gathers, world: _C.PACK_BELOW_BYTES),
        bench_host.collectives(None, bench_host.reduce_alike),
    ):
        yield


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of this rank's parts."""
    local = (one.to_local() if isinstance(one, DTensor) else one for one in tensors)
    return sum(one.numel() * one.itemsize for one in local)


def measure(side: str, case: Case, device: gpu_device.Device) -> dict:
    """Bytes of one side, and its first loss."""
    inputs = hf_shapes.batch(case.shape, case.tokens, device.type)
    device.clear()
    device.make_workspaces()
    base, retries = device.allocated_bytes(), device.num_retries()
    with gpu_device.alone_in(device, case.world) as mesh, as_nccl():
        model = SHARDERS[side](hf_shapes.build(case.shape, device.type), mesh, case.policy)
        optimizer = bench_step.adamw_of(side)(model.parameters(), lr=bench_step.LR)
        first_loss = None
        for _ in range(3):
            device.synchronize()
            device.restart_peak()
            loss = model(**inputs).loss
            loss.backward()
            backward = device.peak_bytes() - base
            optimizer.step()
            optimizer.zero_grad()
            step = device.peak_bytes() - base
            first_loss = loss.item() if first_loss is None else first_loss
            del loss
        device.synchronize()
        moments = (one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one))
        result = {
            "backward": backward,
            "step": step,
            "resting": device.allocated_bytes() - base,
            "reserved": device.reserved_bytes(),
            "retries": device.num_retries() - retries,
            "model": bytes_of([*model.parameters(), *model.buffers(), *moments]),
            "first_loss": first_loss,
        }
        if side == "fsdp2x":
            result |= plan_of(model, optimizer)
        del model, optimizer, moments
    device.clear()
    return result


def plan_of(model, optimizer) -> dict:
    import fsdp2x

    report = fsdp2x.memory_report(model, optimizer)
    return {
        "plan_resting": report.resting_bytes,  # torch's allocator gets slots and buffers back after each use
        "plan_peak": report.peak_bytes,
        "largest_unit": max(unit.slot_bytes for unit in report.units),
    }


def run_case(case: Case, device: gpu_device.Device) -> dict:
    sides = {side: measure(side, case, device) for side in SHARDERS}
    first, stock = (sides[side].pop("first_loss") for side in ("fsdp2x", "stock"))
    tolerance = 1e-5 if case.policy == "fp32" else 1e-3
    if not abs(first - stock) <= tolerance * abs(stock):
        raise AssertionError(f"{case}: the first loss must agree: fsdp2x {first}, stock {stock}")
    return {"case": asdict(case), **sides}


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: MiB of a rank, and by how many largest units fsdp2x needs less than stock."""
    rows = [["shape", "layers", "ranks", "precision", "what", "stock FSDP2, MiB", "fsdp2x, MiB", "largest units less"]]
    for result in results:
        case, stock, ours = result["case"], result["stock"], result["fsdp2x"]
        head = [case["name"].partition(":")[0], str(case["shape"]["layers"]), str(case["world"]), case["policy"]]
        for what in ("backward", "step", "resting", "reserved"):
            less = (stock[what] - ours[what]) / ours["largest_unit"]
            allowed = ours["model"] + RESTING_BYTES if what == "resting" else stock[what]
            mark = " (missed)" if what != "step" and ours[what] > allowed else ""
            rows.append([*head, what, f"{stock[what] / 2**20:.0f}", f"{ours[what] / 2**20:.0f}", f"{less:.2f}{mark}"])
        rows.append([*head, "model", f"{stock['model'] / 2**20:.0f}", f"{ours['model'] / 2**20:.0f}", ""])
        rows.append([*head, "retries, times", str(stock["retries"]), str(ours["retries"]), ""])
        for what in ("plan_resting", "plan_peak"):
            rows.append([*head, what.replace("_", ", "), "", f"{ours[what] / 2**20:.0f}", ""])
    return rows


def targets_of(results: list[dict]) -> list[gpu_results.Target]:
    """Peak and reserved memory are at most stock's. Between steps, nothing but the model is held."""
    targets = []
    for result in results:
        case, stock, ours = result["case"], result["stock"], result["fsdp2x"]
        allowed = {name: stock[name] for name in ("backward", "reserved")}
        allowed["resting"] = ours["model"] + RESTING_BYTES
        for name, most in allowed.items():
            what = f"{case['name']}, {case['world']} ranks, {case['policy']}: {name}, MiB"
            shown = f"{ours[name] / 2**20:.0f}", f"at most {most / 2**20:.0f}"
            targets.append(gpu_results.Target(what, *shown, ours[name] <= most))
    return targets


def main() -> int:
    parser = gpu_results.parser(__doc__)
    parser.add_argument("--cases", nargs="+", help="shape:tokens:ranks")
    parser.add_argument("--policies", nargs="+", choices=[*hf_shapes.POLICIES], default=[*hf_shapes.POLICIES])
    arguments = parser.parse_args()
    device = gpu_device.open_device(arguments.device)
    if device is None:
        return 0
    names = DRY_RUN if device.is_dry_run else QUICK if arguments.quick else CASES
    if arguments.cases:
        names = [(one.rpartition(":")[0], int(one.rpartition(":")[2])) for one in arguments.cases]
    results = []
    for name, world in names:
        for policy in arguments.policies:
            case = case_of(name, policy, world, device.free_bytes())
            if arguments.quick and not arguments.cases and not case.shape.is_tied:
                case = replace(case, shape=replace(case.shape, layers=min(QUICK_LAYERS, case.shape.layers)))
            results.append(run_case(case, device))
            gpu_results.publish(arguments, device, "memory", results, rows_of(results[-1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
