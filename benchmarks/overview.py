"""The picture of README.md: time and peak memory of a training step, ours and the peers', from recorded results."""

from __future__ import annotations

from pathlib import Path

# One order and one colour for each side, in all panels.
SIDES = {
    "fsdp2x": ("fsdp2x", "#1f77b4"),
    "stock": ("FSDP2", "#ff7f0e"),
    "fsdp1": ("FSDP1", "#8c8c8c"),
    "zero3": ("ZeRO-3", "#b5a642"),
    "ddp": ("DDP, unsharded", "#c7c7c7"),
}
CASES = {"comm": "12 layers of 512, 16 tokens", "compute": "the same, 512 tokens"}
MIB = 2**20


def panels(step: dict, memory: dict) -> list[tuple[str, str, list[tuple[str, float, float, float]]]]:
    """Title, unit and bars (side, value, smallest, largest) of each panel; a side that was not measured has no bar."""
    found = []
    for case, what in CASES.items():
        sides = step["results"][case]
        bars = [
            (side, *(sides[side]["step"][f"{of}_ms"] for of in ("median", "min", "max")))
            for side in SIDES
            if side in sides
        ]
        found.append((f"Step: {what}", "ms", bars))
    (peaks,) = (result for result in memory["results"] if result["case"] == "comm")
    bars = [(side, *[peaks[side]["peak"] / MIB] * 3) for side in SIDES if side in peaks]
    found.append(("Peak memory, both ranks, 16 tokens", "MiB", bars))
    return found


def draw(step: dict, memory: dict, path: Path):
    """Writes the picture and returns its figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = panels(step, memory)
    figure, all_axes = pyplot.subplots(1, len(found), figsize=(12, 2.6), constrained_layout=True)
    for axes, (title, unit, bars) in zip(all_axes, found, strict=True):
        (ours,) = (value for side, value, _, _ in bars if side == "fsdp2x")
        places = range(len(bars) - 1, -1, -1)
        for place, (side, value, low, high) in zip(places, bars, strict=True):
            axes.barh(place, value, 0.66, color=SIDES[side][1])
            axes.plot([low, high], [place, place], color="black", linewidth=1)
            ratio = "" if side == "fsdp2x" else f", {value / ours:.1f}x"
            axes.text(max(value, high) * 1.02, place, f"{value:,.0f} {unit}{ratio}", va="center", fontsize=9)
        axes.set_yticks(list(places), [SIDES[side][0] for side, *_ in bars], fontsize=9)
        axes.set_xlim(0, max(high for *_, high in bars) * 1.5)
        axes.set_xticks([])
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return figure


def overlaps(figure) -> list[tuple[str, str]]:
    """Pairs of texts of a figure whose boxes lie on each other, and texts that leave it, paired with "the edge"."""
    renderer = figure.canvas.get_renderer()
    texts = [
        text for axes in figure.axes for text in (*axes.texts, axes.title, *axes.get_yticklabels(), axes._left_title)
    ]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]
    found = [(a, b) for i, (a, one) in enumerate(boxes) for b, other in boxes[i + 1 :] if one.overlaps(other)]
    return found + [(name, "the edge") for name, box in boxes if box.x1 > figure.bbox.x1 or box.x0 < 0]
