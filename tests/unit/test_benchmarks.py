"""The benchmarks' report: README.md shows what benchmarks/results holds, and every kind of result makes a table."""

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch

from harness import programs

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TIMES = {"median_ms": 2.0, "min_ms": 1.0, "max_ms": 3.0}
TITLES = {
    "step": "One training step",
    "optimizer": "Clipping and AdamW",
    "host": "Host time of a unit",
    "collectives": "Gathers and reductions of one host",
    "memory": "Memory above the imports",
    "sync": "Weights into an engine process",
    "curves": "Losses by moments and by wire formats",
    "sequence": "Packing and sequence parallelism",
    "score": "Log-probabilities without logits",
}


def report(*arguments) -> subprocess.CompletedProcess:
    """In a process of its own: the benchmarks' harness and the tests' have the same name."""
    return programs.run(FOLDER / "report.py", *arguments)


def phases(*names: str, factor: float = 1.0) -> dict:
    return {name: {key: factor * value for key, value in TIMES.items()} for name in names}


def per_unit(factor: float) -> dict:
    return {**phases("step", "forward", "backward"), "us_per_unit": {"forward": factor, "backward": 2 * factor}}


def records() -> dict[str, object]:
    """One result of each kind, in which stock takes four times as long."""
    step = ("step", "forward", "backward", "optimizer")
    moved = ("all_gather", "reduce_scatter")
    case = {"question": "units", "world": 2, "num_units": 8, "num_params": 11}
    scored = {"above_gradients_bytes": 2**20, "errors": {"log_probs": 1e-7}}
    memory = {"built": 2**20, "peak": 3 * 2**20, "resting": 2 * 2**20}
    return {
        "step": {
            "comm": {
                **{side: phases(*step) for side in ("fsdp2x", "fsdp2x_torch_adamw", "ddp")},
                "stock": phases(*step, factor=4.0),
            }
        },
        "optimizer": {
            "units": {
                "fsdp2x": phases("step", "clip", "optimizer"),
                "stock": phases("step", "clip", "optimizer", factor=4.0),
                "one step": phases("step", "optimizer"),
                "unsharded": phases("step", "clip", "optimizer"),
                "floor": phases("optimizer"),
            }
        },
        "sync": {
            "per tensor": phases("step", factor=4.0),
            **{way: phases("step") for way in ("one bucket", "push", "delta", "copy")},
            "wire_bytes": dict.fromkeys(("per tensor", "one bucket", "push", "delta", "copy"), 2**20),
        },
        "muon": {
            "layers": {
                "ranks": 2,
                "sides": {side: {**phases("step"), "sent_bytes": 10**6} for side in ("fsdp2x", "gather", "torch")},
            }
        },
        "wire": [
            {"link_mbits": 0, "side": side, "sent_bytes": 10**6, "loss": 1.0, **phases("step")}
            for side in ("stock FSDP2", "gloo", "gloo, int8 and int8")
        ],
        "host": [{"case": case, "fsdp2x": per_unit(10.0), "stock": per_unit(40.0), "unsharded": per_unit(0.0)}],
        "collectives": [
            {
                "bytes": 1 << 20,
                "world": 2,
                "shm": phases(*moved),
                "gloo": phases(*moved, factor=4.0),
                "met": phases(*moved),
                "floor": phases(*moved),
            }
        ],
        "curves": {
            side: {"of": of, "train": [[1, 2.0], [2, 1.9]], "held_out": [[1, loss], [2, loss]], "ends": [loss, 1.0]}
            for side, of, loss in (("float32", "", 1.0), ("int8", "moments", 1.04), ("int8, int8", "wire", 1.0))
        },
        "memory": [
            {
                "case": "comm",
                "world": 2,
                "ddp": memory,
                "stock": {name: 4 * size for name, size in memory.items()},
                "fsdp2x": {**memory, "plan": 2**20},
            }
        ],
        "sequence": {
            "packing": {
                "padded": {**phases("step", factor=4.0), "tokens": 10, "positions": 20},
                "packed": {**phases("step"), "tokens": 10, "positions": 10},
            }
        },
        "score": {
            "fp32": {
                "case": {},
                "sides": {
                    "logits": {**scored, **phases("step", "forward", "backward", factor=4.0)},
                    "score": {**scored, **phases("step", "forward", "backward"), "above_gradients_bytes": 2**18},
                },
            }
        },
    }


def write(folder: Path) -> None:
    environment = {"torch": "2.15.0", "cores": 2, "world": 2, "commit": "abc"}
    for name, results in records().items():
        record = {"benchmark": name, "environment": environment, "results": results}
        (folder / f"{name}_x.json").write_text(json.dumps(record))


def test_the_readme_shows_the_recorded_results():
    done = report("--check")
    assert done.returncode == 0, done.stderr


def test_several_runs_are_one_result_with_their_range():
    code = """
import harness, json
runs = [{"comm": {"fsdp2x": {"step": {"median_ms": m, "min_ms": 0.0, "max_ms": 99.0}}}, "world": 2} for m in (3, 1, 2)]
merged = harness.merge(runs)
step = merged["comm"]["fsdp2x"]["step"]
alone = runs[0]["comm"]["fsdp2x"]["step"]
print(json.dumps([merged["world"], step, harness.spread(step, 1), harness.spread(alone, 1)]))
"""
    done = programs.run("-c", code, cwd=FOLDER)
    assert done.returncode == 0, done.stderr
    merged = {"median_ms": 2, "min_ms": 1, "max_ms": 3, "runs": 3}
    assert json.loads(done.stdout) == [2, merged, "2.0 (1.0-3.0)", "3.0"]


@pytest.fixture
def plots(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(FOLDER)
    import plots

    return plots


def recorded(name: str) -> dict:
    return json.loads((FOLDER / f"results/{name}.json").read_text())


def test_the_readme_of_the_package_shows_the_history(plots):
    import history

    lines = history.read(history.HISTORY)
    assert lines, "benchmarks/history.jsonl is empty: python benchmarks/history.py record"
    text = history.README.read_text()
    assert history.written(text, lines) == text, "python benchmarks/history.py write"
    line = next(line for line in lines if line["name"] == "step_cpu_2ranks")
    slower = {**line, "day": "2000-01-01", "ratios": {**line["ratios"], "comm: FSDP2": 1.0}}
    table = history.steps_table([slower, {**slower, "ratios": {"comm: FSDP2": 3.0}}, {**slower, "name": "other"}])
    assert "runs: 2, days: 1" in table and "| comm: 12 layers of 512, 16 tokens | 2.0x (1.0 to 3.0) |" in table
    assert history.written(text, [slower]) != text


@pytest.mark.full
@pytest.mark.parametrize("name", [path.stem for path in sorted((FOLDER / "results").glob("*.json"))])
def test_pictures_are_read(plots, tmp_path, name):
    """No text lies on another, few bars a panel, ours first, and every panel has its unit."""
    record = recorded(name)
    if record["benchmark"] not in plots.PANELS:
        pytest.skip("a table alone")
    panels = plots.PANELS[record["benchmark"]](record["results"])
    assert plots.overlaps(plots.draw(panels, tmp_path / "plot.png")) == []
    for panel in panels:
        assert panel.title and panel.unit
        if isinstance(panel, plots.Bars):
            assert 1 < len(panel.bars) <= plots.MOST_BARS and panel.bars[0].color == plots.OURS


@pytest.mark.full
def test_every_kind_of_result_makes_a_table_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path)
    done = report("--results", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "README.md").read_text()
    for name, title in TITLES.items():
        part = text.split(f"## {title}")[1].split("## ")[0]
        assert {"memory": "0.25x", "sequence": "4.00x", "score": "0.25x"}.get(name, "4.0") in part, part
        assert (tmp_path / "out" / "plots" / f"{name}_x.png").stat().st_size > 5000
    done = report("--check", "--results", tmp_path)
    assert done.returncode == 1 and "run benchmarks/report.py" in done.stderr
    (tmp_path / "other.json").write_text("{}")
    done = report("--check", "--results", tmp_path)
    assert done.returncode == 1 and "other.json: not a result of a benchmark" in done.stderr


def test_gpu_results_are_kept_and_shown(tmp_path):
    rows = [
        {"kernel": "copy", "bytes": 6000000, "ms": 2.0, "gb_per_s": 3.0, "copy_ms": 1.9, "share_of_copy": 0.95},
        {"kernel": "adamw", "bytes": 28000000, "ms": 4.0, "gb_per_s": 7.0, "copy_ms": 2.0, "share_of_copy": 0.5},
    ]
    program, kept = tmp_path / "program", tmp_path / "results" / "a-gpu.json"
    program.write_text(f"#!/bin/sh\necho '{json.dumps({'device': 'A GPU', 'rows': rows})}'\n")
    program.chmod(0o755)
    kept.parent.mkdir()
    kept.write_text(json.dumps({"benchmark": "gpu", "environment": {}, "results": {"other": [1], "kernels": []}}))

    def bench(path: Path) -> subprocess.CompletedProcess:
        return programs.run(FOLDER / "gpu/bench_kernels.py", "--program", path, "--json", kept)

    done = bench(program)
    assert done.returncode == 0, done.stderr
    assert "| adamw | 28 | 4.000 | 7 | 0.50 (low) |" in done.stdout
    assert json.loads(kept.read_text())["results"] == {"other": [1], "kernels": rows}
    done = report("--results", kept.parent, "--out", tmp_path / "out", "--no-plots")
    assert done.returncode == 0, done.stderr
    assert "| copy | 6 | 2.000 | 3 | 0.95 |" in (tmp_path / "out" / "README.md").read_text()
    program.write_text("#!/bin/sh\necho 'no CUDA device' >&2\nexit 77\n")
    done = bench(program)
    assert (done.returncode, done.stdout) == (0, "skipped: no CUDA device\n")
    done = bench(tmp_path / "missing")
    assert done.returncode == 1 and "make gpu-kernels" in done.stderr


def test_gpu_benchmarks_train_on_the_cpu_when_asked_to(tmp_path):
    """Dry runs: everything but the device's clock and counters, with losses that agree; and the report shows them."""
    kept = tmp_path / "results" / "dry-run.json"
    for name in ("step", "units", "memory"):
        done = programs.run(FOLDER / f"gpu/bench_{name}.py", "--device", "cpu", "--json", kept, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(kept.read_text())["results"]
    assert [(one["case"]["name"], one["case"]["policy"]) for one in results["step"]] == [
        (name, policy) for name in ("qwen3-tiny:8", "llama-tiny:8") for policy in ("fp32", "bf16")
    ]
    assert all(one[side]["step"]["median_ms"] > 0 for one in results["step"] for side in ("stock", "fsdp2x"))
    assert [(one["case"]["world"], one["case"]["gathers"]) for one in results["units"]] == [
        (1, "packed"), (2, "packed"), (2, "alone"),
    ]  # fmt: skip
    for one in results["units"]:  # slopes of short runs: any number
        assert all(math.isfinite(one["host_us"][side]["backward"]) for side in ("stock", "fsdp2x"))
    for one in results["memory"]:
        assert one["stock"]["model"] <= one["fsdp2x"]["model"] < one["fsdp2x"]["plan_resting"]
    done = report("--results", kept.parent, "--out", tmp_path / "out", "--no-plots")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "README.md").read_text()
    for title in ("Steps of HuggingFace shapes", "What a unit costs", "Memory of a rank"):
        assert f"### {title}" in text


def test_gpu_benchmarks_skip_where_no_gpu_is():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = programs.run(FOLDER / "gpu/bench_memory.py")
    assert (done.returncode, done.stdout) == (0, "skipped: no CUDA device\n"), done.stderr
