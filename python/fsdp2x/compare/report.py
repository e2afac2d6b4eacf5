"""Compares two sides and describes their first difference, whose tensors a second run keeps completely."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from fsdp2x.compare.judge import Difference, Run, judge
from fsdp2x.compare.launch import Launcher, Side
from fsdp2x.compare.trace import INITIAL, INPUT, LOADER, Key

_NOISE_SEED = 1
# What a difference before any computation means.
_HINTS = {
    INPUT: "The script gives the sides different data. Seed its loader, or read the same rows in both runs.",
    INITIAL: "The sides start from different weights. Load a checkpoint, or seed before the model is made.",
}
_HINT_OF_ROWS = (
    "b must train on the rows of all ranks of a, in their order. compare joins the batches of torch's DataLoader. If "
    "the script makes its own batches, give b the larger batch with --b."
)
# Integers of a float's bits, in which neighbours differ by one.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_sides(a: Side, b: Side, num_steps: int, timeout: float) -> bool:
    """Runs both sides, prints the report, and returns whether they agree. The ranks of b divide those of a.

    Raises:
        SideFailedError: a side failed or took longer than ``timeout`` seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="fsdp2x-compare-"))
    try:
        return _compare(a, b, Launcher(a.num_ranks // b.num_ranks, num_steps, timeout, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare(a: Side, b: Side, launcher: Launcher) -> bool:
    print(f"a: {a}\nb: {b}", flush=True)
    start = time.monotonic()
    run_a, run_b = launcher.record(a), launcher.record(b)
    noisy = launcher.record(b, _NOISE_SEED)
    num_steps = 1 + max((key.step for key in run_b.order), default=-1)
    ranks = f"{a.num_ranks}" if a.num_ranks == b.num_ranks else f"{a.num_ranks} and {b.num_ranks}"
    sizes = f"{ranks} rank(s), {num_steps} step(s), {len(run_b.order)} tensors"
    print(f"{sizes}, {time.monotonic() - start:.1f} s")
    found = judge(run_a, run_b, noisy)
    if not found:
        print(f"no difference: a and b agree in all {len(run_b.order)} tensors")
        return True
    key = found[0].key
    kept = None
    if found[0].is_measured:
        of_a = launcher.keep(a, key)
        sharers = {rank: [of_a[one] for one in run_b.sharers(key, rank) if one in of_a] for rank in found[0].ranks}
        kept = {rank: _mean(tensors) for rank, tensors in sharers.items() if tensors}, launcher.keep(b, key)
    print(describe(found, run_a, run_b, kept))
    return False


def describe(
    found: list[Difference], a: Run, b: Run, kept: tuple[dict[int, Tensor], dict[int, Tensor]] | None = None
) -> str:
    """Returns the report. ``kept``: the full tensors of the first difference, by rank, of both sides."""
    first = found[0]
    lines = [f"first difference: {_name(first.key)} ({_ranks(first, a)})"]
    if first.missing:
        lines.append(f"  only {'b' if first.missing == 'a' else 'a'} has this tensor")
    elif first.is_measured:
        lines += _measured(first, kept)
    if first.note:
        lines.append(f"  {first.note}")
    hints = _HINTS if b.num_parts == 1 else _HINTS | {INPUT: "" if first.key.name.startswith(LOADER) else _HINT_OF_ROWS}
    if hint := hints.get(first.key.phase):
        lines.append(f"  {hint}")
    before = ", ".join(_name(key, with_step=key.step != first.key.step) for key in reversed(first.before))
    lines.append(f"  right before, and equal: {before or 'nothing'}")
    later = [one for one in found[1:] if one.key.name != first.key.name][:3]
    if later:
        lines.append(f"  then: {', '.join(_name(one.key, with_step=one.key.step != first.key.step) for one in later)}")
    lines.append(f"  {len(found)} of {len(a.order.keys() | b.order.keys())} tensors differ")
    return "\n".join(lines)


def _name(key: Key, *, with_step: bool = True) -> str:
    call = f" (call {key.call + 1})" if key.call else ""
    name = f" of {key.name}" if key.name else ""
    return f"{key.phase}{name}{call}" + (f", step {key.step}" if with_step else "")


def _ranks(first: Difference, a: Run) -> str:
    return "all ranks" if len(first.ranks) == a.num_ranks else f"rank {', '.join(map(str, first.ranks))}"


def _measured(first: Difference, kept: tuple[dict[int, Tensor], dict[int, Tensor]] | None) -> list[str]:
    """Measures the tensors of the first rank that differs. If they were not kept, it shows the estimate."""
    rank, limit = first.ranks[0], f"where rounding explains {first.limit:.2e}"
    if kept is None or rank not in kept[0] or rank not in kept[1]:
        return [f"  relative error {first.relative:.2e}, {limit}"]
    one, other = kept[0][rank], kept[1][rank]
    differs = one != other
    ulps = ""
    if one.is_floating_point():
        differs &= ~(one.isnan() & other.isnan())
        ulps = f", up to {_largest_ulps(one, other)} ulps"
    size = other.double().norm().item()
    relative = (one.double() - other.double()).norm().item() / size if size else math.inf
    lines = [
        f"  relative error {relative:.2e}, {limit}",
        f"  {differs.double().mean().item():.1%} of {one.numel()} elements differ{ulps}",
    ]
    if differs.any():
        place = tuple(int(part) for part in differs.nonzero()[0])
        lines.append(f"  first at {list(place)}: {one[place].item():.8g} in a, {other[place].item():.8g} in b")
    factor = _factor(one, other)
    return lines if factor is None else [*lines, f"  a is {factor:.6g} times b"]


def _mean(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).double().mean(0).to(tensors[0].dtype)


def _largest_ulps(one: Tensor, other: Tensor) -> str:
    """Returns the largest distance in units of the last place, in the coarser of two dtypes."""
    dtype = one.dtype if torch.finfo(one.dtype).eps >= torch.finfo(other.dtype).eps else other.dtype
    if dtype.itemsize not in _BITS:
        return "unknown"
    bits = [part.to(dtype).contiguous().view(_BITS[dtype.itemsize]).double() for part in (one, other)]
    lowest = torch.iinfo(_BITS[dtype.itemsize]).min
    ordered = [torch.where(part < 0, lowest - part, part) for part in bits]
    count = (ordered[0] - ordered[1]).abs().max().item()
    return f"{count:.0f}" if count < 10_000 else f"{count:.2e}"


def _factor(one: Tensor, other: Tensor) -> float | None:
    """Returns x if one is x times the other, up to rounding."""
    if not one.is_floating_point():
        return None
    a, b = one.double().flatten(), other.double().flatten()
    square = b.dot(b).item()
    factor = a.dot(b).item() / square if square else math.nan
    tolerance = 4 * torch.finfo(one.dtype).eps * abs(factor)
    is_multiple = math.isfinite(factor) and (a - factor * b).norm().item() <= tolerance * math.sqrt(square)
    return factor if is_multiple and abs(factor - 1) > tolerance else None
