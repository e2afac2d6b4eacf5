"""The folder of checkpoints and its manifest: a whole checkpoint is found whatever the kill, and damage is named."""

import json
import os
import shutil

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import damage
from fsdp2x.base.failures import CorruptFile
from fsdp2x.checkpoint import CheckpointError
from fsdp2x.io.checkpoint import directory
from fsdp2x.io.checkpoint.directory import (
    PARTS_FILE,
    prepare,
    publish,
    repair,
    resolve,
    retain,
    step_name,
    whole_checkpoints,
)
from fsdp2x.io.checkpoint.manifest import (
    describe_files,
    file_names,
    make_manifest,
    model_layout,
    read_manifest,
    write_manifest,
)
from fsdp2x.io.checkpoint.sources import verify_folder
from fsdp2x.io.formats.safe_files import OpenFiles


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours handles it."""


def save(root, step, content):
    temporary = prepare(root, step)
    (temporary / "manifest.json").write_text(content)
    return publish(root, step)


def content_of(root):
    return (resolve(root) / "manifest.json").read_text()


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_the_output_folder_of_a_run_works_too(tmp_path):
    save(tmp_path / "checkpoints", 5, "five")
    assert content_of(tmp_path) == "five"


@pytest.mark.parametrize("step", [2, 1])  # a new step, and one that replaces itself
def test_a_kill_at_any_system_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch, step):
    calls = 0
    kill_at = None

    def counted(original):
        def call(*args, **keywords):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                raise Killed
            return original(*args, **keywords)

        return call

    for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    seen = set()
    for kill_at in range(1, 30):
        root = tmp_path / str(kill_at)
        calls = -1000
        save(root, 1, "old")
        calls = 0
        try:
            save(root, step, "new")
        except Killed:
            pass
        else:
            break
        found = content_of(root)
        seen.add(found)
        calls = -1000
        repair(root)
        assert content_of(root) == found
        assert all(name == "latest" or name.startswith("step-") for name in names(root))
        save(root, 3, "next")
        assert content_of(root) == "next"
    assert seen == {"old", "new"}
    assert kill_at > 5


def test_retention_after_going_back_keeps_the_new_run(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, "first run")
    save(tmp_path, 15, "second run")  # resumed from step 10
    retain(tmp_path, 2)
    assert content_of(tmp_path) == "second run"
    assert [path.name for path in whole_checkpoints(tmp_path)] == [step_name(10), step_name(15)]


def test_a_kill_while_deleting_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, str(step))

    def killed(path, *args, **keywords):
        (path / "manifest.json").unlink()
        raise Killed

    monkeypatch.setattr(directory.shutil, "rmtree", killed)
    with pytest.raises(Killed):
        retain(tmp_path, 1)
    assert [path.name for path in whole_checkpoints(tmp_path)] == [step_name(2)]
    monkeypatch.undo()
    repair(tmp_path)
    assert names(tmp_path) == ["latest", step_name(2)]


def test_what_a_kill_left_is_removed_and_said(tmp_path, caplog):
    save(tmp_path, 1, "one")
    with caplog.at_level("WARNING", logger="fsdp2x"):
        repair(tmp_path)
        assert not caplog.messages
        (prepare(tmp_path, 2) / "half").write_text("x")
        os.rename(tmp_path / step_name(1), tmp_path / f".old-{step_name(1)}")
        repair(tmp_path)
    removed, back = sorted(caplog.messages)
    assert removed == f"{tmp_path}/.tmp-{step_name(2)}: removed, because the save that wrote it was interrupted"
    assert back.startswith(f"{tmp_path}/{step_name(1)}: restored, ")
    assert names(tmp_path) == ["latest", step_name(1)] and content_of(tmp_path) == "one"


def test_what_is_no_checkpoint_is_told(tmp_path):
    for path, message in (
        (tmp_path / "nothing", "nothing: no such checkpoint"),
        (tmp_path, "is not an fsdp2x checkpoint: manifest.json is missing"),
        (tmp_path / "file", "expected the folder of a checkpoint, got a file"),
    ):
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match=message):
            resolve(path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match=r"latest: expected .*got '\.\./elsewhere'"):
        resolve(tmp_path)
    (tmp_path / "latest").write_text("step-000007\n")
    with pytest.raises(CheckpointError, match="step-000007: no such checkpoint"):
        resolve(tmp_path)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3))


CHUNKS = [
    {"offsets": [0, 0], "sizes": [3, 4], "crc32": 7, "file": "data.bin", "first_byte": 0},
    {"offsets": [3, 0], "sizes": [2, 4], "crc32": 8, "file": "data.bin", "first_byte": 152},
]
WEIGHT = "model.embed.weight"
TENSORS = {WEIGHT: {"path": ["model", "embed.weight"], "shape": [5, 4], "dtype": "float32", "chunks": CHUNKS}}


@pytest.fixture
def folder(tmp_path):
    _, aliases = model_layout(Tied())
    (tmp_path / "data.bin").write_bytes(bytes(range(200)))
    for name in (".metadata", PARTS_FILE):
        (tmp_path / name).write_text("{}")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    manifest = make_manifest(step=7, world_size=2, aliases=aliases)
    manifest |= {"tensors": TENSORS, "values": {"optimizer.lr": ["optimizer", "lr"]}}
    files = describe_files(tmp_path, file_names(tmp_path))
    write_manifest(tmp_path, {**manifest, "files": {**files, "data.bin": {"bytes": 200}}})
    return tmp_path


def test_ties_are_listed_once_and_wrappers_leave_no_trace():
    model = Tied()
    model.norm = checkpoint_wrapper(model.norm)
    tensors, aliases = model_layout(model)
    assert set(tensors) == {"embed.weight", "norm.weight", "norm.bias", "count"}
    assert aliases == {"head.weight": "embed.weight"}


def test_round_trip(folder):
    manifest = read_manifest(folder)
    assert (manifest["step"], manifest["world_size"], manifest["tied"]) == (7, 2, {"head.weight": "embed.weight"})
    assert set(manifest["files"]) == {"data.bin", "hf/config.json", ".metadata", PARTS_FILE}
    assert manifest["tensors"] == TENSORS and manifest["same_world"] is False
    (folder / "hf/config.json").write_text("[]")
    with pytest.raises(CorruptFile, match=r"hf/config.json: damaged, .* \(CRC-32 differs\)"):
        verify_folder(folder, OpenFiles(), manifest)


def flip(path, one, other):
    path.write_bytes(path.read_bytes().replace(one, other))


def _write(text):
    return lambda folder: (folder / "manifest.json").write_text(text)


def _change(change):
    def write(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(damage.sealed(manifest)))

    return write


@pytest.mark.parametrize(
    ("hurt", "reason"),
    [
        (_write("{"), "manifest.json: damaged, not valid JSON"),
        (_write("[]"), "manifest.json: expected a mapping, got list"),
        (
            _change(lambda m: m.update(format=99)),
            "manifest.json: format 99 .*, but this version of fsdp2x reads format 4",
        ),
        (_change(lambda m: m.update(format=2)), "format 2 .* reads format 4. Convert it with the version that wrote"),
        (
            _change(lambda m: m.update(format=3, form="per_rank")),
            r"format 3 \(per_rank\), .* fsdp2x convert --to sharded",
        ),
        (lambda folder: flip(folder / "manifest.json", b'"step": 7', b'"step": 5'), "crc32 is"),
        (_change(lambda m: m["files"].update({"x" * 5000: {"bytes": 1, "crc32": 1}})), "xxx: missing, .* with 1 bytes"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: No such file"),
        (
            lambda folder: (folder / "data.bin").write_bytes(b""),
            r"data\.bin: damaged, the manifest says 200 bytes, got 0",
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
        (lambda m: m["files"]["data.bin"].pop("bytes"), "it does not describe its files"),
        (lambda m: m["files"]["data.bin"].update(crc32=-1), "it does not describe its files"),
        (lambda m: m["files"].update({"../secret": dict(m["files"]["data.bin"])}), "it does not describe its files"),
        (lambda m: m["files"].update({"/etc/passwd": dict(m["files"]["data.bin"])}), "it does not describe its files"),
        (lambda m: m["files"].clear(), "files is {}"),
        (lambda m: m["files"].pop("trainer.pt"), "files is"),
        (lambda m: m["files"].pop("data.bin"), "tensors is"),
        (lambda m: m.update(same_world=True), "same_world is True"),
        (lambda m: m.update(world_size=True), "world_size is True"),
        (lambda m: m.update(world_size=0), "world_size is 0"),
        (lambda m: m.update(step=-1), "step is -1"),
        (lambda m: m.update(step=float("nan")), "step is nan"),
        (lambda m: m.update(form="whole"), "form is whole"),
        (lambda m: m.update(form=["full"]), "form is"),
        (lambda m: m.update(form="full"), "files is"),
        (lambda m: m.update(tied={"a": 3}), "tied is"),
        (lambda m: m.update(layouts=[]), "layouts is"),
        (lambda m: m.pop("tensors"), "tensors is None"),
        (lambda m: m.update(values={"a": ["b"]}), "values is"),
        (lambda m: m["tensors"][WEIGHT].update(shape=[5, "4"]), "tensors is"),
        (lambda m: m["tensors"][WEIGHT].update(shape=[6, 4]), "tensors is"),
        (lambda m: m["tensors"][WEIGHT].update(dtype="nn"), "tensors is"),
        (lambda m: m["tensors"][WEIGHT].update(path=["model", "x"]), "tensors is"),
        (lambda m: m["tensors"][WEIGHT]["chunks"].pop(), "tensors is"),
        (lambda m: m["tensors"][WEIGHT]["chunks"].append(CHUNKS[0]), "tensors is"),
        (lambda m: m["tensors"][WEIGHT]["chunks"][1].update(offsets=[2, 0]), "tensors is"),
        (lambda m: m["tensors"][WEIGHT]["chunks"][1].update(first_byte=180), "tensors is"),
        (lambda m: m["tensors"][WEIGHT]["chunks"][1].update(file="../secret"), "tensors is"),
        (lambda m: m["tensors"][WEIGHT]["chunks"][1].pop("crc32"), "tensors is"),
        (lambda m: m.pop("format"), "format is None"),
    ],
)
def test_a_manifest_that_says_what_none_can_say(folder, change, reason):
    _change(change)(folder)
    with pytest.raises(CorruptFile, match=f"manifest.json: .*{reason}"):
        read_manifest(folder)
