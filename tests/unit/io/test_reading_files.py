"""JSON, plain trees, pipes instead of files, headers of safetensors: limits, and a sentence for each mistake."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

import damage
from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.formats.safe_files import OpenFiles, check_plain, open_regular, parse_json, read_json
from fsdp2x.io.hf.files import read_safetensors


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "got list, expected a mapping"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        (b"\xff\xfe{}", "not UTF-8 text"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}", "nested deeper than 100 levels"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_json(tmp_path, content, reason):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match=f"x.json: .*{reason}"):
        read_json(path)


def test_json_that_is_right_is_read():
    assert parse_json('{"a": [1, 2.5, null], "b": {"c": "d"}}', "x") == {"a": [1, 2.5, None], "b": {"c": "d"}}
    assert parse_json('{"a": 1, "a": 2}', "x", unique=False) == {"a": 2}


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (damage.looped(), "holds itself"),
        (damage.laughs(), "references make more than"),
        (damage.nested(), "deeper than"),
    ],
)
def test_trees_without_an_end(tree, reason):
    with pytest.raises(CorruptFile, match=f"where: damaged, .*{reason}"):
        check_plain({"x": (tree,)}, "where")
    shared = list(range(100))
    check_plain({"x": [shared] * 1000, "y": {"z": (shared, {1, 2})}}, "where")


@pytest.mark.parametrize("kind", ["pipe", "folder", "gone", "loop", "dangling"])
def test_what_is_no_file_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.symlink_to("x" if kind == "loop" else "y")
    with pytest.raises(CorruptFile, match=f"{path}: "):
        open_regular(path)


def test_many_files_are_not_open_at_once(tmp_path):
    for index in range(8):
        (tmp_path / str(index)).write_bytes(bytes([index] * 4))
    before = len(os.listdir("/proc/self/fd"))
    with OpenFiles(most=3) as files:
        for index in [*range(8), *range(8)]:
            target = bytearray(2)
            files.fill(tmp_path / str(index), 1, memoryview(target))
            assert target == bytes([index] * 2)
            assert len(os.listdir("/proc/self/fd")) <= before + 3
        with pytest.raises(CorruptFile, match="ends 3 bytes before a tensor does"):
            files.fill(tmp_path / "0", 3, memoryview(bytearray(4)))
    assert len(os.listdir("/proc/self/fd")) == before


TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.zeros(0, 4)}


def with_header(path, header):
    """The data of `TENSORS` behind another header."""
    content = path.read_bytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + int.from_bytes(content[:8], "little") :])


def header_of(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def test_safetensors_as_its_library_reads_them(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    with OpenFiles() as files:
        for name, tensor in read_safetensors(files, path).items():
            assert torch.equal(tensor.whole(), TENSORS[name])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h.pop("a"), "begins at|its tensors end at"),
        (lambda h: h["a"].update(shape=[2, 2]), "has 16 bytes, its place is"),
        (lambda h: h["a"].update(dtype="F16"), "has 12 bytes, its place is"),
        (lambda h: h["a"].update(dtype="U3"), "is of type U3, which cannot be loaded"),
        (lambda h: h["a"].update(shape=[-2, -3]), "has the shape"),
        (lambda h: h["a"].update(shape=[2.0, 3]), "has the shape"),
        (lambda h: h["a"].update(data_offsets=[10**30, 10**30 + 24]), "begins at"),
        (lambda h: h["a"].update(more=1), "is not described by dtype, shape and data_offsets"),
        (lambda h: h.update(d=dict(h["a"])), "begins at"),
        (lambda h: h.update(a=[1]), "is not described"),
    ],
)
def test_headers_that_contradict_the_file(tmp_path, change, reason):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    header = header_of(path)
    change(header)
    with_header(path, header)
    with OpenFiles() as files, pytest.raises(CheckpointError, match=f"x.safetensors: .*({reason})"):
        read_safetensors(files, path)


def test_a_changed_header_is_refused_wherever_the_library_refuses_it(tmp_path):
    """And what is read is what the library reads."""
    path = tmp_path / "x.safetensors"
    counts = {"refused": 0, "read": 0}
    for seed in range(150):
        save_file(TENSORS, path)
        header, change = damage.change(random.Random(seed), header_of(path), json_only=True)
        try:
            with_header(path, header)
        except RecursionError:
            continue
        try:
            theirs = load_file(path)
        except Exception:
            theirs = None
        with OpenFiles() as files:
            try:
                ours = {name: source.whole() for name, source in read_safetensors(files, path).items()}
            except CheckpointError:
                counts["refused"] += 1
                continue
        assert theirs is not None, change.what
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours), change.what
        counts["read"] += 1
    assert min(counts.values()) > 10, counts
