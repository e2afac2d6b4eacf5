"""The manifest: another model, a missing or a damaged file is named before anything is loaded."""

import json

import pytest
import torch

from fsdp2x.base.failures import CorruptFile
from fsdp2x.checkpoint import CheckpointError
from fsdp2x.io.checkpoint.directory import PARTS_FILE, rng_file
from fsdp2x.io.checkpoint.manifest import (
    check_entries,
    describe_entries,
    describe_files,
    file_names,
    make_manifest,
    model_layout,
    read_manifest,
    tied_names,
    verify_files,
    write_manifest,
)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3))


ENTRIES = {"model.embed.weight": ((5, 4), torch.float32), "optimizer.param_groups.0.lr": None}


@pytest.fixture
def folder(tmp_path):
    _, aliases = model_layout(Tied())
    (tmp_path / "data.bin").write_bytes(bytes(range(200)))
    for name in (".metadata", PARTS_FILE, rng_file(0), rng_file(1)):
        (tmp_path / name).write_text("{}")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    manifest = make_manifest(step=7, world_size=2, mesh=[], aliases=aliases, model_type="tied")
    manifest |= {"parts": ["data"], "entries": describe_entries(ENTRIES), "num_entries": [2, 1]}
    write_manifest(tmp_path, manifest, describe_files(tmp_path, file_names(tmp_path)))
    return tmp_path


def test_ties_are_listed_once_and_wrappers_leave_no_trace():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Tied()
    model.norm = checkpoint_wrapper(model.norm)
    tensors, aliases = model_layout(model)
    assert set(tensors) == {"embed.weight", "norm.weight", "norm.bias", "count"}
    assert aliases == {"head.weight": "embed.weight"}


def test_round_trip(folder):
    manifest = read_manifest(folder)
    assert (manifest["step"], manifest["world_size"], manifest["tied"]) == (7, 2, {"head.weight": "embed.weight"})
    own = {".metadata", PARTS_FILE, rng_file(0), rng_file(1)}
    assert set(manifest["files"]) == {"data.bin", "hf/config.json", *own}
    assert tied_names(manifest) == [{"model.embed.weight", "model.head.weight"}]
    for rank in range(3):
        verify_files(folder, manifest, rank=rank, world_size=3)


def test_a_changed_file_is_named(folder):
    (folder / "data.bin").write_bytes(bytes(range(199)) + b"\x00")
    with pytest.raises(CorruptFile, match=r"data\.bin: damaged, its contents are not those"):
        verify_files(folder, read_manifest(folder))


def _write(text):
    return lambda folder: (folder / "manifest.json").write_text(text)


def _change(change):
    def write(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return write


@pytest.mark.parametrize(
    ("hurt", "reason"),
    [
        (_write("{"), "manifest.json: damaged, not valid JSON"),
        (_write("[]"), "manifest.json: got list, expected a mapping"),
        (_change(lambda m: m.update(format=99)), "manifest.json: format 99, this version of fsdp2x reads format 3"),
        (_change(lambda m: m.update(format=2)), "format 2, .* reads format 3; the version that wrote it reads it"),
        (_change(lambda m: m["files"].update({"x" * 5000: {"bytes": 1, "crc32": 1}})), "xxx: missing, .* with 1 bytes"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: No such file"),
        (
            lambda folder: (folder / "data.bin").write_bytes(b""),
            r"data\.bin: damaged, got 0 bytes, .* says 200",
        ),
        (lambda folder: (folder / "data.bin").unlink(), r"data\.bin: missing"),
    ],
)
def test_what_is_no_manifest_or_lacks_files_is_named(folder, hurt, reason):
    hurt(folder)
    with pytest.raises(CheckpointError, match=reason) as error:
        read_manifest(folder)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m["files"]["data.bin"].pop("bytes"), "its files are not described"),
        (lambda m: m["files"]["data.bin"].update(crc32=-1), "its files are not described"),
        (lambda m: m["files"].update({"../secret": dict(m["files"]["data.bin"])}), "its files are not described"),
        (lambda m: m["files"].update({"/etc/passwd": dict(m["files"]["data.bin"])}), "its files are not described"),
        (lambda m: m["files"].clear(), "it does not list .metadata, rng-00000.json, rng-00001.json, trainer.pt"),
        (lambda m: m["files"].pop("rng-00001.json"), "it does not list rng-00001.json"),
        (lambda m: m.update(world_size=3), "num_entries is"),
        (lambda m: m.update(world_size=True), "world_size is True"),
        (lambda m: m.update(world_size=0, num_entries=[]), "world_size is 0"),
        (lambda m: m.update(step=-1), "step is -1"),
        (lambda m: m.update(step=float("nan")), "step is nan"),
        (lambda m: m.update(form="whole"), "form is whole"),
        (lambda m: m.update(form=["full"]), "form is"),
        (lambda m: m.update(tied={"a": 3}), "tied is"),
        (lambda m: m.update(layouts=[]), "layouts is"),
        (lambda m: m["entries"]["model.embed.weight"].update(shape=[5, "4"]), "entries is"),
        (lambda m: m.pop("entries"), "entries is None"),
        (lambda m: m.pop("format"), "format is None"),
    ],
)
def test_a_manifest_that_says_what_none_can_say(folder, change, reason):
    _change(change)(folder)
    with pytest.raises(CorruptFile, match=f"manifest.json: .*{reason}"):
        read_manifest(folder)


def test_entries_are_counted_and_compared(folder):
    manifest = read_manifest(folder)
    whole = {**ENTRIES, "model.head.weight": ENTRIES["model.embed.weight"]}
    check_entries(folder, manifest, whole)
    check_entries(folder, manifest, ENTRIES, rank=0)
    check_entries(folder, manifest, {"optimizer.param_groups.0.lr": None}, rank=1)
    for wrong, reason in (
        (ENTRIES, "it lacks model.head.weight"),
        ({**whole, "model.x": None}, "model.x is a value, the manifest says nothing"),
        ({**whole, "model.embed.weight": ((4, 5), torch.float32)}, r"is .*\[4, 5\].*, the manifest says .*\[5, 4\]"),
        ({**whole, "model.embed.weight": ((5, 4), torch.float16)}, "float16.*, the manifest says .*float32"),
        ({**whole, "model.embed.weight": None}, "is a value, the manifest says"),
        ({**whole, "optimizer.param_groups.0.lr": ((), torch.float32)}, "the manifest says a value"),
    ):
        with pytest.raises(CorruptFile, match=reason):
            check_entries(folder, manifest, wrong)
    with pytest.raises(CorruptFile, match="it lacks model.embed.weight"):
        check_entries(folder, manifest, {"optimizer.param_groups.0.lr": None}, rank=0)
