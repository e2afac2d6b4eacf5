"""Runs of benchmarks, one after the other, and what their medians are worth: ranges over processes, days and machines.

    python benchmarks/history.py record [--runs 5] [--only step_cpu_2ranks ...]    appends to benchmarks/history.jsonl
    python benchmarks/history.py show                                              ratios of every row, with their range
    python benchmarks/history.py check out/bench                                   results of a run against that range
    python benchmarks/history.py write                                             README.md: its table and its picture

A line of the history is one run in processes of its own: when, where, of which commit, what ours took, and for each row
the ratio of the other side's median to ours; the last run's result itself stays in results/. `check` names rows below
the range of at least five runs, and fails then. The file tells of one engine: a change of its speed begins it anew.

A machine is a processor and a boot: a virtual machine that is started anew may stand on another host, with other
neighbours, and what it is called or which processor it sees says nothing of that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import plots
import run_all
from step_cases import CASES

HERE = Path(__file__).parent
HISTORY = HERE / "history.jsonl"
README = HERE.parent / "README.md"
# Fewer say nothing of a range.
LEAST_RUNS = 5


def ratios(record: Mapping) -> dict[str, float]:
    """Row -> how many times ours the other side takes, of one result; rows are those of its bars."""
    return {
        f"{panel.title}: {bar.label}": bar.value / panel.bars[0].value
        for panel in plots.panels_of(record)
        if isinstance(panel, plots.Bars) and panel.bars[0].value
        for bar in panel.bars[1:]
    }


def details(record: Mapping) -> dict[str, float]:
    """The same of the phases that bars of others have, and of the points of curves."""
    found: dict[str, float] = {}
    for panel in plots.panels_of(record):
        if isinstance(panel, plots.Bars):
            base = panel.bars[0].parts
            for bar in (bar for bar in panel.bars[1:] if bar.color != plots.OURS_TOO):
                shared = [part for part in bar.parts if base.get(part)]
                found |= {f"{panel.title}: {bar.label}, {part}": bar.parts[part] / base[part] for part in shared}
        elif panel.is_logarithmic:
            (_, (_, base)), *others = panel.lines.items()
            for label, (_, points) in others:
                for (x, value), (_, least) in zip(points, base, strict=True):
                    found[f"{panel.title}, {x:,} {panel.xlabel}: {label}"] = value / least
    return found


def ours(record: Mapping) -> dict[str, float]:
    """Title -> what ours takes, in the panel's unit."""
    return {panel.title: panel.bars[0].value for panel in plots.panels_of(record) if isinstance(panel, plots.Bars)}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def machine() -> str:
    """What tells machines apart in a history, without their names."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores"


def boot() -> str:
    """The same for all runs of a machine until it is started anew; says nothing of what it is called."""
    return hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).hexdigest()[:8]


def entry(name: str, record: Mapping, load: float) -> dict:
    """One line of the history. ``load``: of the machine before the run, without which a ratio cannot be judged."""
    return {
        "name": name,
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "boot": boot(),
        "load": round(load, 2),
        "commit": record["environment"]["commit"],
        "torch": record["environment"]["torch"],
        "ours": {title: round(value, 3) for title, value in ours(record).items()},
        "ratios": {row: round(value, 3) for row, value in (ratios(record) | details(record)).items()},
    }


def runs_of(name: str, lines: Iterable[Mapping]) -> list[Mapping]:
    """The lines of one result."""
    return [line for line in lines if line["name"] == name]


def ranges(lines: Iterable[Mapping]) -> dict[tuple[str, str], list[float]]:
    """(result, row) -> ratios of all runs."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        for row, value in line["ratios"].items():
            found.setdefault((line["name"], row), []).append(value)
    return found


def days_and_machines(lines: Iterable[Mapping]) -> tuple[int, int]:
    """On how many days, and on how many machines. The oldest lines do not know their boot: they count as one."""
    days, machines = zip(*((line["day"], (line["machine"], line.get("boot"))) for line in lines), strict=True)
    return len(set(days)), len(set(machines))


def table(lines: list[Mapping]) -> list[str]:
    """Rows of Markdown: how many times ours the other side takes, median and range of all runs, bold where it is ahead.

    A phase is a row where the other side is ahead in it.
    """
    rows = ["| row | median | range | runs | days | machines |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for (name, row), values in ranges(lines).items():
        middle = statistics.median(values)
        is_ahead = round(middle, 2) < 1
        if row.rpartition(", ")[2] in plots.PHASES and not is_ahead:
            continue
        days, machines = days_and_machines(line for line in lines if line["name"] == name and row in line["ratios"])
        mark = "**" if is_ahead else ""
        spread = f"{min(values):.2f}x to {max(values):.2f}x"
        rows.append(f"| {row} | {mark}{middle:.2f}x{mark} | {spread} | {len(values)} | {days} | {machines} |")
    return rows


def shown(lines: list[Mapping]) -> str:
    """The table of each result, under its name."""
    names = sorted({line["name"] for line in lines})
    return "\n\n".join("\n".join([name, "", *table(runs_of(name, lines))]) for name in names)


# What the columns of README.md are called, and the bars behind them.
PEERS = {"stock FSDP2": "FSDP2", "FSDP1": "FSDP1", "DeepSpeed ZeRO-3": "ZeRO-3", "DDP, unsharded": "DDP, unsharded"}

# Panels of the picture at the top of README.md: result, its row, title, unit.
OVERVIEW = (
    ("step_cpu_2ranks", "comm", f"Step: {CASES['comm'].title}", "ms"),
    ("step_cpu_2ranks", "compute", f"Step: {CASES['compute'].title}", "ms"),
    ("memory_cpu_2ranks", "comm: peak of all ranks", "Peak memory of both ranks, 16 tokens", "MiB"),
)


def steps_table(lines: list[Mapping]) -> str:
    """Markdown for README.md: a row for each model of bench_step, and how many times our step each peer takes."""
    of = runs_of("step_cpu_2ranks", lines)
    found = ranges(of)
    models = list(dict.fromkeys(row.partition(": ")[0] for _, row in found))
    days, machines = days_and_machines(of)
    head = f"| runs: {len(of)}, days: {days}, machines: {machines} | {' | '.join(PEERS)} |"
    rows = [head, f"| --- |{' ---: |' * len(PEERS)}"]
    for model in models:
        cells = []
        for peer in PEERS.values():
            values = found.get(("step_cpu_2ranks", f"{model}: {peer}"), [])
            cells.append(
                f"{statistics.median(values):.1f}x ({min(values):.1f} to {max(values):.1f})" if values else "–"
            )
        rows.append(f"| {model}: {CASES[model].title} | {' | '.join(cells)} |")
    return "\n".join(rows)


def overview(lines: list[Mapping]) -> list[plots.Panel]:
    """The picture of README.md, of the runs of its table: medians and ranges of ratios, times the median of ours."""
    panels: list[plots.Panel] = []
    for name, row, title, unit in OVERVIEW:
        of = runs_of(name, lines)
        own = [line["ours"][row] for line in of if "ours" in line]
        bars = [plots.Bar("fsdp2x", plots.OURS, statistics.median(own), min(own), max(own))]
        found = ranges(of)
        for label, color in plots.SIDES.values():
            values = found.get((name, f"{row}: {label}"), [])
            if values and label in PEERS.values():
                bounds = (bars[0].value * value for value in (statistics.median(values), min(values), max(values)))
                bars.append(plots.Bar(label, color, *bounds))
        panels.append(plots.Bars(title, unit, tuple(bars)))
    return panels


def written(text: str, lines: list[Mapping]) -> str:
    """README.md with that table in the place of its first one."""
    return re.sub(r"(^\|.*\n)+", lambda _: steps_table(lines) + "\n", text, count=1, flags=re.MULTILINE)


def regressions(lines: list[Mapping], results: Mapping[str, Mapping]) -> list[str]:
    """Rows of results that are below every run of the history, where it has enough of them."""
    known, found = ranges(lines), []
    for name, record in results.items():
        for row, value in ratios(record).items():
            value = round(value, 3)  # as the history has it
            values = known.get((name, row), [])
            if len(values) >= LEAST_RUNS and value < min(values):
                found.append(
                    f"{name}, {row}: {value:.2f}x, the {len(values)} runs before had {min(values):.2f}x and more"
                )
    return found


def record(names: Iterable[str], num_runs: int, path: Path) -> int:
    """Runs each benchmark so often, each time in processes of its own, and appends what came out; 1 if one failed."""
    status = 0
    for _ in range(num_runs):
        for name in names:
            script, *options = run_all.FULL[name]
            load = Path("/proc/loadavg").read_text().split()[0]
            out = path.parent / "results" / f"{name}.json"
            command = [sys.executable, str(HERE / script), *options, "--json", str(out)]
            if subprocess.run(command, check=False).returncode != 0:
                status = 1
                continue
            line = entry(name, json.loads(out.read_text()), float(load))
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "show", "check", "write"))
    parser.add_argument("folder", nargs="?", type=Path, help="of results, for check")
    parser.add_argument("--runs", type=int, default=LEAST_RUNS)
    parser.add_argument("--only", nargs="+", choices=sorted(run_all.FULL), help="default: steps, optimizers and memory")
    parser.add_argument("--history", type=Path, default=HISTORY)
    args = parser.parse_args()
    if args.action == "record":
        return record(
            args.only or ["step_cpu_2ranks", "optimizer_cpu_2ranks", "memory_cpu_2ranks"], args.runs, args.history
        )
    lines = read(args.history)
    if args.action == "show":
        print(shown(lines) or "no runs are recorded yet: python benchmarks/history.py record")
        return 0
    if args.action == "write":
        README.write_text(written(README.read_text(), lines))
        plots.draw(overview(lines), HERE / "plots/overview.png")
        return 0
    if args.folder is None:
        parser.error("check: name the folder of the results")
    results = {file.stem: json.loads(file.read_text()) for file in sorted(args.folder.glob("*.json"))}
    found = regressions(lines, results)
    print("\n".join(found) if found else f"nothing is below the range of {len(lines)} recorded runs")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
