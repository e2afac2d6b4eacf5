"""Measures the peak of a training step on one GPU: fsdp2x against FSDP2, one after the other, alone and as rank 0 of 8.

    python benchmarks/gpu/bench_memory.py            # a table, and benchmarks/results/<gpu>-<date>.json
    python benchmarks/gpu/bench_memory.py --quick
    python benchmarks/gpu/bench_memory.py --device cpu --json FILE    # a dry run: nothing is counted

HuggingFace shapes as in ``bench_step.py``. With eight ranks, the process group is torch's fake one, and memory is that
of rank 0. Gathered weights are this rank's rows eight times over, and parameters are gathered as NCCL gathers them.
NCCL's own buffers are not included. The first losses of both sides must agree, or there is no row.

``backward`` is the peak of allocated memory in forward and backward of the third step. ``step`` is the peak until the
optimizer has stepped. ``resting`` is the memory after it and ``zero_grad``. ``reserved`` is the most that the allocator
held in the third step, and ``inactive`` the most of it that was free in blocks with memory in use. In all steps, it
freed its cache ``retries`` times, and could not satisfy ``ooms`` requests. ``model`` is the memory of any
implementation: weights, buffers, and moments of this rank. ``plan`` is memory_report's estimate for fsdp2x between
steps and at the peak, without activations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_host  # noqa: E402
from gpu import bench_step, gpu_device, gpu_results, hf_shapes  # noqa: E402

# "kept" is fsdp2x with two of its savings off: a tied unit stays gathered until backward has ended, and gradients'
# memory stays between steps.
SIDES = ("stock", "fsdp2x", "kept")
CASES = (("qwen3-0.6b:512", 1), ("llama-1b:512", 1), ("llama-1b:512", 8), ("llama-8b:512", 1), ("llama-8b:512", 8))
QUICK = (("llama-1b:512", 1), ("llama-1b:512", 8), ("llama-8b:512", 1), ("llama-8b:512", 8))
QUICK_LAYERS = 4  # of the untied model
RESTING_BYTES = 1 << 20  # allowed in addition to the model
DRY_RUN = (("qwen3-tiny:8", 1), ("llama-tiny:8", 2))


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


@contextmanager
def keeping() -> Iterator[None]:
    """fsdp2x takes no embedding for one whose backward reads no weight."""
    from fsdp2x.lifecycle import hooks

    with mock.patch.object(hooks, "only_looks_up", lambda module: False):
        yield


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of this rank's parts."""
    local = (one.to_local() if isinstance(one, DTensor) else one for one in tensors)
    return sum(one.numel() * one.itemsize for one in local)


def measure(side: str, case: bench_step.Case, device: gpu_device.Device) -> dict:
    """Bytes of one side, and its first loss."""
    inputs = hf_shapes.batch(case.shape, case.tokens, device.type)
    device.clear()
    device.make_workspaces()
    base, retries, ooms = device.allocated_bytes(), device.num_retries(), device.num_ooms()
    shard = bench_step.shard_stock if side == "stock" else bench_step.shard_ours
    keeps = side == "kept"
    with gpu_device.alone_in(device, case.world) as mesh, as_nccl(), keeping() if keeps else nullcontext():
        model = shard(hf_shapes.build(case.shape, device.type), mesh, case.policy)
        optimizer = bench_step.adamw_of("stock" if side == "stock" else "fsdp2x")(model.parameters(), lr=bench_step.LR)
        first_loss = None
        for _ in range(3):
            device.synchronize()
            device.restart_peak()
            loss = model(**inputs).loss
            loss.backward()
            backward = device.peak_bytes() - base
            optimizer.step()
            if keeps:
                for param in model.parameters():
                    param.grad = None
            else:
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
            "inactive": device.inactive_bytes(),
            "retries": device.num_retries() - retries,
            "ooms": device.num_ooms() - ooms,
            "model": bytes_of([*model.parameters(), *model.buffers(), *moments]),
            "first_loss": first_loss,
        }
        if side != "stock":
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


def check_first_losses(case: bench_step.Case, losses: dict[str, float]) -> None:
    """They come from the same weights.

    Raises:
        AssertionError: they differ.
    """
    tolerance = 1e-5 if case.policy == "fp32" else 1e-3
    if not all(abs(loss - losses["stock"]) <= tolerance * abs(losses["stock"]) for loss in losses.values()):
        raise AssertionError(f"{case}: the first losses must agree: {losses}")


def run_case(case: bench_step.Case, device: gpu_device.Device, sides: Sequence[str]) -> dict:
    found = {side: measure(side, case, device) for side in sides}
    check_first_losses(case, {side: result.pop("first_loss") for side, result in found.items()})
    return {"case": asdict(case), **found}


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table: MiB of a rank, and by how many largest units fsdp2x needs less than stock."""
    head = ["shape", "layers", "ranks", "precision", "what", "stock FSDP2, MiB", "fsdp2x, MiB", "memory kept, MiB"]
    rows = [[*head, "largest units less"]]
    for result in results:
        case, stock, ours, kept = result["case"], result["stock"], result["fsdp2x"], result.get("kept")
        head = [case["name"].partition(":")[0], str(case["shape"]["layers"]), str(case["world"]), case["policy"]]
        for what in ("backward", "step", "resting", "reserved", "inactive"):
            if what not in stock:  # an older result
                continue
            less = (stock[what] - ours[what]) / ours["largest_unit"]
            allowed = ours["model"] + RESTING_BYTES if what == "resting" else stock[what]
            mark = " (missed)" if what not in ("step", "inactive") and ours[what] > allowed else ""
            shown = [f"{side[what] / 2**20:.0f}" if side else "" for side in (stock, ours, kept)]
            rows.append([*head, what, *shown, f"{less:.2f}{mark}"])
        rows.append([*head, "model", f"{stock['model'] / 2**20:.0f}", f"{ours['model'] / 2**20:.0f}", "", ""])
        for what in filter(stock.__contains__, ("retries", "ooms")):
            rows.append([*head, f"{what}, times", str(stock[what]), str(ours[what]), "", ""])
        for what in ("plan_resting", "plan_peak"):
            rows.append([*head, what.replace("_", ", "), "", f"{ours[what] / 2**20:.0f}", "", ""])
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
    parser.add_argument("--kept", action="store_true", help="also fsdp2x with two of its savings off")
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
            case = bench_step.case_of(name, policy, world, device.free_bytes())
            if arguments.quick and not arguments.cases and not case.shape.is_tied:
                case = replace(case, shape=replace(case.shape, layers=min(QUICK_LAYERS, case.shape.layers)))
            results.append(run_case(case, device, SIDES if arguments.kept else SIDES[:2]))
            gpu_results.publish(arguments, device, "memory", results, rows_of(results[-1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
