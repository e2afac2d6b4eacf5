"""The history of benchmarks: ratios of results, their ranges, and what lies below them."""

import json
import statistics
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def history(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import history

    return history


@pytest.fixture
def result():
    """A recorded one, in which stock takes 6.7 times as long as ours in "comm", and DDP 0.95 times in "lora"."""
    record = json.loads((FOLDER / "results/step_cpu_2ranks.json").read_text())
    for case, side, ratio in (("comm", "stock", 6.7), ("lora", "ddp", 0.95)):
        sides = record["results"][case]
        for name, phase in sides[side].items():
            phase["median_ms"] = ratio * sides["fsdp2x"][name]["median_ms"]
    return record


def test_a_line_has_the_ratios_of_the_report(history, result):
    line = history.entry("step_cpu_2ranks", result, 0.1)
    assert line["ratios"]["comm: FSDP2"] == pytest.approx(6.7, abs=0.01)
    assert line["ratios"]["lora: DDP, unsharded"] == pytest.approx(0.95, abs=0.01)
    assert line["commit"] == result["environment"]["commit"] and line["load"] == 0.1
    assert line["ours"]["comm"] == pytest.approx(result["results"]["comm"]["fsdp2x"]["step"]["median_ms"], abs=0.001)


def test_a_line_has_phases_and_points_of_curves(history, result):
    """Which do not count for a regression: there are too many of them for one run to be above all."""
    line = history.entry("step_cpu_2ranks", result, 0.1)
    assert line["ratios"]["comm: FSDP2, forward"] == pytest.approx(6.7, abs=0.01)
    record = json.loads((FOLDER / "results/collectives_cpu_2ranks.json").read_text())
    one = record["results"][0]
    of_gloo, of_shm = (one[side]["all_gather"]["median_ms"] for side in ("gloo", "shm"))
    points = history.entry("collectives_cpu_2ranks", record, 0.1)["ratios"]
    assert points[f"all-gather, {one['bytes']:,} bytes: gloo"] == pytest.approx(of_gloo / of_shm, abs=0.001)
    raised = [{**line, "ratios": {**line["ratios"], "comm: FSDP2, forward": 9.0}}] * 5
    assert history.regressions(raised, {"step_cpu_2ranks": result}) == []
    losses = json.loads((FOLDER / "results/curves_cpu_2ranks.json").read_text())
    assert history.details(losses) == {} == history.ratios(losses)


def test_who_is_ahead_is_bold_and_phases_are_rows_where_a_peer_is(history, result):
    line = history.entry("step_cpu_2ranks", result, 0.1)
    rows = history.table([line, {**line, "boot": "another"}])
    assert "| lora: DDP, unsharded | **0.95x** | 0.95x to 0.95x | 2 | 1 | 2 |" in rows
    assert any(row.startswith("| lora: DDP, unsharded, forward | **0.95x** |") for row in rows)
    assert not any(row.startswith("| comm: FSDP2, forward |") for row in rows)


def test_the_picture_of_the_readme(history, tmp_path):
    """Of all runs, and no text of it lies on another."""
    lines = history.read(history.HISTORY)
    panels = history.overview(lines)
    values = history.ranges(lines)["step_cpu_2ranks", "comm: FSDP2"]
    ours, stock = panels[0].bars[:2]
    assert stock.value / ours.value == pytest.approx(statistics.median(values))
    assert stock.high / ours.value == pytest.approx(max(values)) and stock.label == "FSDP2"
    figure = history.plots.draw(panels, tmp_path / "overview.png")
    assert history.plots.overlaps(figure) == []
    bars = figure.axes[0].texts
    bars[0].set_position(bars[1].get_position())
    assert len(history.plots.overlaps(figure)) == 1


def test_ranges_and_what_is_below_them(history, result):
    line = history.entry("step_cpu_2ranks", result, 0.1)
    lines = []
    for day, factor in enumerate((0.9, 0.8, 1.0, 1.2, 1.1)):
        scaled = {row: factor * value for row, value in line["ratios"].items()}
        lines.append({**line, "day": f"2026-01-0{1 + day % 2}", "ratios": scaled})
    (row,) = [row for row in history.table(lines) if row.startswith("| comm: FSDP2 |")]
    assert row.endswith("| 6.70x | 5.36x to 8.04x | 5 | 2 | 1 |")
    assert history.regressions(lines, {"step_cpu_2ranks": result}) == []
    assert history.regressions(lines[:4], {"step_cpu_2ranks": result}) == []
    for phase in result["results"]["comm"]["stock"].values():
        phase["median_ms"] *= 0.7
    (said,) = history.regressions(lines, {"step_cpu_2ranks": result})
    assert said.startswith("step_cpu_2ranks, comm: FSDP2: 4.69x, the 5 runs before had 5.36x and more")
    assert history.regressions(lines[:4], {"step_cpu_2ranks": result}) == []


def test_a_run_is_appended(history, monkeypatch, tmp_path):
    """Each in a process of its own, the last one's result is kept; one that fails leaves no line."""
    (tmp_path / "results").mkdir()
    (tmp_path / "bench.py").write_text(
        "import json, sys\n"
        f"text = open({str(FOLDER / 'results/step_cpu_2ranks.json')!r}).read()\n"
        "open(sys.argv[-1], 'w').write(text)\n"
    )
    monkeypatch.setattr(history, "HERE", tmp_path)
    monkeypatch.setattr(history.run_all, "FULL", {"step": ["bench.py"], "gone": ["gone.py"]})
    assert history.record(["step"], 2, tmp_path / "history.jsonl") == 0
    assert history.record(["gone"], 1, tmp_path / "history.jsonl") == 1
    lines = history.read(tmp_path / "history.jsonl")
    assert [line["name"] for line in lines] == ["step", "step"] and history.read(tmp_path / "none") == []
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["step.json"]
