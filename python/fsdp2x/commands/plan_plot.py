"""`fsdp2x plan --plot FILE`: the bar of what fills a rank's memory as a picture."""

from __future__ import annotations

import textwrap
from pathlib import Path

from fsdp2x.commands.plan_words import parts
from fsdp2x.memory.report import MemoryReport, readable

_COLORS = {"s": "#1f77b4", "r": "#1f77b4", "g": "#7fb2d9", "o": "#8c8c8c", "b": "#c7c7c7", "t": "#ff7f0e"}


def plot(path: str | Path, title: str, report: MemoryReport, peak_bytes: int, memory_bytes: int | None):
    """Writes it and returns its figure. Needs matplotlib.

    Raises:
        OSError: the file cannot be written. ValueError: its ending is of no kind of picture, or it has none.
    """
    if not Path(path).suffix:
        raise ValueError(f"got {str(path)!r}, expected the name of a picture such as plan.png")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    seen = 0
    for letter, name, size in parts(report, peak_bytes):
        axes.barh(0, size / 2**30, 0.6, left=seen / 2**30, color=_COLORS[letter], label=f"{name}, {readable(size)}")
        seen += size
    if memory_bytes is not None:
        axes.axvline(memory_bytes / 2**30, color="black", linewidth=1.5, label=f"memory, {readable(memory_bytes)}")
    axes.set_xlim(0, 1.03 * max(seen, memory_bytes or 0, 1) / 2**30)
    axes.set_yticks([])
    axes.set_xlabel(
        f"GiB of rank {report.rank} of {report.world * report.replicas} at the peak, without activations", fontsize=9
    )
    axes.set_title(textwrap.fill(title, 100), fontsize=9, loc="left")
    figure.legend(fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return figure
