"""The planned layout is what the safetensors library reads."""

import pytest
import torch
from safetensors.torch import load_file

from fsdp2x.hf.layout import parse_size, plan_layout
from fsdp2x.hf.names import TensorSpec

TENSORS = {
    "a": torch.arange(5, dtype=torch.uint8),
    "b": torch.randn(3, 4),
    "c": torch.randn(2, 2).bfloat16(),
    "d": torch.tensor(1.5, dtype=torch.float64),
    "e": torch.zeros(0, 7),
    "f": torch.tensor([True, False, True]),
}
SPECS = [TensorSpec(name, tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()]


@pytest.mark.parametrize("limit", ["1GB", 60, 1])
def test_read_by_the_library(tmp_path, limit):
    layout = plan_layout(SPECS, limit, "model")
    for file in layout.files:
        (tmp_path / file.name).write_bytes(file.header + bytes(file.num_bytes - len(file.header)))
    for name, tensor in TENSORS.items():
        index, offset = layout.place[name]
        assert offset % tensor.element_size() == 0
        with open(tmp_path / layout.files[index].name, "r+b") as file:
            file.seek(offset)
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
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
