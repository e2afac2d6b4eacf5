"""The table of a DCP directory and its entries: nothing is executed, and what contradicts itself is refused by name."""

import dataclasses
import io
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.formats.dcp import DcpTensors, read_table
from fsdp2x.io.formats.safe_files import OpenFiles


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


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


def test_what_dcp_writes_is_read(saved):
    found = load(saved)
    assert torch.equal(found["model.w"], torch.arange(12.0).view(3, 4))
    assert torch.equal(found["model.b"], torch.ones(2, dtype=torch.bfloat16))
    assert found["note.groups.0.betas"] == (0.9, 0.95) and found["note.groups.0.foreach"] is None
    table = read_table(saved)
    assert table.paths["note.groups.0.lr"] == ("note", "groups", 0, "lr")
    assert table.entries["model.w"] == ((3, 4), torch.float32) and table.entries["note.step"] is None


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
    with pytest.raises(
        CheckpointError, match="evil.distcp: note.groups.0.betas: reading it would execute .*trusted=True"
    ):
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
        (_set_chunks(_chunk([0, 0], [2, 4]), _chunk([1, 0], [1, 4])), "overlap, and leave a part out"),
        (_set_chunks(_chunk([1, 0], [3, 4])), r"of \[3, 4\] at \[1, 0\] reach beyond \[3, 4\]"),
        (_place(length=10**9), "would lie at .* which has .* bytes"),
        (_place(offset=-1), "would lie at -1"),
        (_place(length=0), "would lie at"),
        (_move_beside, "would lie at .* before it lies model"),
        (_place(offset=0.5), "the place of model.w is 0.5"),
        (_place(relative_path="../secret"), r"points to the file '\.\./secret', which is not inside the checkpoint"),
        (_place(relative_path="gone.distcp"), "gone.distcp: No such file"),
        (lambda m: m.state_dict_metadata.pop("model.w"), "it says where .'model.w at .* is, but not what"),
        (lambda m: m.storage_data.pop(MetadataIndex("note.step")), "it does not say where note.step is"),
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
    with pytest.raises(CorruptFile, match=r"holds \[3, 4\] of torch.float32 where .metadata describes .*torch.int32"):
        load(saved)


def test_names_that_may_share_bytes(saved):
    def tie(metadata):
        described, places = metadata.state_dict_metadata, metadata.storage_data
        described["model.v"], metadata.planner_data["model.v"] = described["model.w"], ("model", "v")
        places[MetadataIndex("model.v", torch.Size([0, 0]))] = places[MetadataIndex("model.w", torch.Size([0, 0]))]

    edit(saved, tie)
    assert torch.equal(load(saved)["model.v"], torch.arange(12.0).view(3, 4))
    read_table(saved, tied=[{"model.v", "model.w"}])
    with pytest.raises(CorruptFile, match="model.v and model.w have one place"):
        read_table(saved, tied=[])


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nonsense", pickle.dumps({"a": 1}), pickle.dumps(None), None])
def test_tables_that_are_none_are_named(saved, content):
    (saved / ".metadata").unlink() if content is None else (saved / ".metadata").write_bytes(content)
    reason = "No such file" if content is None else ".*not the metadata of a checkpoint"
    with pytest.raises(CorruptFile, match=rf"\.metadata: {reason}"):
        read_table(saved)


def test_a_cut_file_is_named(saved):
    (data,) = saved.glob("*.distcp")
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(CorruptFile, match=rf"would lie at .* of {data.name}, which has"):
        load(saved)
