"""The manifest: another model, a missing or a damaged file is named before anything is loaded."""

import json

import pytest
import torch

from fsdp2x.checkpoint import CheckpointError
from fsdp2x.checkpoint.manifest import (
    describe_files,
    file_names,
    make_manifest,
    model_layout,
    read_manifest,
    verify_files,
    write_manifest,
)


class Tied(torch.nn.Module):
    def __init__(self, width=4, extra=False):
        super().__init__()
        self.embed = torch.nn.Embedding(5, width)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3))
        if extra:
            self.last = torch.nn.Linear(2, 2)


@pytest.fixture
def folder(tmp_path):
    tensors, aliases = model_layout(Tied())
    (tmp_path / "data.bin").write_bytes(bytes(range(200)))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    manifest = make_manifest(step=7, world_size=2, mesh=[], tensors=tensors, aliases=aliases, model_type="tied")
    write_manifest(tmp_path, manifest, describe_files(tmp_path, file_names(tmp_path)))
    return tmp_path


def test_ties_are_listed_once():
    tensors, aliases = model_layout(Tied())
    assert set(tensors) == {"embed.weight", "norm.weight", "norm.bias", "count"}
    assert aliases == {"head.weight": "embed.weight"}


def test_wrappers_leave_no_trace_in_the_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Tied()
    plain = set(model_layout(model)[0])
    model.norm = checkpoint_wrapper(model.norm)
    assert set(model_layout(model)[0]) == plain


def test_round_trip(folder):
    manifest = read_manifest(folder)
    assert (manifest["step"], manifest["world_size"], manifest["tied"]) == (7, 2, {"head.weight": "embed.weight"})
    assert set(manifest["files"]) == {"data.bin", "hf/config.json"}
    for rank in range(3):
        verify_files(folder, manifest, rank=rank, world_size=3)


def test_damage_is_named(folder):
    (folder / "data.bin").write_bytes(bytes(range(199)) + b"\x00")
    with pytest.raises(CheckpointError, match=r"data\.bin: damaged, its contents are not those"):
        verify_files(folder, read_manifest(folder))
    (folder / "data.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"data\.bin: damaged, got 0 bytes, the manifest says 200"):
        read_manifest(folder)
    (folder / "data.bin").unlink()
    with pytest.raises(CheckpointError, match=r"data\.bin: missing"):
        read_manifest(folder)


def test_manifests_that_are_none_are_named(folder):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for text, message in (
        ("{", "manifest.json: damaged, not valid JSON"),
        ("[]", "manifest.json: not the manifest of a checkpoint"),
        (json.dumps({**manifest, "format": 99}), "manifest.json: format 99, this version of fsdp2x reads format 2"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_manifest(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="manifest.json: No such file"):
        read_manifest(folder)
