"""Tables and plots of recorded results: fills the marked part of a README.md and writes PNGs next to it.

    python benchmarks/report.py [--results benchmarks/results] [--out benchmarks] [--no-plots] [--check]

Reads every *.json that the benchmarks wrote. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import bench_checkpoint
import bench_collectives
import bench_counts
import bench_export
import bench_host
import bench_load
import bench_memory
import bench_moe
import bench_muon
import bench_optimizer
import bench_scale
import bench_score
import bench_sequence
import bench_simulate
import bench_step
import bench_sync
import harness
import overview
from gpu import bench_kernels, bench_units
from gpu import bench_memory as bench_gpu_memory
from gpu import bench_step as bench_gpu_step

HERE = Path(__file__).parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
# What the picture of README.md at the top of the repository is drawn from.
OVERVIEW = ("step_cpu_2ranks", "memory_cpu_2ranks")
OURS, STOCK, OTHER = "tab:blue", "tab:orange", "tab:gray"

TITLES = {
    "step": "One training step",
    "optimizer": "Clipping and AdamW",
    "muon": "A step of Muon",
    "host": "Host time of a unit",
    "collectives": "Gathers and reductions of one host",
    "memory": "Memory above the imports",
    "load": "From HuggingFace files to shards",
    "export": "Whole tensors of a sharded model",
    "sync": "Weights into an engine process",
    "sequence": "Packing and sequence parallelism",
    "moe": "Experts and tiled MLPs",
    "score": "Log-probabilities without logits",
    "simulate": "Foretold and measured steps of this machine",
    "counts": "Collectives, launches and bytes of a step",
    "scale": "Steps on GPUs that are not there: foretold, not measured",
    "gpu": "One GPU",
    "checkpoint": "Saving model and optimizer",
}
ROWS: dict[str, Callable[[object], list[list[str]]]] = {
    "step": bench_step.rows_of,
    "optimizer": bench_optimizer.rows_of,
    "muon": bench_muon.rows_of,
    "host": bench_host.rows_of,
    "collectives": bench_collectives.rows_of,
    "memory": bench_memory.rows_of,
    "load": bench_load.rows_of,
    "export": bench_export.rows_of,
    "sync": bench_sync.rows_of,
    "sequence": bench_sequence.rows_of,
    "moe": bench_moe.rows_of,
    "score": bench_score.rows_of,
    "checkpoint": bench_checkpoint.rows_of,
    "simulate": bench_simulate.rows_of,
    "counts": bench_counts.rows_of,
    "scale": bench_scale.rows_of,
}
# Entries of a GPU's results: title and table.
GPU_ROWS: dict[str, tuple[str, Callable[[list], list[list[str]]]]] = {
    "step": ("Steps of HuggingFace shapes at world size 1", bench_gpu_step.rows_of),
    "units": ("What a unit costs: host, kernels, copies", bench_units.rows_of),
    "memory": ("Memory of a rank", bench_gpu_memory.rows_of),
    "kernels": ("Kernels against a device copy", bench_kernels.rows_of),
}


def load(folder: Path) -> list[dict]:
    """All results of a folder, in the order of TITLES and then of their names.

    Raises:
        ValueError: a file that is not a benchmark's result.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or record.get("benchmark") not in TITLES:
            raise ValueError(
                f"{path}: not a result of a benchmark, expected the key 'benchmark' with one of {[*TITLES]}"
            )
        found.append({**record, "name": path.stem})
    return sorted(found, key=lambda record: list(TITLES).index(record["benchmark"]))


def section(record: dict, plot: str | None) -> str:
    """One result: its title, the machine, its table and its plot."""
    environment = record["environment"]
    ranks = f", {environment['world']} ranks" if environment.get("world") else ""
    where = f"torch {environment['torch']}, {environment['cores']} cores{ranks}, commit {environment['commit']}"
    parts = [f"## {TITLES[record['benchmark']]}", f"`{record['name']}.json`: {where}"]
    if record["benchmark"] == "gpu":
        for entry, (title, rows_of) in GPU_ROWS.items():
            if entry in record["results"]:
                parts += [f"### {title}", harness.table(rows_of(record["results"][entry]))]
    else:
        parts.append(harness.table(ROWS[record["benchmark"]](record["results"])))
    if plot is not None:
        parts.append(f"![{TITLES[record['benchmark']]}]({plot})")
    return "\n\n".join(parts)


# ---- plots


def plot_pairs(axes, record: dict) -> None:
    """Bars of medians, a pair for each case and phase."""
    labels, ours, stock = [], [], []
    for case, sides in record["results"].items():
        for phase in sides["fsdp2x"]:
            labels.append(f"{case}\n{phase}")
            ours.append(sides["fsdp2x"][phase]["median_ms"])
            stock.append(sides["stock"][phase]["median_ms"])
    places = range(len(labels))
    axes.bar([place - 0.2 for place in places], stock, 0.4, label="stock FSDP2", color=STOCK)
    axes.bar([place + 0.2 for place in places], ours, 0.4, label="fsdp2x", color=OURS)
    axes.set_xticks(list(places), labels, fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("ms, median")


def plot_host(axes, record: dict) -> None:
    """Forward and backward together, against each quantity that was varied."""
    keys = {"units": "num_units", "params": "num_params", "world": "world"}
    styles = {"units": "-", "params": "--", "world": ":"}
    for side, color in (("stock", STOCK), ("fsdp2x", OURS)):
        for question, key in keys.items():
            points = [
                (result["case"][key], sum(result[side]["us_per_unit"].values()))
                for result in record["results"]
                if result["case"]["question"] == question
            ]
            name = "stock FSDP2" if side == "stock" else side
            axes.plot(
                *zip(*sorted(points), strict=True),
                styles[question],
                color=color,
                marker="o",
                label=f"{name}, {question}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("units of 11 parameters, parameters of a unit, ranks")
    axes.set_ylabel("µs of a unit, forward and backward")


def plot_collectives(axes, record: dict) -> None:
    """Milliseconds against bytes."""
    for phase, style in (("all_gather", "-"), ("reduce_scatter", "--")):
        for side, label, color in (("gloo", "gloo", STOCK), ("shm", "shared memory", OURS), ("floor", "copy", OTHER)):
            points = sorted((result["bytes"], result[side][phase]["median_ms"]) for result in record["results"])
            axes.plot(*zip(*points, strict=True), style, color=color, marker="o", label=f"{label}, {phase}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("ms, median")


def plot_memory(axes, record: dict) -> None:
    """Peaks, three bars for each case."""
    sides = {"ddp": ("DDP", OTHER), "stock": ("stock FSDP2", STOCK), "fsdp2x": ("fsdp2x", OURS)}
    for index, (side, (label, color)) in enumerate(sides.items()):
        peaks = [result[side]["peak"] / 2**20 for result in record["results"]]
        axes.bar([place + 0.27 * (index - 1) for place in range(len(peaks))], peaks, 0.27, label=label, color=color)
    axes.set_xticks(range(len(record["results"])), [result["case"] for result in record["results"]])
    axes.set_ylabel("MiB, peak, all ranks")


def plot_ways(axes, record: dict) -> None:
    """Seconds of each way to load or export, ours first."""
    results = record["results"]
    if record["benchmark"] == "load":
        seconds = {way: result["seconds"] for way, result in results["ways"].items()}
    else:
        ways = {way: result for way, result in results.items() if isinstance(result, dict)}
        seconds = {way: result["step"]["median_ms"] / 1e3 for way, result in ways.items()}
    ours = ("fsdp2x", "shm", "process_group")
    for place, (way, value) in enumerate(seconds.items()):
        axes.bar([place], [value], 0.6, label=way, color=OURS if way.startswith(ours) else STOCK)
    axes.set_xticks(range(len(seconds)), list(seconds), fontsize=7)
    axes.set_ylabel("s")


def plot_sequence(axes, record: dict) -> None:
    """Tokens a second of each side, ours in blue."""
    bars = [
        (f"{case}\n{side}", side in ("packed", "ulysses"), 1e3 * values["tokens"] / values["step"]["median_ms"])
        for case, sides in record["results"].items()
        for side, values in sides.items()
    ]
    _plot_bars(axes, bars, ("without", "fsdp2x.sequence"), "tokens of samples a second")


def plot_moe(axes, record: dict) -> None:
    """Milliseconds of a step of each side."""
    bars = [
        (f"{case}\n{side}", side == "grouped_mm" or "chunks" in side, phases["step"]["median_ms"])
        for case, sides in record["results"].items()
        for side, phases in sides.items()
    ]
    _plot_bars(axes, bars, ("loop, whole", "grouped, tiled"), "ms")


def plot_score(axes, record: dict) -> None:
    """Seconds of a step of each side."""
    bars = [
        (f"{case}\n{side}", side == "score", values["step"]["median_ms"] / 1e3)
        for case, result in record["results"].items()
        for side, values in result["sides"].items()
    ]
    _plot_bars(axes, bars, ("with logits", "rl.score"), "s, CPU time")


def _plot_bars(axes, bars: list[tuple[str, bool, float]], labels: tuple[str, str], unit: str) -> None:
    """Bars of (name, whether it is ours, value), under the labels of the others and of ours."""
    for label, ours, color in ((labels[0], False, OTHER), (labels[1], True, OURS)):
        chosen = [(place, value) for place, (_, mine, value) in enumerate(bars) if mine == ours]
        if chosen:
            axes.bar(*zip(*chosen, strict=True), 0.6, label=label, color=color)
    axes.set_xticks(range(len(bars)), [name for name, _, _ in bars], fontsize=7)
    axes.set_ylabel(unit)


PLOTS = {
    "step": plot_pairs,
    "optimizer": plot_pairs,
    "host": plot_host,
    "collectives": plot_collectives,
    "memory": plot_memory,
    "load": plot_ways,
    "export": plot_ways,
    "sequence": plot_sequence,
    "moe": plot_moe,
    "score": plot_score,
    "checkpoint": plot_pairs,
}


def draw(record: dict, path: Path) -> None:
    """Writes one plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), constrained_layout=True)
    PLOTS[record["benchmark"]](axes, record)
    axes.set_title(TITLES[record["benchmark"]])
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of matplotlib in it, equal numbers give an equal file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def fill(text: str, sections: list[str]) -> str:
    """``text`` with the sections between the marks.

    Raises:
        ValueError: the marks are not there.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md: expected one line {BEGIN} and one line {END}")
    head, rest = text.split(BEGIN)
    return "\n".join([head + BEGIN, "", "\n\n".join(sections), "", END + rest.split(END)[1]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE, help="where README.md and plots/ are written")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when README.md shows other results")
    args = parser.parse_args()
    text = (HERE / "README.md").read_text()
    has_plots = "![" in text if args.check else not args.no_plots
    sections = []
    records = load(args.results)
    for record in records:
        plot = f"plots/{record['name']}.png" if has_plots and record["benchmark"] in PLOTS else None
        if plot is not None and not args.check:
            draw(record, args.out / plot)
        sections.append(section(record, plot))
    filled = fill(text, sections)
    of_overview = [record for name in OVERVIEW for record in records if record["name"] == name]
    if not (args.check or args.no_plots) and len(of_overview) == len(OVERVIEW):
        overview.draw(*of_overview, args.out / "plots/overview.png")
    if args.check:
        if filled != text:
            print("README.md does not show these results: run benchmarks/report.py", file=sys.stderr)
        return int(filled != text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "README.md").write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
