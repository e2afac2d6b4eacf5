"""metrics.jsonl: one line at once on disk, nothing from other ranks, readable after a kill in the middle of a line."""

import json
import logging
import math
import sys
import time

import pytest

from fsdp2x.train.metrics import Metrics, read_metrics
from training import Said


def make(folder, main=True, **options):
    options = {"tensorboard": False, "progress": "off", "num_steps": 10, "first_step": 0, **options}
    return Metrics(folder, main=main, **options)


def test_lines_are_on_disk_before_close(tmp_path):
    metrics = make(tmp_path)
    metrics.write("eval", 3, loss=0.1)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["event"], line["step"]) == ("eval", 3)
    assert float.fromhex(line["loss_hex"]) == 0.1
    metrics.close()


STEP = {"loss": 1.0, "lr": 1e-3, "epochs": 0.5, "grad_norm": None, "tokens_per_s": 1.0, "used_bytes": 1} | {
    "planned_bytes": 3 << 20
}


def test_other_ranks_write_nothing(tmp_path):
    metrics = make(tmp_path / "out", main=False, tensorboard=True, progress="on")
    metrics.train(1, **STEP)
    metrics.say("hello")
    metrics.close()
    assert not (tmp_path / "out").exists()


def test_a_line_cut_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps({"event": "train", "step": 1})
    path.write_text(whole + '\n{"event": "tr')
    assert [line["step"] for line in read_metrics(path)] == [1]
    metrics = make(tmp_path, first_step=1)
    metrics.write("resume", 1)
    metrics.close()
    assert [line["event"] for line in read_metrics(path)] == ["train", "resume"]


def test_bar_shows_loss_speed_norm_and_memory(tmp_path, capsys):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("12:34:56 [rank 0] %(message)s"))
    logging.root.addHandler(handler)
    logging.getLogger("fsdp2x").setLevel(logging.INFO)
    try:
        metrics = make(tmp_path, progress="on")
        metrics.train(4, **{**STEP, "loss": 1.5, "grad_norm": 0.25, "tokens_per_s": 1234.0, "used_bytes": 2**30})
        metrics.say("a %s", "note")
        logging.getLogger("other").warning("another note")
        metrics.close()
        assert handler in logging.root.handlers
    finally:
        logging.root.removeHandler(handler)
    shown = capsys.readouterr().err
    memory = "mem=1.00 GiB (3.00 MiB planned + activations)"
    said = [f"\r12:34:56 [rank 0] {note}\n" for note in ("a note", "another note")]
    for part in ("4/10", "loss=1.5000", "tok/s=1,234", "grad=0.250", memory, *said):
        assert part in shown


def test_a_run_draws_its_losses(tmp_path, monkeypatch):
    metrics = make(tmp_path, num_steps=30)
    for step in range(1, 10):
        metrics.train(step, **STEP)
    metrics.draw()
    assert not (tmp_path / "loss.png").exists()
    metrics.train(10, **STEP | {"loss": math.nan})
    metrics.train(11, **STEP)
    metrics.write("eval", 11, loss=2.0)
    with Said() as said:
        metrics.draw()
    picture = tmp_path / "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and said[-1] == f"loss curve: {picture}"
    picture.unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    metrics.draw()
    metrics.close()
    metrics.draw()
    assert not picture.exists()


@pytest.mark.parametrize(("speed", "left"), [(0.5, "left 00:02"), (30, "left 02:00"), (900, "left 1:00:00")])
def test_a_line_says_how_long_the_rest_will_take(tmp_path, monkeypatch, speed, left):
    """Ten steps, of which the sixth is done."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    metrics = make(tmp_path)
    with Said() as said:
        logging.getLogger("fsdp2x").setLevel(logging.INFO)
        for step in (1, 6):
            metrics.train(step, **STEP)
            now += 5 * speed
    metrics.close()
    assert "left" not in said[0] and left in said[1] and "lr 1.00e-03  epoch 0.50" in said[1]
    assert [line["seconds_left"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [None, 4 * speed]


def test_tensorboard_gets_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = make(tmp_path, tensorboard=True)
    metrics.train(1, **{**STEP, "loss": 2.0})
    metrics.write("eval", 1, loss=3.0)
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("train/loss")] == [2.0]
    assert [e.value for e in events.Scalars("eval/loss")] == [3.0]
