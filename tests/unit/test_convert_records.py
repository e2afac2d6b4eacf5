"""fsdp2x.convert.records and tiles: files of torch.save as sources, nothing of them executed."""

import itertools
import os
import zipfile

import pytest
import torch
from torch import nn

from fsdp2x.checkpoint.agree import CheckpointError
from fsdp2x.convert.records import OpenFiles, Placement, read_records
from fsdp2x.convert.tiles import Tile, Tiled, box_of
from fsdp2x.hf.sources import FileTensor, LoadedTensor


def refuses(pattern):
    return pytest.raises(CheckpointError, match=pattern)


def test_tensors_of_every_kind(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    state = {
        "plain": base,
        "half": base.bfloat16(),
        "float8": base.to(torch.float8_e4m3fn),
        "ints": torch.arange(5),
        "bools": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "rows": base[1:3],
        "turned": base.T,
        "columns": base[:, 1:4],
        "parameter": nn.Parameter(base * 2),
    }
    torch.save(state, tmp_path / "x.pt")
    (tmp_path / "shifted").write_bytes(b"x" * 77 + (tmp_path / "x.pt").read_bytes() + b"y" * 13)
    size = (tmp_path / "x.pt").stat().st_size
    with OpenFiles() as files:
        for found in (read_records(files, tmp_path / "x.pt"), read_records(files, tmp_path / "shifted", 77, size)):
            assert list(found) == list(state)
            for name, tensor in state.items():
                whole = found[name].whole()
                assert whole.dtype == tensor.dtype and found[name].shape == tuple(tensor.shape)
                assert torch.equal(whole.float(), tensor.detach().float()), name
            assert isinstance(found["rows"], FileTensor), "a view of whole rows is a run of bytes"
            part = torch.empty(2, 2)
            found["turned"].read([1, 2], part)
            assert torch.equal(part, base.T[1:3, 2:4])
    module = nn.Linear(2, 2)
    torch.save(module.state_dict(), tmp_path / "module.pt")  # an OrderedDict with attributes
    with OpenFiles() as files:
        assert torch.equal(read_records(files, tmp_path / "module.pt")["weight"].whole(), module.weight)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_nothing_is_executed_and_damage_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.zeros(2), "b": Bomb()}, "bomb.pt")
    with OpenFiles() as files:
        with refuses("bomb.pt: cannot be read: it refers to posix.mkdir"):
            read_records(files, tmp_path / "bomb.pt")
        assert not (tmp_path / "exploded").exists()
        torch.save({"a": nn.Linear(1, 1)}, "module.pt")
        with refuses("module.pt: cannot be read: it refers to torch.nn.modules.linear.Linear"):
            read_records(files, tmp_path / "module.pt")
        torch.save({"a": torch.zeros(100)}, "cut.pt")
        whole = (tmp_path / "cut.pt").read_bytes()
        for end in range(0, len(whole), 37):
            (tmp_path / "part.pt").write_bytes(whole[:end])
            with OpenFiles() as fresh, refuses("part.pt: damaged or not written by torch.save"):
                read_records(fresh, tmp_path / "part.pt")
        torch.save({"a": torch.zeros(1)}, "old.pt", _use_new_zipfile_serialization=False)
        with refuses("old.pt: damaged or not written by torch.save in its zip format"):
            read_records(files, tmp_path / "old.pt")
        with zipfile.ZipFile("cut.pt") as source, zipfile.ZipFile("short.pt", "w") as archive:
            for name in source.namelist():
                archive.writestr(name, source.read(name)[: 36 if name.endswith("data/0") else None])
        with refuses(r"short.pt: cannot be read: a tensor of shape \[100\] exceeds its storage of 36 bytes"):
            read_records(files, tmp_path / "short.pt")
        with refuses("gone.pt: No such file"):
            read_records(files, tmp_path / "gone.pt")


@pytest.mark.parametrize("shape", [(7, 5), (2, 9), (1, 1), (8, 4)])
def test_boxes_are_those_of_dtensor(shape):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as compute

    kinds = {"Shard0": (Shard(0), Placement("Shard", 0)), "Shard1": (Shard(1), Placement("Shard", 1))}
    kinds["Replicate"] = (Replicate(), Placement("Replicate"))
    for sizes in ((3,), (2, 2), (2, 3)):
        for names in itertools.product(kinds, repeat=len(sizes)):
            theirs, ours = zip(*(kinds[name] for name in names), strict=True)
            covered = torch.zeros(shape)
            for coordinate in itertools.product(*(range(size) for size in sizes)):
                local, offset = compute(shape, list(sizes), list(coordinate), list(theirs))
                start, box = box_of(shape, sizes, coordinate, ours)
                assert box == tuple(local)
                if 0 not in box:
                    assert start == tuple(offset)
                    covered[tuple(slice(a, a + n) for a, n in zip(start, box, strict=True))] = 1
            assert covered.all()
    with refuses("placement Partial is not supported"):
        box_of(shape, (2,), (0,), [Placement("Partial")])


def test_tiles():
    whole = torch.arange(35.0).view(5, 7)
    boxes = [((0, 0), (3, 4)), ((0, 4), (3, 3)), ((3, 0), (2, 4)), ((3, 4), (2, 3)), ((5, 0), (0, 4))]
    tiles = [
        Tile((a, b), LoadedTensor(whole[a : a + m, b : b + n])) for (a, b), (m, n) in [*boxes, boxes[0]]
    ]  # the last is a replica
    tiled = Tiled("w", whole.shape, whole.dtype, tiles)
    assert torch.equal(tiled.whole(), whole)
    for a, b in itertools.product(range(5), range(7)):
        out = torch.empty(5 - a, 7 - b, dtype=torch.float64)
        tiled.read([a, b], out)
        assert torch.equal(out, whole[a:, b:].double())
    with refuses("w: the shards hold 23 elements of 35"):
        Tiled("w", whole.shape, whole.dtype, tiles[1:4])
    with refuses("does not fit into"):
        Tiled("w", (4, 7), whole.dtype, tiles)
    with refuses("does not fit into"):
        Tiled("w", whole.shape, torch.float64, tiles)
    assert torch.equal(
        Tiled("s", (), torch.float32, [Tile((), LoadedTensor(torch.tensor(2.0)))]).whole(), torch.tensor(2.0)
    )
