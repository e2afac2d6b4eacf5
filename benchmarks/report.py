"""Prints tables of recorded results: every *.json that the benchmarks wrote.

python benchmarks/report.py [--results benchmarks/results]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import harness

HERE = Path(__file__).parent
# The table of a result is made by rows_of in bench_<kind>.py.
TITLES = {
    "step": "One training step",
    "optimizer": "Clipping and AdamW",
    "moments": "AdamW by what moments are kept in",
    "muon": "A step of Muon",
    "host": "Host time of a unit",
    "collectives": "Gathers and reductions of one host",
    "memory": "Memory above the imports",
    "sft": "SFT of a chat model of 135 million parameters",
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
    "packages": "Steps of other packages",
}
# Entries of a GPU's results, with tables made by rows_of in gpu/bench_<entry>.py.
GPU_TITLES = {
    "step": "Steps of HuggingFace shapes at world size 1",
    "world": "Steps as rank 0 of 8, with simulated collectives",
    "units": "What a unit costs: host, kernels, copies",
    "memory": "Memory of a rank",
    "kernels": "Kernels against a device copy",
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


def table(module: str, results: object) -> str:
    return harness.table(importlib.import_module(module).rows_of(results))


def section(record: dict) -> str:
    """One result: its title, the machine, and its table. Packages of `make test-real` have only the rows of theirs."""
    kind, results = record["benchmark"], record["results"]
    if kind == "packages":
        return "\n\n".join(
            [f"## {TITLES[kind]}", f"`{record['name']}.json`: {record['about']}", harness.table(results)]
        )
    environment = record["environment"]
    ranks = f", {environment['world']} ranks" if environment.get("world") else ""
    where = f"torch {environment['torch']}, {environment['cores']} cores{ranks}, commit {environment['commit']}"
    parts = [f"## {TITLES[kind]}", f"`{record['name']}.json`: {where}"]
    if kind != "gpu":
        return "\n\n".join([*parts, table(f"bench_{kind}", results)])
    for entry, title in GPU_TITLES.items():
        if entry in results:
            parts += [f"### {title}", table(f"gpu.bench_{entry}", results[entry])]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    print("\n\n".join(section(record) for record in load(args.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
