"""Files of torch.save and tables of torch DCP as sources: nothing of them is executed, contradictions are named."""

import dataclasses
import io
import itertools
import os
import pickle
import pickletools
import random
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as compute

import damage
from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.formats.dcp import DcpTensors, read_table
from fsdp2x.io.formats.records import Placement, box_of, read_records
from fsdp2x.io.formats.safe_files import OpenFiles
from fsdp2x.io.formats.tensors import FileTensor, covers


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


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_executed_and_damage_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.zeros(2), "b": Evil(tmp_path / "exploded")}, "bomb.pt")
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
        with refuses(r"short.pt: damaged, its storage 0 has 36 bytes, but should have 100 elements of torch.float32"):
            read_records(files, tmp_path / "short.pt")
        with refuses("gone.pt: No such file"):
            read_records(files, tmp_path / "gone.pt")


@pytest.mark.parametrize("shape", [(7, 5), (2, 9), (1, 1), (8, 4)])
def test_boxes_are_those_of_dtensor(shape):
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
    assert seen == {(True, ""), (False, "of"), (False, "hold"), (False, "overlap")}


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
    """The pickle sets a tensor's attributes afterwards, to another offset and another file."""
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


@pytest.fixture
def saved(tmp_path):
    """A DCP folder with a tensor, a nested tensor and plain values."""
    state = {"model": {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}, "note": note()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "ckpt"), no_dist=True)
    return tmp_path / "ckpt"


def note():
    return {"groups": [{"lr": 0.5, "betas": (0.9, 0.95), "params": ["w"], "foreach": None}], "step": 3}


def load(folder):
    """Every entry by name."""
    with OpenFiles() as files:
        tensors = DcpTensors(folder, files)
        found = {name: tensors[name].whole() for name in tensors}
        return {**found, **{name: tensors.value(name) for name in tensors.table.objects}}


def edit(folder, change):
    """Rewrites the table after `change(metadata)`."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_table_that_calls_is_refused_unexecuted(saved, tmp_path):
    target = tmp_path / "made"
    table = pickle.loads((saved / ".metadata").read_bytes())
    table.planner_data["x"] = Evil(target)
    for attack in (table, Evil(target)):
        (saved / ".metadata").write_bytes(pickle.dumps(attack))
        with pytest.raises(CorruptFile, match=r"\.metadata: .* refers to (posix|nt)\.mkdir, which no checkpoint"):
            read_table(saved)
        assert not target.exists()
    pickle.loads((saved / ".metadata").read_bytes())  # the attack itself works: plain pickle would have run it
    assert target.is_dir()


def test_classes_are_not_touched(saved):
    """A pickle may set attributes of what it names: not of torch's own classes."""
    attack = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}(S'__init__'\nI1\nutb."
    (saved / ".metadata").write_bytes(attack)
    with pytest.raises(CorruptFile):
        read_table(saved)
    assert dcp.metadata.Metadata({}).state_dict_metadata == {}


def test_an_entry_that_calls_is_refused_unexecuted(saved, tmp_path):
    target = tmp_path / "made"
    buffer = io.BytesIO()
    torch.save(Evil(target), buffer)
    (saved / "evil.distcp").write_bytes(buffer.getvalue())

    def point(metadata):
        info = metadata.storage_data[MetadataIndex("note.groups.0.betas")]
        info.relative_path, info.offset, info.length = "evil.distcp", 0, len(buffer.getvalue())

    edit(saved, point)
    with pytest.raises(CheckpointError, match="evil.distcp: note.groups.0.betas: .*execute .*trusted=True"):
        load(saved)
    assert not target.exists()


def _chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _set_chunks(*chunks):
    def change(metadata):
        old = metadata.storage_data.pop(MetadataIndex("model.w", torch.Size([0, 0])))
        for chunk in chunks:
            metadata.storage_data[MetadataIndex("model.w", chunk.offsets)] = old
        metadata.state_dict_metadata["model.w"].chunks = list(chunks)

    return change


def _place(**fields):
    def change(metadata):
        index = MetadataIndex("model.w", torch.Size([0, 0]))
        metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **fields)

    return change


def _move_beside(metadata):
    one, other = (MetadataIndex(name, torch.Size([0] * n)) for name, n in (("model.w", 2), ("model.b", 1)))
    offset = metadata.storage_data[other].offset + 8
    metadata.storage_data[one] = dataclasses.replace(metadata.storage_data[one], offset=offset)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set_chunks(), r"the chunks of model.w hold 0 elements of 12"),
        (_set_chunks(_chunk([0, 0], [2, 4])), r"the chunks of model.w hold 8 elements of 12"),
        (_set_chunks(_chunk([0, 0], [3, 4]), _chunk([1, 0], [1, 4])), "hold 16 elements of 12"),
        (_set_chunks(_chunk([0, 0], [2, 4]), _chunk([1, 0], [1, 4])), "overlap and leave gaps"),
        (_set_chunks(_chunk([1, 0], [3, 4])), r"of \[3, 4\] at \[1, 0\] reach beyond \[3, 4\]"),
        (_place(length=10**9), "would have bytes .* which has .* bytes"),
        (_place(offset=-1), "would have bytes -1"),
        (_place(length=0), "would have bytes"),
        (_move_beside, "would have bytes .*; model.* before it ends at"),
        (_place(offset=0.5), "the place of model.w is 0.5"),
        (_place(relative_path="../secret"), r"points to the file '\.\./secret', which is not inside the checkpoint"),
        (_place(relative_path="gone.distcp"), "gone.distcp: No such file"),
        (
            lambda m: m.state_dict_metadata.pop("model.w"),
            "it gives a place for .'model.w at .*, but does not describe it",
        ),
        (lambda m: m.storage_data.pop(MetadataIndex("note.step")), "it gives no place for note.step"),
        (lambda m: m.planner_data.update({"model.w": ("model", "x")}), "the path of model.w is"),
        (lambda m: m.planner_data.update({"model.z": ("model", "z")}), "it has a path, but no entry, for"),
        (lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([4, 4])), "hold 12 elements of 16"),
        (lambda m: setattr(m, "state_dict_metadata", []), "its entries are a list"),
    ],
)
def test_contradictions_are_named(saved, change, reason):
    edit(saved, change)
    with pytest.raises(CorruptFile, match=reason):
        read_table(saved)


def test_a_dtype_that_is_not_that_of_the_bytes(saved):
    edit(saved, lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", torch.int32))
    with pytest.raises(CorruptFile, match=r"metadata describes .*torch.int32, got \[3, 4\] of torch.float32"):
        load(saved)


def test_names_that_may_share_bytes(saved):
    def tie(metadata):
        described, places = metadata.state_dict_metadata, metadata.storage_data
        described["model.v"], metadata.planner_data["model.v"] = described["model.w"], ("model", "v")
        places[MetadataIndex("model.v", torch.Size([0, 0]))] = places[MetadataIndex("model.w", torch.Size([0, 0]))]

    edit(saved, tie)
    assert torch.equal(load(saved)["model.v"], torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nonsense", pickle.dumps({"a": 1}), pickle.dumps(None), None])
def test_tables_that_are_none_are_named(saved, content):
    (saved / ".metadata").unlink() if content is None else (saved / ".metadata").write_bytes(content)
    reason = "No such file" if content is None else ".*not the metadata of a checkpoint"
    with pytest.raises(CorruptFile, match=rf"\.metadata: {reason}"):
        read_table(saved)
