"""What is written by a planned layout is what the safetensors library reads; a bar counts its bytes."""

import pytest
import torch
import tqdm.auto
from safetensors.torch import load_file

from fsdp2x.io.hf.layout import ProgressBar, Writer, make_files, parse_size, plan_layout
from fsdp2x.io.names import TensorSpec

TENSORS = {
    "a": torch.arange(5, dtype=torch.uint8),
    "b": torch.randn(3, 4),
    "c": torch.randn(2, 2).bfloat16(),
    "d": torch.tensor(1.5, dtype=torch.float64),
    "e": torch.zeros(0, 7),
    "f": torch.tensor([True, False, True]),
}
SPECS = [TensorSpec(name, tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()]


class Bar:
    def __init__(self, **options):
        self.options, self.num_bytes, self.is_open = options, 0, True

    def update(self, num_bytes):
        self.num_bytes += num_bytes

    def close(self):
        self.is_open = False


@pytest.mark.parametrize("limit", ["1GB", 60, 1])
def test_read_by_the_library(tmp_path, monkeypatch, capfd, limit):
    ProgressBar(100, "Loading weights").close()
    assert capfd.readouterr() == ("", ""), "shown where nobody looks"
    bars = []
    monkeypatch.setattr(tqdm.auto, "tqdm", lambda **options: bars.append(Bar(**options)) or bars[-1])
    layout = plan_layout(SPECS, limit, "model")
    make_files(tmp_path, layout)
    with Writer(tmp_path, layout) as writer:
        for name, tensor in TENSORS.items():
            assert layout.place[name][1] % tensor.element_size() == 0
            writer.write(name, tensor)
    (bar,) = bars
    assert bar.num_bytes == sum(tensor.nbytes for tensor in TENSORS.values()) <= bar.options["total"]
    assert bar.options["disable"] is None and not bar.is_open
    read = {}
    for file in layout.files:
        part = load_file(tmp_path / file.name)
        assert limit == 1 or sum(t.numel() * t.element_size() for t in part.values()) <= parse_size(limit)
        read.update(part)
    assert set(read) == set(TENSORS) and all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)
    assert len(layout.files) == {"1GB": 1, 60: 2, 1: 6}[limit]
    if limit == "1GB":
        assert layout.index is None and layout.files[0].name == "model.safetensors"
    else:
        assert layout.index["weight_map"] == {name: layout.files[i].name for name, (i, _) in layout.place.items()}
        assert layout.files[0].name.startswith("model-00001-of-0000")


def test_sizes():
    assert [parse_size(size) for size in (7, "5GB", "1.5 KiB", "2mb")] == [7, 5 * 10**9, 1536, 2 * 10**6]
    for size in ("", "-1", "5 apples", 0, "GB"):
        with pytest.raises(ValueError, match="max_shard_size must be bytes or a size"):
            parse_size(size)


def test_refusals():
    with pytest.raises(ValueError, match="several weights would be written as a"):
        plan_layout([SPECS[0], SPECS[0]], 100, "model")
    with pytest.raises(ValueError, match=r"safetensors cannot hold z \(torch.complex64\)"):
        plan_layout([TensorSpec("z", torch.Size([1]), torch.complex64)], 100, "model")
