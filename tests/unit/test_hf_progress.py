"""Bars of loading and writing: every byte is counted, and nothing is shown where nobody looks."""

import torch
import tqdm.auto

from fsdp2x.hf.layout import Writer, make_files, plan_layout
from fsdp2x.hf.names import TensorSpec
from fsdp2x.hf.progress import ProgressBar


def test_a_bar_counts_what_is_written(tmp_path, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, **options):
            self.options, self.num_bytes, self.is_open = options, 0, True
            bars.append(self)

        def update(self, num_bytes):
            self.num_bytes += num_bytes

        def close(self):
            self.is_open = False

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    layout = plan_layout([TensorSpec(name, torch.Size([100, 7]), torch.float32) for name in "ab"], "1MB", "model")
    make_files(tmp_path, layout)
    with Writer(tmp_path, layout) as writer:
        for name in "ab":
            writer.write(name, torch.ones(100, 7))
    (bar,) = bars
    assert bar.num_bytes == 2 * 100 * 7 * 4 and not bar.is_open
    assert bar.num_bytes <= bar.options["total"] <= bar.num_bytes + 1000 and bar.options["disable"] is None


def test_nothing_is_shown_where_nobody_looks(capfd):
    bar = ProgressBar(100, "Loading weights")
    bar.add(50)
    bar.close()
    assert capfd.readouterr() == ("", "")
