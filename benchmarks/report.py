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
import bench_curves
import bench_export
import bench_host
import bench_load
import bench_memory
import bench_moe
import bench_moments
import bench_muon
import bench_optimizer
import bench_score
import bench_sequence
import bench_step
import bench_sync
import bench_wire
import harness
import history
import plots
from gpu import bench_kernels, bench_units
from gpu import bench_memory as bench_gpu_memory
from gpu import bench_step as bench_gpu_step

HERE = Path(__file__).parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

TITLES = {
    "step": "One training step",
    "optimizer": "Clipping and AdamW",
    "moments": "AdamW by what moments are kept in",
    "muon": "A step of Muon",
    "host": "Host time of a unit",
    "collectives": "Gathers and reductions of one host",
    "memory": "Memory above the imports",
    "load": "From HuggingFace files to shards",
    "export": "Whole tensors of a sharded model",
    "sync": "Weights into an engine process",
    "sequence": "Packing and sequence parallelism",
    "wire": "Wire formats over gloo",
    "curves": "Losses by moments and by wire formats",
    "moe": "Experts and tiled MLPs",
    "score": "Log-probabilities without logits",
    "gpu": "One GPU",
    "checkpoint": "Saving model and optimizer",
}
ROWS: dict[str, Callable[[object], list[list[str]]]] = {
    "step": bench_step.rows_of,
    "optimizer": bench_optimizer.rows_of,
    "moments": bench_moments.rows_of,
    "muon": bench_muon.rows_of,
    "host": bench_host.rows_of,
    "collectives": bench_collectives.rows_of,
    "memory": bench_memory.rows_of,
    "load": bench_load.rows_of,
    "export": bench_export.rows_of,
    "sync": bench_sync.rows_of,
    "sequence": bench_sequence.rows_of,
    "wire": bench_wire.rows_of,
    "curves": bench_curves.rows_of,
    "moe": bench_moe.rows_of,
    "score": bench_score.rows_of,
    "checkpoint": bench_checkpoint.rows_of,
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


def section(record: dict, plot: str | None, runs: list[dict]) -> str:
    """One result: its title, the machine, its table, that of all recorded runs of it, and its plot."""
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
    of = history.runs_of(record["name"], runs)
    if of:
        about = "Over all recorded runs, how many times the first bar or line the others take, bold where it is less:"
        parts += [about, "\n".join(history.table(of))]
    if plot is not None:
        parts.append(f"![{TITLES[record['benchmark']]}]({plot})")
    return "\n\n".join(parts)


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
    records, runs = load(args.results), history.read(history.HISTORY)
    for record in records:
        plot = f"plots/{record['name']}.png" if has_plots and record["benchmark"] in plots.PANELS else None
        if plot is not None and not args.check:
            plots.draw(plots.panels_of(record), args.out / plot)
        sections.append(section(record, plot, runs))
    filled = fill(text, sections)
    if args.check:
        if filled != text:
            print("README.md does not show these results: run benchmarks/report.py", file=sys.stderr)
        return int(filled != text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "README.md").write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
