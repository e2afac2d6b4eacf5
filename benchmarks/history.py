"""Repeats the benchmarks that the project's README quotes, and records their ratios with the range over all runs.

    python benchmarks/history.py record [--runs 5]    runs them and appends a line for each to benchmarks/history.jsonl
    python benchmarks/history.py check out/bench      compares the results of a run with the recorded range
    python benchmarks/history.py write                writes the picture of the project's README

A line is one run in its own processes. It has the day, machine, load before the run, commit, fsdp2x's time, and the
ratio of each other side to it. ``check`` fails if a row is below at least five recorded runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import run_all
from step_cases import CASES

HERE = Path(__file__).parent
HISTORY = HERE / "history.jsonl"
RECORDED = ("step_cpu_2ranks", "optimizer_cpu_2ranks", "memory_cpu_2ranks")
LEAST_RUNS = 5  # fewer do not give a range
OVER_GLOO = "over gloo"
# Sides of a result as rows call them.
SIDES = {
    "one step": "fsdp2x, one step",
    "fsdp2x_gloo": OVER_GLOO,
    "fsdp2x_torch_adamw": "with torch's AdamW",
    "stock": "FSDP2",
    "torch": "torch on FSDP2",
    "fsdp1": "FSDP1",
    "zero3": "ZeRO-3",
    "ddp": "DDP, unsharded",
    "unsharded": "unsharded, foreach",
}
# Sides and their columns in README.md.
BOTH = "stock FSDP2, both over gloo"
PEERS = {"stock FSDP2": "FSDP2", "FSDP1": "FSDP1", "DeepSpeed ZeRO-3": "ZeRO-3", "DDP, unsharded": "DDP, unsharded"}
# Panels of the picture of README.md: result, row, title, unit.
PANELS = (
    ("step_cpu_2ranks", "comm", f"Step: {CASES['comm'].title}", "ms"),
    ("step_cpu_2ranks", "compute", f"Step: {CASES['compute'].title}", "ms"),
    ("memory_cpu_2ranks", "comm: peak of all ranks", "Peak memory of both ranks", "MiB"),
)


def measured(record: Mapping) -> dict[str, dict[str, float]]:
    """Row -> side -> milliseconds of a step, or MiB at the peak, of one result."""
    results = record["results"]
    if record["benchmark"] == "memory":
        return {
            f"{case['case']}: peak of all ranks": {
                side: case[side]["peak"] / 2**20 for side in ("fsdp2x", *SIDES) if side in case
            }
            for case in results
        }
    return {
        case: {side: phases["step"]["median_ms"] for side, phases in sides.items() if "step" in phases}
        for case, sides in results.items()
    }


def ratios(record: Mapping) -> dict[str, float]:
    """Row and side -> how many times as much as fsdp2x the side takes."""
    return {
        f"{row}: {SIDES[side]}": round(value / sides["fsdp2x"], 3)
        for row, sides in measured(record).items()
        for side, value in sides.items()
        if side in SIDES
    }


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def machine() -> dict[str, str]:
    """The processor and the boot, because a virtual machine that restarts may be on another host."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    boot = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).hexdigest()[:8]
    return {"machine": f"{cpu}, {len(os.sched_getaffinity(0))} cores", "boot": boot}


def entry(name: str, record: Mapping, load: float) -> dict:
    """One line of the history."""
    return {
        "name": name,
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        **machine(),
        "load": round(load, 2),
        "commit": record["environment"]["commit"],
        "torch": record["environment"]["torch"],
        "ours": {row: round(sides["fsdp2x"], 3) for row, sides in measured(record).items()},
        "ratios": ratios(record),
    }


def record(names: Iterable[str], num_runs: int, path: Path) -> int:
    """Runs each benchmark so often and appends what came out; returns 1 if one failed."""
    status = 0
    for name in [name for _ in range(num_runs) for name in names]:
        script, *options = run_all.FULL[name]
        load = Path("/proc/loadavg").read_text().split()[0]
        out = path.parent / "results" / f"{name}.json"
        command = [sys.executable, str(HERE / script), *options, "--json", str(out)]
        if subprocess.run(command, check=False).returncode != 0:
            status = 1
            continue
        with path.open("a") as file:
            file.write(json.dumps(entry(name, json.loads(out.read_text()), float(load))) + "\n")
    return status


def ranges(lines: Iterable[Mapping]) -> dict[tuple[str, str], list[float]]:
    """(result, row) -> ratios of all runs."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        for row, value in line["ratios"].items():
            found.setdefault((line["name"], row), []).append(value)
    return found


def regressions(lines: list[Mapping], results: Mapping[str, Mapping]) -> list[str]:
    """Rows of results that are below every recorded run, if there are enough of them."""
    known = ranges(lines)
    return [
        f"{name}, {row}: {value:.2f}x, the {len(values)} runs before had {min(values):.2f}x and more"
        for name, result in results.items()
        if name in RECORDED
        for row, value in ratios(result).items()
        if len(values := known.get((name, row), [])) >= LEAST_RUNS and value < min(values)
    ]


def steps_table(lines: Iterable[Mapping]) -> str:
    """The Markdown table of README.md: a row for each model of bench_step.py, a column for each peer."""
    runs = [line for line in lines if line["name"] == "step_cpu_2ranks"]
    days = {line["day"] for line in runs}
    machines = {(line["machine"], line.get("boot")) for line in runs}  # the first lines have no boot
    rows = [
        f"| runs: {len(runs)}, days: {len(days)}, machines: {len(machines)} | {' | '.join((*PEERS, BOTH))} |",
        f"| --- |{' ---: |' * (len(PEERS) + 1)}",
    ]
    found = {row: values for (_, row), values in ranges(runs).items()}
    for model in dict.fromkeys(row.partition(":")[0] for row in found):
        of_peers = [found.get(f"{model}: {peer}") for peer in PEERS.values()]
        both = [(line["ratios"].get(f"{model}: FSDP2"), line["ratios"].get(f"{model}: {OVER_GLOO}")) for line in runs]
        of_peers.append([stock / ours for stock, ours in both if stock and ours])
        cells = [f"{statistics.median(v):.1f}x ({min(v):.1f} to {max(v):.1f})" if v else "–" for v in of_peers]
        rows.append(f"| {model}: {CASES[model].title} | {' | '.join(cells)} |")
    return "\n".join(rows)


def bars(lines: list[Mapping], name: str, row: str) -> dict[str, tuple[float, float, float]]:
    """Side -> median, least and most over all runs, in the row's unit."""
    own = [line["ours"][row] for line in lines if line["name"] == name and "ours" in line]
    sides = {"fsdp2x": (statistics.median(own), min(own), max(own))}
    for side in PEERS.values():
        values = ranges(lines).get((name, f"{row}: {side}"))
        if values:
            sides[side] = tuple(sides["fsdp2x"][0] * v for v in (statistics.median(values), min(values), max(values)))
    return sides


def draw(lines: list[Mapping], path: Path) -> None:
    """Writes the picture of README.md: horizontal bars, fsdp2x first, with a line for the range."""
    from matplotlib.figure import Figure

    from draw import FSDP2, FSDP2X, NOTE, OTHER, PANEL, TEXT, save

    figure = Figure(figsize=(4.1 * len(PANELS), 2.7), layout="constrained")
    for axes, (name, row, title, unit) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        sides = bars(lines, name, row)
        for place, (side, (middle, low, high)) in zip(range(len(sides), 0, -1), sides.items(), strict=True):
            axes.barh(place, middle, 0.66, color={"fsdp2x": FSDP2X, "FSDP2": FSDP2}.get(side, OTHER)[0])
            axes.plot([low, high], [place, place], color=TEXT[0], linewidth=1)
            ratio = "" if side == "fsdp2x" else f", {middle / sides['fsdp2x'][0]:.2g}x"
            shown = f" {middle:,.0f} {unit}{ratio}"
            axes.text(max(middle, high), place, shown, va="center", fontsize=9, color=TEXT[0])
        axes.set_yticks(range(len(sides), 0, -1), sides)
        axes.tick_params(colors=NOTE[0], labelcolor=TEXT[0], labelsize=9, length=0)
        axes.set_xlim(0, 1.6 * max(high for _, _, high in sides.values()))
        axes.set_xticks([])
        axes.set_title(title, fontsize=10, fontweight="bold", loc="left", color=TEXT[0])
        axes.set_facecolor(PANEL[0])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(NOTE[0])
    save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "check", "write"))
    parser.add_argument("folder", nargs="?", type=Path, help="folder of the results, for check")
    parser.add_argument("--runs", type=int, default=LEAST_RUNS)
    args = parser.parse_args()
    if args.action == "record":
        return record(RECORDED, args.runs, HISTORY)
    lines = read(HISTORY)
    if args.action == "write":
        draw(lines, HERE / "plots/overview.svg")
        return 0
    if args.folder is None:
        parser.error("check: name the folder of the results")
    results = {file.stem: json.loads(file.read_text()) for file in sorted(args.folder.glob("*.json"))}
    found = regressions(lines, results)
    print("\n".join(found) if found else f"no row is below the range of {len(lines)} recorded runs")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
