"""What `fsdp2x plan` says in words: rows are explained, repeated units folded, the bar is the report's bytes."""

import pytest
from torch import nn

from fsdp2x.commands.plan_plot import plot
from fsdp2x.commands.plan_words import COLUMNS, WORDS, bar, explanation, parts
from fsdp2x.memory.plan import plan_memory
from fsdp2x.memory.report import _folded, readable

KINDS = {
    "device": {},
    "shared memory": {"transport": "shm"},
    "replicas": {"replicas": 2},
    "offload": {"offload": "all"},
    "moments": {"offload": "optimizer"},
}


def report(**options):
    model = nn.Sequential(nn.Embedding(64, 16), *(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 64))
    return plan_memory(model, 4, auto_wrap=["Linear"], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_and_column_is_explained(kind):
    made = report(**KINDS[kind])
    pooled = {"slots and staging", "scratch"}
    assert {name for name, _, _ in made.sizes()} | pooled >= {"shards", *pooled}
    assert {name for name, _, _ in made.sizes()} <= set(WORDS)
    said = explanation(made)
    assert all(f"\n{name}  " in said for name in ("shards", "at rest", "peak, without activations"))
    head = str(made).splitlines()[0].split()
    assert set(COLUMNS) < set(head)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [None, 10**6, 2000])
def test_the_bar_is_what_fills_the_device(kind, memory):
    made = report(**KINDS[kind])
    line, said = bar(made, made.device_peak_bytes, memory).splitlines()
    whole = max(memory or 0, made.device_peak_bytes)
    assert line.endswith(f"] {readable(whole)}")
    inside = line[1 : line.index("]")]
    filled = len(inside.replace("|", "").rstrip())
    assert abs(filled - 64 * made.device_peak_bytes / whole) <= 1
    assert (
        ("|" in inside) == (memory is not None and memory < made.device_peak_bytes) == ("the end of the memory" in said)
    )
    assert ("free for activations" in said) == (whole > made.device_peak_bytes)


@pytest.mark.parametrize("memory", [None, 2000])
def test_the_picture_has_the_same_parts(tmp_path, memory):
    pytest.importorskip("matplotlib")
    made = report()
    figure = plot(tmp_path / "plan.png", "a model of many words " * 8, made, made.device_peak_bytes, memory)
    (axes,) = figure.axes
    assert sum(patch.get_width() for patch in axes.patches) * 2**30 == pytest.approx(made.device_peak_bytes)
    assert len(axes.lines) == (memory is not None) and (tmp_path / "plan.png").stat().st_size > 5000
    names = [text.get_text().partition(",")[0] for text in figure.legends[0].get_texts()]
    renderer, edges = figure.canvas.get_renderer(), figure.bbox
    for text in (*figure.legends[0].get_texts(), axes._left_title, axes.xaxis.label):
        box = text.get_window_extent(renderer)
        assert edges.x0 <= box.x0 and box.x1 <= edges.x1 and edges.y0 <= box.y0 and box.y1 <= edges.y1, text.get_text()
    assert sorted(names) == sorted(
        [name for _, name, _ in parts(made, made.device_peak_bytes)] + ["memory"] * (memory is not None)
    )


def rows(text):
    return [(name, name[0]) for name in text.split()]


def test_repeated_units_become_one_line_a_pattern():
    names = [name for name, _ in _folded(rows("e0 a0 a1 a2 a3 a4 n"))]
    assert names == ["e0", "a0 .. a4 (5 units, each)", "n"]
    names = [name for name, _ in _folded(rows("e0 " + " ".join(f"a{i} x{i}" for i in range(5)) + " n"))]
    assert names == ["e0", "a0 .. a4 (5 units, each)", "x0 .. x4 (5 units, each)", "n"]
    assert len(_folded(rows("a0 x0 a1 x1 a2 x2 a3 x3"))) == 8
