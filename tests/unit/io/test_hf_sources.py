"""Sources against the plain tensors they stand for: any box, any dtype, only the bytes of the box are read."""

import itertools
import random

import pytest
import torch
from safetensors.torch import save_file

from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.formats.tensors import Joined, LoadedTensor, Piece, Stacked, Turned, differ
from fsdp2x.io.hf.files import Checkpoint, weight_files


def boxes(shape, rng, count=12):
    for _ in range(count):
        start = [rng.randrange(size + 1) for size in shape]
        yield start, [rng.randrange(size - first + 1) for size, first in zip(shape, start, strict=True)]


def cut(tensor, start, size):
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]


def check(source, expected, seed=0):
    assert source.shape == tuple(expected.shape)
    assert torch.equal(source.whole(), expected)
    rng = random.Random(seed)
    for start, size in boxes(expected.shape, rng):
        for dtype in (expected.dtype, torch.float64):
            out = torch.full(size, -1, dtype=dtype)
            source.read(start, out)
            assert torch.equal(out, cut(expected, start, size).to(dtype))
        turned = torch.empty(size[::-1], dtype=expected.dtype).permute(list(range(len(size) - 1, -1, -1)))
        source.read(start, turned)
        assert torch.equal(turned, cut(expected, start, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_boxes_of_a_file(tmp_path, dtype):
    torch.manual_seed(0)
    shapes = {"scalar": (), "vector": (7,), "matrix": (5, 6), "cube": (3, 4, 5), "empty": (0, 3), "one": (1, 1, 9)}
    tensors = {name: torch.randn(shape).mul(9).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint([tmp_path]) as files:
        assert set(files.tensors) == set(tensors) and not files.is_pickled
        for name, expected in tensors.items():
            check(files.tensors[name], expected)
        before = files.read_bytes
        files.tensors["matrix"].read([2, 0], torch.empty(2, 6, dtype=dtype))
        assert files.read_bytes - before == 2 * 6 * dtype.itemsize


def test_larger_than_the_buffer(tmp_path):
    big = torch.arange(5 << 20, dtype=torch.int32).view(5, -1)
    save_file({"big": big}, tmp_path / "model.safetensors")
    with Checkpoint([tmp_path / "model.safetensors"]) as files:
        out = torch.empty(3, 1 << 20, dtype=torch.int64)
        files.tensors["big"].read([2, 0], out)
        assert torch.equal(out, big[2:].long())


def test_stacked_joined_cut_and_turned():
    torch.manual_seed(0)
    parts = [torch.randn(3, 4) for _ in range(3)]
    sources = [LoadedTensor(part) for part in parts]
    for dim in (0, 1, 2, -1):
        check(Stacked(sources, dim), torch.stack(parts, dim))
    for dim in (0, 1, -1):
        check(Joined(sources, dim), torch.cat(parts, dim))
        size = parts[0].shape[dim]
        for first, num in itertools.combinations(range(size + 1), 2):
            check(Piece(sources[0], dim, first, num - first), parts[0].narrow(dim, first, num - first))
    check(Turned(sources[0], 0, 1), parts[0].T)
    gate_up = Joined([Stacked(sources, 0), Stacked(sources[::-1], 0)], 1)
    check(Turned(gate_up, 1, 2), torch.cat([torch.stack(parts), torch.stack(parts[::-1])], 1).transpose(1, 2))


def test_differ():
    first = torch.randn(5, 3)
    second = first.clone()
    second[4, 2] += 1
    pair = LoadedTensor(first), LoadedTensor(second)
    assert not differ(pair[0], LoadedTensor(first.clone()), [0, 0], [5, 3])
    assert differ(*pair, [0, 0], [5, 3]) and differ(*pair, [4, 0], [1, 3]) and not differ(*pair, [0, 0], [4, 3])
    assert differ(LoadedTensor(torch.tensor(1.0)), LoadedTensor(torch.tensor(2.0)), [], [])


def test_what_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder or file; download a model"):
        weight_files(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds none of model.safetensors.index.json"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match="names files that are missing: gone.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "%s"}}' % ("x" * 5000))
    with pytest.raises(CheckpointError, match="names files that are missing: xxx") as error:
        weight_files(tmp_path)
    assert len(str(error.value)) < 1000
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="index.json: got list, expected a mapping"):
        weight_files(tmp_path)
    file = tmp_path / "cut.safetensors"
    save_file({"a": torch.zeros(100)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut.safetensors: not a whole safetensors file"):
        Checkpoint([file])
    torch.save({"a": print}, tmp_path / "code.bin")
    with pytest.raises(CheckpointError, match="code.bin: cannot be read: it refers to (__builtin__|builtins).print"):
        Checkpoint([tmp_path / "code.bin"])
    torch.save([torch.zeros(1)], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="list.bin: expected a dict of tensors, got list"):
        Checkpoint([tmp_path / "list.bin"])
    torch.save({"a": torch.zeros(1), "b": torch.eye(2).to_sparse()}, tmp_path / "sparse.bin")
    with pytest.raises(CheckpointError, match="sparse.bin: cannot be read: it refers to torch._utils._rebuild_sparse"):
        Checkpoint([tmp_path / "sparse.bin"])
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.bin")
    torch.save({"a": torch.zeros(1)}, tmp_path / "y.bin")
    with pytest.raises(CheckpointError, match="y.bin: holds 'a', which another of the files holds too"):
        Checkpoint([tmp_path / "x.bin", tmp_path / "y.bin"])
