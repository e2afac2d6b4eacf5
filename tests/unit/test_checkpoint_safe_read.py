"""Reading executes nothing: pickles that call, point elsewhere or hold foreign objects are refused by name."""

import io
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fsdp2x.checkpoint import CheckpointError
from fsdp2x.checkpoint.safe_read import SafePlanner, SafeReader, read_metadata


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
    state = {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}, "note": None}
    state["note"] = {"groups": [{"lr": 0.0, "betas": (0, 0), "params": [], "foreach": True}], "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=True)
    return state


def test_what_dcp_writes_is_read(saved):
    state = load(saved)
    assert torch.equal(state["model"]["w"], torch.arange(12.0).view(3, 4))
    assert torch.equal(state["model"]["b"], torch.ones(2, dtype=torch.bfloat16))
    assert state["note"] == note()


def test_a_pickle_that_calls_is_refused_unexecuted(saved, tmp_path):
    target = tmp_path / "made"
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(target)))
    with pytest.raises(
        CheckpointError, match=r"\.metadata: .* it refers to (posix|nt)\.mkdir, which no checkpoint needs"
    ):
        read_metadata(saved)
    with pytest.raises(CheckpointException):
        load(saved)
    assert not target.exists()
    pickle.loads((saved / ".metadata").read_bytes())  # the attack itself works: plain pickle would have run it
    assert target.is_dir()


def test_a_call_hidden_inside_real_metadata_is_refused(saved, tmp_path):
    target = tmp_path / "made"
    metadata = read_metadata(saved)
    metadata.planner_data = {"x": Evil(target)}
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="mkdir"):
        read_metadata(saved)
    assert not target.exists()


def test_an_entry_that_calls_is_refused_unexecuted(saved, tmp_path):
    target = tmp_path / "made"
    metadata = read_metadata(saved)
    (index,) = [index for index in metadata.storage_data if index.fqn == "note.groups.0.betas"]
    buffer = io.BytesIO()
    torch.save(Evil(target), buffer)
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "evil.distcp", 0, len(buffer.getvalue())
    (saved / "evil.distcp").write_bytes(buffer.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CheckpointException,
        match="evil.distcp: reading note.groups.0.betas or a neighbour would execute .*trusted=True",
    ):
        load(saved)
    assert not target.exists()


def test_files_outside_the_checkpoint_are_refused(saved, tmp_path):
    metadata = read_metadata(saved)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"points to the file '\.\./secret', which is not inside the checkpoint"):
        read_metadata(saved)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nonsense", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_metadata_that_is_none_is_named(saved, content):
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: not the metadata of a checkpoint"):
        read_metadata(saved)


def test_missing_and_cut_files_are_named(saved):
    (data,) = saved.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointException, match=f"{data.name}: damaged"):
        load(saved)
    data.unlink()
    with pytest.raises(CheckpointException, match=f"{data.name}: No such file"):
        load(saved)
    with pytest.raises(CheckpointError, match=r"\.metadata: No such file"):
        read_metadata(Path("/no/such"))
