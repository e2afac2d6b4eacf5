"""Pictures of recorded results: one question a panel, at most eight bars, ours first, one colour for each side.

Bars carry their value and how many times ours they take; a line is the spread of the run. Phases of a step are parts of
its bar, the darkest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OURS, OURS_TOO, STOCK, OTHER, OTHERS = "#1f77b4", "#7fb2d9", "#ff7f0e", "#8c8c8c", "#c2c2c2"
# What a side is called and its colour, in the order of bars; the same in every picture.
SIDES = {
    "fsdp2x": ("fsdp2x", OURS),
    "one step": ("fsdp2x, one step", OURS_TOO),
    "fsdp2x_torch_adamw": ("with torch's AdamW", OURS_TOO),
    "stacks": ("stacks whole", OURS_TOO),
    "gather": ("gathered on all", OTHER),
    "stock": ("FSDP2", STOCK),
    "torch": ("torch on FSDP2", STOCK),
    "fsdp1": ("FSDP1", OTHER),
    "zero3": ("ZeRO-3", OTHER),
    "ddp": ("DDP, unsharded", OTHERS),
    "unsharded": ("unsharded, foreach", OTHERS),
}
PHASES = ("forward", "backward", "clip", "optimizer")
MIB = 2**20
MOST_BARS = 8


@dataclass(frozen=True)
class Bar:
    label: str
    color: str
    value: float
    low: float
    high: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bars:
    """Horizontal bars in one unit. The first is ours, which the others are measured by."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Curves:
    """Lines: label -> (color, points). Both axes are logarithmic and the first line ours, unless steps are equal."""

    title: str
    xlabel: str
    unit: str
    lines: Mapping[str, tuple[str, list[tuple[float, float]]]] = field(default_factory=dict)
    is_logarithmic: bool = True


Panel = Bars | Curves


def timed(label: str, color: str, phases: Mapping, scale: float = 1.0) -> Bar:
    """The bar of a step; its phases are parts where they are most of it."""
    step = phases["step"]
    parts = {name: scale * phases[name]["median_ms"] for name in PHASES if name in phases}
    return Bar(label, color, *(scale * step[f"{of}_ms"] for of in ("median", "min", "max")), parts=parts)


def plain(label: str, color: str, value: float) -> Bar:
    return Bar(label, color, value, value, value)


def in_order(sides: Iterable[str]) -> list[str]:
    known = set(sides)
    return [side for side in SIDES if side in known]


def of_sides(title: str, sides: Mapping[str, Mapping]) -> Bars:
    """Steps of the sides that SIDES knows."""
    named = in_order(side for side, phases in sides.items() if "step" in phases)
    return Bars(title, "ms", tuple(timed(*SIDES[side], sides[side]) for side in named))


# ---- panels of each kind of result


def of_step(results: Mapping) -> list[Panel]:
    return [of_sides(case, sides) for case, sides in results.items()]


def of_muon(results: Mapping) -> list[Panel]:
    return [of_sides(case, result["sides"]) for case, result in results.items()]


def of_checkpoint(results: Mapping) -> list[Panel]:
    panels: list[Panel] = []
    for case, sides in results.items():
        for phase in sides["fsdp2x"]:
            bars = [timed(*SIDES[side], {"step": sides[side][phase]}, 1e-3) for side in in_order(sides)]
            panels.append(Bars(f"{case}: {phase}", "s", tuple(bars)))
    return panels


def of_memory(results: list) -> list[Panel]:
    return [
        Bars(
            f"{one['case']}: peak of all ranks",
            "MiB",
            tuple(plain(*SIDES[side], one[side]["peak"] / MIB) for side in in_order(one)),
        )
        for one in results
    ]


def of_ways(title: str, ways: Mapping[str, tuple[float, bool]], unit: str) -> Bars:
    """Ways by (value, whether it is ours), ours in front."""
    ordered = sorted(ways.items(), key=lambda item: not item[1][1])
    return Bars(title, unit, tuple(plain(way, OURS if ours else OTHER, value) for way, (value, ours) in ordered))


def of_load(results: Mapping) -> list[Panel]:
    ways = results["ways"]
    return [
        of_ways("time", {way: (one["seconds"], "fsdp2x" in way) for way, one in ways.items()}, "s"),
        of_ways(
            "private memory", {way: (one["peak_bytes"] / MIB, "fsdp2x" in way) for way, one in ways.items()}, "MiB"
        ),
    ]


def of_export(results: Mapping) -> list[Panel]:
    names = {"shm": "stream, shared", "process_group": "stream, gloo", "full_tensor": "full_tensor()"}
    values = {names[way]: (results[way]["step"]["median_ms"], way != "full_tensor") for way in names if way in results}
    return [of_ways("all whole tensors", values, "ms")]


def of_sync(results: Mapping) -> list[Panel]:
    steps = {way: one["step"]["median_ms"] for way, one in results.items() if isinstance(one, dict) and "step" in one}
    ours = ("push", "push, held", "delta")
    return [of_ways("one push", {way: (value, way in ours) for way, value in steps.items()}, "ms")]


def of_sequence(results: Mapping) -> list[Panel]:
    return [
        of_ways(
            f"{case}: time of 1,000 tokens",
            {
                side: (one["step"]["median_ms"] * 1e3 / one["tokens"], side in ("packed", "ulysses"))
                for side, one in sides.items()
            },
            "ms",
        )
        for case, sides in results.items()
    ]


def of_moe(results: Mapping) -> list[Panel]:
    return [
        of_ways(
            case,
            {side: (one["step"]["median_ms"], side == "grouped_mm" or "chunks" in side) for side, one in sides.items()},
            "ms",
        )
        for case, sides in results.items()
    ]


def of_moments(results: Mapping) -> list[Panel]:
    steps = {name: (one["step"]["median_ms"], name != "torch") for name, one in results.items()}
    return [of_ways("a step, by moments", steps, "ms")]


def of_wire(results: list) -> list[Panel]:
    """Ours first: over gloo, in the parameters' dtype."""
    panels: list[Panel] = []
    for link in dict.fromkeys(one["link_mbits"] for one in results):
        steps = {one["side"]: one["step"]["median_ms"] for one in results if one["link_mbits"] == link}
        steps = {"gloo": steps.pop("gloo"), **steps}
        title = f"gloo as if over {link:,} Mbit/s" if link else "gloo of one host"
        panels.append(of_ways(title, {side: (ms, side.startswith("gloo")) for side, ms in steps.items()}, "ms"))
    return panels


def of_score(results: Mapping) -> list[Panel]:
    return [
        of_ways(
            case, {side: (one["step"]["median_ms"], side == "score") for side, one in result["sides"].items()}, "ms"
        )
        for case, result in results.items()
    ]


def of_host(results: list) -> list[Panel]:
    questions = {
        "units": ("num_units", "units of 11 parameters"),
        "params": ("num_params", "parameters of a unit"),
        "world": ("world", "ranks"),
    }
    panels: list[Panel] = []
    for question, (key, xlabel) in questions.items():
        rows = [one for one in results if one["case"]["question"] == question]
        lines = {
            SIDES[side][0]: (
                SIDES[side][1],
                sorted((one["case"][key], sum(one[side]["us_per_unit"].values())) for one in rows),
            )
            for side in ("fsdp2x", "stock")
        }
        if rows:
            panels.append(Curves("host time of a unit", xlabel, "µs", lines))
    return panels


def of_collectives(results: list) -> list[Panel]:
    floor = {"met": ("copy and meeting", OTHERS)} if "met" in results[0] else {"floor": ("copy", OTHERS)}
    sides = {"shm": ("shared memory", OURS), "gloo": ("gloo", STOCK), **floor}
    return [
        Curves(
            collective.replace("_", "-"),
            "bytes",
            "ms",
            {
                label: (color, sorted((one["bytes"], one[side][collective]["median_ms"]) for one in results))
                for side, (label, color) in sides.items()
            },
        )
        for collective in ("all_gather", "reduce_scatter")
    ]


def of_curves(results: Mapping) -> list[Panel]:
    """Training and held-out losses of a question's sides, beside float32, of one seed."""
    panels: list[Panel] = []
    for losses, of in {"train": "training loss", "held_out": "held-out loss"}.items():
        for question, title in {"moments": "moments", "wire": "on the wire"}.items():
            names = [side for side, found in results.items() if found["of"] in ("", question)]
            colors = dict(zip(names, (OURS, STOCK, "#2ca02c", "#9467bd", "#d62728"), strict=False))
            lines = {name: (colors[name], list(map(tuple, results[name][losses]))) for name in names}
            panels.append(Curves(f"{title}: {of}", "step", "nats per byte", lines, is_logarithmic=False))
    return panels


PANELS: dict[str, Callable[..., list[Panel]]] = {
    "step": of_step,
    "optimizer": of_step,
    "muon": of_muon,
    "moments": of_moments,
    "host": of_host,
    "collectives": of_collectives,
    "memory": of_memory,
    "load": of_load,
    "export": of_export,
    "sync": of_sync,
    "sequence": of_sequence,
    "moe": of_moe,
    "score": of_score,
    "checkpoint": of_checkpoint,
    "curves": of_curves,
    "wire": of_wire,
}


def panels_of(record: Mapping) -> list[Panel]:
    """Of one recorded result; none where a table says it better."""
    return PANELS[record["benchmark"]](record["results"]) if record["benchmark"] in PANELS else []


# ---- drawing


def draw(panels: list[Panel], path: Path):
    """Writes a picture, three panels in a row, and returns its figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    height = max(0.6 + 0.42 * len(panel.bars) if isinstance(panel, Bars) else 3.0 for panel in panels)
    figure = Figure(figsize=(max(4.1 * num_columns, 6), height * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, panel in zip(grid.flat, [*panels, *[None] * grid.size][: grid.size], strict=True):
        if panel is None:
            axes.set_visible(False)
        elif isinstance(panel, Bars):
            _draw_bars(axes, panel)
        else:
            _draw_curves(axes, panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of matplotlib in it, equal numbers give an equal file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return figure


def _draw_bars(axes, panel: Bars) -> None:
    ours = panel.bars[0].value
    places = list(range(len(panel.bars) - 1, -1, -1))
    for place, bar in zip(places, panel.bars, strict=True):
        axes.barh(place, bar.value, 0.66, color=bar.color)
        left = 0.0
        for index, part in enumerate(bar.parts.values() if len(bar.parts) > 1 else ()):
            axes.barh(place, part, 0.66, left=left, color="white", alpha=0.22 * index, edgecolor="none")
            left += part
        if bar.high > bar.low:
            axes.plot([bar.low, bar.high], [place, place], color="black", linewidth=1)
        ratio = "" if place == places[0] or ours == 0 else f", {_number(bar.value / ours)}x"
        reach = max(bar.value, bar.high)
        text = f" {_number(bar.value)} {panel.unit}{ratio}"
        axes.text(reach, place, text, va="center", fontsize=8)
    axes.set_yticks(places, [bar.label for bar in panel.bars], fontsize=8)
    axes.set_ylim(-0.6, len(panel.bars) - 0.4)
    axes.set_xlim(0, 1.6 * max(max(bar.value, bar.high) for bar in panel.bars))
    axes.set_xticks([])
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _draw_curves(axes, panel: Curves) -> None:
    for label, (color, points) in panel.lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=label)
    if panel.is_logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel(panel.xlabel, fontsize=8)
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.minorticks_off()
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _number(value: float) -> str:
    """Three digits that say something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def overlaps(figure) -> list[tuple[str, str]]:
    """Pairs of texts of a figure that lie on each other, and texts that leave it, paired with "the edge"."""
    renderer = figure.canvas.get_renderer()
    texts = []
    for axes in figure.axes:
        if axes.get_visible():
            texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes._left_title]
            texts += [tick for tick in (*axes.get_yticklabels(), *axes.get_xticklabels()) if _is_inside(axes, tick)]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]
    found = [(a, b) for i, (a, one) in enumerate(boxes) for b, other in boxes[i + 1 :] if one.overlaps(other)]
    return found + [(name, "the edge") for name, box in boxes if box.x1 > figure.bbox.x1 + 1 or box.x0 < -1]


def _is_inside(axes, tick) -> bool:
    """Whether a label of an axis is drawn: those beyond its limits are not."""
    x, y = tick.get_position()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    return left <= x <= right or low <= y <= high if x and y else (left <= x <= right if x else low <= y <= high)
