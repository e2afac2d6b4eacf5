"""fsdp2x.io.formats.records and tiles: files of torch.save as sources, nothing of them executed."""

import itertools
import os
import pickle
import pickletools
import random
import zipfile

import pytest
import torch
from torch import nn

import damage
from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.formats.records import Placement, box_of, read_records
from fsdp2x.io.formats.safe_files import OpenFiles
from fsdp2x.io.formats.tensors import FileTensor, LoadedTensor, Tile, covers, tiled


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
        with refuses(r"short.pt: damaged, its storage 0 has 36 bytes, 100 elements of torch.float32 are said"):
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
    found = tiled("w", whole.shape, whole.dtype, tiles)
    assert torch.equal(found.whole(), whole)
    for a, b in itertools.product(range(5), range(7)):
        out = torch.empty(5 - a, 7 - b, dtype=torch.float64)
        found.read([a, b], out)
        assert torch.equal(out, whole[a:, b:].double())
    with refuses("w: the shards hold 23 elements of 35"):
        tiled("w", whole.shape, whole.dtype, tiles[1:4])
    with refuses("w: the shards of .* reach beyond"):
        tiled("w", (4, 7), whole.dtype, tiles)
    with refuses("w: a shard has dtype torch.float32, the tensor torch.float64"):
        tiled("w", whole.shape, torch.float64, tiles)
    assert torch.equal(
        tiled("s", (), torch.float32, [Tile((), LoadedTensor(torch.tensor(2.0)))]).whole(), torch.tensor(2.0)
    )


def test_boxes_that_cover_a_shape_are_told_from_others():
    """Against counting: every element in exactly one box."""
    rng = random.Random(0)
    seen = set()
    for _ in range(1500):
        shape = [rng.randrange(1, 5) for _ in range(rng.randrange(0, 4))]
        boxes = [([0] * len(shape), shape)]
        for _ in range(rng.randrange(4) if shape else 0):
            boxes += _cut(rng, boxes.pop(rng.randrange(len(boxes))))
        if rng.random() < 0.7:
            start, sizes = rng.choice(boxes)
            kind = rng.randrange(4)
            if kind == 0:
                boxes.remove((start, sizes))
            elif kind == 1:
                boxes.append((start, sizes))
            elif shape:
                dim, moved = rng.randrange(len(shape)), [*(start, sizes)[kind - 2]]
                moved[dim] += rng.choice([-1, 1])
                boxes[boxes.index((start, sizes))] = (moved, sizes) if kind == 2 else (start, moved)
        boxes = [box for box in boxes if 0 not in box[1]]
        counted = torch.zeros(shape)
        inside = all(
            a >= 0 and n > 0 and a + n <= whole for s, z in boxes for a, n, whole in zip(s, z, shape, strict=True)
        )
        if inside:
            for start, sizes in boxes:
                counted[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))] += 1
        right = inside and bool((counted == 1).all())
        assert (covers(shape, boxes) == "") == right, (shape, boxes)
        seen.add((right, covers(shape, boxes).split(" ")[0]))
    assert seen == {(True, ""), (False, "of"), (False, "hold"), (False, "overlap,")}


def _cut(rng, box):
    start, sizes = box
    dim = rng.randrange(len(sizes))
    if sizes[dim] < 2:
        return [box]
    at = rng.randrange(1, sizes[dim])
    return [
        (start, [*sizes[:dim], at, *sizes[dim + 1 :]]),
        ([*start[:dim], start[dim] + at, *start[dim + 1 :]], [*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :]]),
    ]


def test_a_pickle_cannot_move_what_stands_for_a_tensor(tmp_path):
    """A tensor's attributes set by the pickle behind it: another place, another file."""
    torch.save({"a": torch.arange(4.0)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as source:
        parts = {name: source.read(name) for name in source.namelist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    built = pickletools.optimize(pickle.dumps({"offset": 0, "_path": "/etc/passwd"}, protocol=2))[2:-1]
    calls = [at for op, _, at in pickletools.genops(parts[name]) if op.name == "REDUCE"]
    end = calls[-1] + 1
    parts[name] = parts[name][:end] + built + b"b" + parts[name][end:]
    with zipfile.ZipFile(tmp_path / "moved.pt", "w") as archive:
        for one, content in parts.items():
            archive.writestr(one, content)
    with OpenFiles() as files, refuses("moved.pt: damaged .*attributes are set by the file that holds it"):
        read_records(files, tmp_path / "moved.pt")


def test_every_changed_number_of_the_zip_is_refused_or_means_nothing(tmp_path):
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(40), "c": torch.zeros(0, 2)}
    torch.save(state, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    refused = 0
    for seed in range(200):
        damaged, change = damage.change_zip(random.Random(seed), content)
        (tmp_path / "y.pt").write_bytes(damaged)
        with OpenFiles() as files:
            try:
                found = read_records(files, tmp_path / "y.pt")
            except CheckpointError:
                refused += 1
                continue
            for name, tensor in state.items():
                assert torch.equal(found[name].whole(), tensor), change.what
    assert refused > 100
