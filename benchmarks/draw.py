"""Draws the pictures of the benchmark page and of docs/how-it-works.md from recorded results.

    python benchmarks/draw.py [--results benchmarks/results]

Writes benchmarks/plots/*.svg, the marked part of benchmarks/README.md that shows them, and docs/assets/memory-step.svg.
Leaves out a picture whose results are not there, and says so. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from step_cases import CASES

HERE = Path(__file__).parent
PLOTS = HERE / "plots"
BEGIN, END = "<!-- plots: begin -->", "<!-- plots: end -->"
CURVE = HERE / "memory_curve.json"
MEMORY_STEP = HERE.parent / "docs/assets/memory-step.svg"
# Colors by use: of light pages, and of dark ones. No color of a light page has two uses.
PANEL, TEXT, NOTE = ("#f6f7f9", "#1c2029"), ("#1f2430", "#e6e9ef"), ("#5a6272", "#a9b1c0")
FSDP2X, GLOO = ("#3f51b5", "#7986cb"), ("#8f9bd4", "#aab4e6")
FSDP2, OTHER = ("#d9711a", "#f0913f"), ("#8a93a3", "#6b7486")
BANDS = (("#d3d8ef", "#2c3353"), ("#c2e2dc", "#21443f"), ("#f6d9bf", "#50371f"), ("#dcdfe5", "#383e4b"))
COLORS = (PANEL, TEXT, NOTE, FSDP2X, GLOO, FSDP2, OTHER, *BANDS)


class NothingRecordedError(Exception):
    """There are no results for a picture. Its text says which program records them."""


def save(figure: Figure, path: Path) -> None:
    """Writes an SVG that follows the reader's color scheme. Equal numbers give an equal file."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fsdp2x"}):
        figure.savefig(file, format="svg", facecolor=PANEL[0], metadata={"Date": None, "Creator": None})
    dark = "".join(
        f'[style*="{use}: {light}"]{{{use}:{night}!important}}' for light, night in COLORS for use in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{dark}}}</style>"
    text = re.sub(r"(<svg [^>]*>)", lambda found: found[1] + style, file.getvalue(), count=1)
    path.write_text(re.sub(r"[ \t]+\n", "\n", text))


def make_axes(figure: Figure, title: str, note: str) -> Axes:
    """The only axes of a figure: a title that says what is good, and what was measured below it."""
    axes = figure.subplots()
    axes.set_facecolor(PANEL[0])
    axes.set_title(f"{title}\n", fontsize=13, fontweight="bold", loc="left", color=TEXT[0])
    axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=9.5, color=NOTE[0])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(NOTE[0])
    axes.tick_params(colors=NOTE[0], labelcolor=TEXT[0], labelsize=10)
    return axes


def draw_bars(
    path: Path,
    title: str,
    note: str,
    groups: list[tuple[str, list[tuple[str, float, str]]]],
    colors: dict[str, str],
    reference: tuple[float, str] | None = None,
) -> None:
    """Horizontal bars in groups: of each a heading, and side, value and text of its bars.

    ``reference`` is the place and the name of a dashed line.
    """
    num_rows = sum(len(bars) + 1.4 for _, bars in groups)
    figure = Figure(figsize=(8.4, 0.8 + 0.3 * num_rows), layout="constrained")
    axes = make_axes(figure, title, note)
    place, ticks = 0.0, []
    for heading, bars in groups:
        if reference is not None:
            axes.vlines(reference[0], place - len(bars) - 0.5, place - 0.5, FSDP2[0], "dashed", linewidth=2)
        axes.text(0, place, f" {heading}", va="center", fontsize=10, fontweight="bold", color=TEXT[0])
        place -= 1
        for side, value, text in bars:
            ticks.append((place, side))
            axes.barh(place, value, 0.84, color=colors[side])
            axes.text(value, place, f"  {text}", va="center", fontsize=10, color=TEXT[0])
            place -= 1
        place -= 0.4
    axes.set_yticks([at for at, _ in ticks], [side for _, side in ticks])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.2 * max(value for _, bars in groups for _, value, _ in bars))
    axes.set_ylim(place + 0.6, 0.8)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    if reference is not None:
        axes.set_xticks([reference[0]], [reference[1]])
        axes.tick_params(axis="x", length=0, labelcolor=FSDP2[0])
    save(figure, path)


# ---- the pictures: results by kind -> file, and what a reader sees who cannot see it


def of_kind(records: dict[str, list[dict]], kind: str, script: str) -> dict:
    if not records.get(kind):
        raise NothingRecordedError(f"no results of {script}")
    return records[kind][0]


def draw_speed(records: dict[str, list[dict]], path: Path) -> str:
    """How many times faster than FSDP2 a step is, over shared memory and over gloo."""
    results = of_kind(records, "step", "bench_step.py")["results"]
    groups = []
    for case, sides in results.items():
        step_ms = {side: phases["step"]["median_ms"] for side, phases in sides.items()}
        over = {"shared memory": "fsdp2x", "gloo": "fsdp2x_gloo"}
        ratios = {name: step_ms["stock"] / step_ms[side] for name, side in over.items() if side in step_ms}
        groups.append((CASES[case].title, [(side, ratio, f"{ratio:.1f}x") for side, ratio in ratios.items()]))
    colors = {"shared memory": FSDP2X[0], "gloo": GLOO[0]}
    note = "Training steps on 2 CPU cores, 2 ranks. Longer is faster. 2x takes half the time"
    draw_bars(path, "Speed of fsdp2x relative to FSDP2", note, groups, colors, reference=(1.0, "FSDP2"))
    return "Speed of a training step relative to FSDP2, over shared memory and gloo"


def draw_memory(records: dict[str, list[dict]], path: Path) -> str:
    """The peak of all ranks."""
    titles = {"fsdp2x": "fsdp2x", "stock": "FSDP2", "zero3": "DeepSpeed ZeRO-3", "ddp": "DDP, unsharded"}
    groups = []
    for result in of_kind(records, "memory", "bench_memory.py")["results"]:
        least = result["fsdp2x"]["peak"]
        bars = [
            (title, result[side]["peak"] / 2**20, ratio_text(result[side]["peak"] / 2**20, least / 2**20, "MiB"))
            for side, title in titles.items()
            if side in result
        ]
        groups.append((CASES[result["case"]].title, bars))
    colors = {"fsdp2x": FSDP2X[0], "FSDP2": FSDP2[0], "DeepSpeed ZeRO-3": OTHER[0], "DDP, unsharded": OTHER[0]}
    note = "2 ranks together, without their imports. Shorter is better"
    draw_bars(path, "Peak memory of a training step", note, groups, colors)
    return "Peak memory of fsdp2x, FSDP2, DeepSpeed ZeRO-3, and DDP"


def draw_sft(records: dict[str, list[dict]], path: Path) -> str:
    """Steps a second of a real model."""
    titles = {"fsdp2x": "fsdp2x", "fsdp2x_gloo": "fsdp2x over gloo", "stock": "FSDP2", "ddp": "DDP, unsharded"}
    groups = []
    for result in of_kind(records, "sft", "bench_sft.py")["results"]:
        speeds = {side: result[side]["steps_per_s"][0] for side in titles if side in result}
        texts = {side: f"{speed:.2f} steps/s" for side, speed in speeds.items()}
        for side in speeds.keys() & {"fsdp2x", "fsdp2x_gloo"}:
            texts[side] += f", {speeds[side] / speeds['stock']:.2f}x"
        bars = [(titles[side], speed, texts[side]) for side, speed in speeds.items()]
        ranks = "1 rank" if result["world"] == 1 else f"{result['world']} ranks"
        groups.append((ranks, bars))
    colors = {"fsdp2x": FSDP2X[0], "fsdp2x over gloo": GLOO[0], "FSDP2": FSDP2[0], "DDP, unsharded": OTHER[0]}
    note = "16 sequences of 40 tokens a step, fp32, on 2 CPU cores. Longer is faster. Ratios are to FSDP2"
    draw_bars(path, "Fine-tuning SmolLM2-135M", note, groups, colors)
    return "Fine-tuning steps a second of SmolLM2-135M with fsdp2x, FSDP2, and DDP"


PICTURES: dict[str, Callable[[dict[str, list[dict]], Path], str]] = {
    "speed": draw_speed,
    "memory": draw_memory,
    "sft": draw_sft,
}


def ratio_text(value: float, least: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" + ("" if value == least else f", {value / least:.1f}x")


def draw_curve(path: Path) -> None:
    """Memory over a step: readings of both engines over what the plan consists of."""
    if not CURVE.is_file():
        raise NothingRecordedError("no results of memory_curve.py")
    record = json.loads(CURVE.read_text())
    plan = record["results"]["fsdp2x"]["plan"]
    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    note = f"MiB of 2 ranks together, without their imports. {record['model']}, AdamW, fp32"
    axes = make_axes(figure, "Memory of a training step", note)
    parts = {
        "parameter shards": plan["shard_bytes"],
        "AdamW's moments": plan["optimizer_bytes"],
        "gradient shards": plan["gradient_bytes"],
        "buffers": plan["peak_bytes"] - plan["resting_bytes"],
    }
    low = 0.0
    for (name, size), (color, _) in zip(parts.items(), BANDS, strict=True):
        high = low + size / 2**20
        axes.fill_between([0, 3], low, high, color=color, linewidth=0)
        axes.text(0.04, (low + high) / 2, f"plan: {name}", va="center", fontsize=9.5, color=TEXT[0])
        low = high
    for side, title, color in (("fsdp2x", "fsdp2x", FSDP2X[0]), ("stock", "FSDP2", FSDP2[0])):
        places, middles, lows, highs = binned(record["results"][side]["points"])
        axes.fill_between(places, lows, highs, color=color, alpha=0.25, linewidth=0)
        axes.plot(places, middles, color=color, linewidth=2.2)
        axes.text(3.03, middles[-1], title, va="center", fontsize=11, fontweight="bold", color=color)
    top = record["results"]["fsdp2x"]["points"][0][1] / 2**20
    axes.text(2.04, (low + top) / 2, "activations, temporaries", va="center", fontsize=9.5, color=TEXT[0])
    for place in (1, 2):
        axes.axvline(place, color=NOTE[0], linewidth=0.8, linestyle=":")
    axes.set_xticks([0.5, 1.5, 2.5], ["forward", "backward", "optimizer"])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(0, 3.35)
    axes.set_ylim(0, None)
    save(figure, path)


def binned(points: list[list[float]], per_phase: int = 10) -> tuple[list[float], ...]:
    """Place, median, least and most of the readings in each part of the phases that has some."""
    rows = []
    for number in range(3 * per_phase):
        sizes = [size / 2**20 for at, size in points if number <= at * per_phase < number + 1]
        if sizes:
            rows.append(((number + 0.5) / per_phase, statistics.median(sizes), min(sizes), max(sizes)))
    rows = [(0.0, *rows[0][1:]), *rows, (3.0, *rows[-1][1:])]
    return tuple(map(list, zip(*rows, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    records: dict[str, list[dict]] = {}
    for file in sorted(args.results.glob("*.json")):
        record = json.loads(file.read_text())
        records.setdefault(record["benchmark"], []).append(record)
    shown = []
    for name, draw in PICTURES.items():
        try:
            shown.append(f"![{draw(records, PLOTS / f'{name}.svg')}](plots/{name}.svg)")
        except NothingRecordedError as error:
            (PLOTS / f"{name}.svg").unlink(missing_ok=True)
            print(f"draw.py: {name}.svg is left out: {error}", file=sys.stderr)
    page = HERE / "README.md"
    head, rest = page.read_text().split(BEGIN)
    page.write_text("\n\n".join([head + BEGIN, *shown, END + rest.split(END)[1]]))
    try:
        draw_curve(MEMORY_STEP)
    except NothingRecordedError as error:
        print(f"draw.py: {MEMORY_STEP.name} is left as it is: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
