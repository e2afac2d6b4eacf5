"""JSON, trees, safetensors, and sources: limits, a sentence for each mistake, and only the bytes that are needed."""

import itertools
import json
import os
import random

import pytest
import torch
import tqdm.auto
from safetensors.torch import load_file, save_file

import damage
from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.formats.safe_files import OpenFiles, check_plain, open_regular, parse_json, read_json
from fsdp2x.io.formats.tensors import Joined, LoadedTensor, Piece, Stacked, Turned, differ
from fsdp2x.io.hf.files import Checkpoint, read_safetensors, weight_files
from fsdp2x.io.hf.layout import ProgressBar, Writer, make_files, parse_size, plan_layout
from fsdp2x.io.names import TensorSpec


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected a mapping, got list"),
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
        (damage.looped(), "contains itself"),
        (damage.laughs(), "references expand it to more than"),
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
    """Replaces the header of a file with the data of `TENSORS`."""
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
    with pytest.raises(CheckpointError, match="no such folder or file"):
        weight_files(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds none of model.safetensors.index.json"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match="missing: gone.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "%s"}}' % ("x" * 5000))
    with pytest.raises(CheckpointError, match="names files that are missing: xxx") as error:
        weight_files(tmp_path)
    assert len(str(error.value)) < 1000
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="index.json: expected a mapping, got list"):
        weight_files(tmp_path)
    file = tmp_path / "cut.safetensors"
    save_file({"a": torch.zeros(100)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut.safetensors: not a complete"):
        Checkpoint([file])
    torch.save({"a": print}, tmp_path / "code.bin")
    with pytest.raises(CheckpointError, match="code.bin: .*refers to (__builtin__|builtins).print"):
        Checkpoint([tmp_path / "code.bin"])
    torch.save([torch.zeros(1)], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="list.bin: expected .*got list"):
        Checkpoint([tmp_path / "list.bin"])
    torch.save({"a": torch.zeros(1), "b": torch.eye(2).to_sparse()}, tmp_path / "sparse.bin")
    with pytest.raises(CheckpointError, match="sparse.bin: .*refers to torch._utils._rebuild_sparse"):
        Checkpoint([tmp_path / "sparse.bin"])
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.bin")
    torch.save({"a": torch.zeros(1)}, tmp_path / "y.bin")
    with pytest.raises(CheckpointError, match="y.bin: holds 'a', which another file"):
        Checkpoint([tmp_path / "x.bin", tmp_path / "y.bin"])


WRITTEN = {
    "a": torch.arange(5, dtype=torch.uint8),
    "b": torch.randn(3, 4),
    "c": torch.randn(2, 2).bfloat16(),
    "d": torch.tensor(1.5, dtype=torch.float64),
    "e": torch.zeros(0, 7),
    "f": torch.tensor([True, False, True]),
}
SPECS = [TensorSpec(name, tensor.shape, tensor.dtype) for name, tensor in WRITTEN.items()]


class Bar:
    def __init__(self, **options):
        self.options, self.num_bytes, self.is_open = options, 0, True

    def update(self, num_bytes):
        self.num_bytes += num_bytes

    def close(self):
        self.is_open = False


@pytest.mark.parametrize("limit", ["1GB", 60, 1])
def test_read_by_the_library(tmp_path, monkeypatch, capfd, limit):
    ProgressBar(100, "Loading weights").close()
    assert capfd.readouterr() == ("", ""), "shown where nobody looks"
    bars = []
    monkeypatch.setattr(tqdm.auto, "tqdm", lambda **options: bars.append(Bar(**options)) or bars[-1])
    layout = plan_layout(SPECS, limit, "model")
    make_files(tmp_path, layout)
    with Writer(tmp_path, layout) as writer:
        for name, tensor in WRITTEN.items():
            assert layout.place[name][1] % tensor.element_size() == 0
            writer.write(name, tensor)
    (bar,) = bars
    assert bar.num_bytes == sum(tensor.nbytes for tensor in WRITTEN.values()) <= bar.options["total"]
    assert bar.options["disable"] is None and not bar.is_open
    read = {}
    for file in layout.files:
        part = load_file(tmp_path / file.name)
        assert limit == 1 or sum(t.numel() * t.element_size() for t in part.values()) <= parse_size(limit)
        read.update(part)
    assert set(read) == set(WRITTEN) and all(torch.equal(read[name], WRITTEN[name]) for name in WRITTEN)
    assert len(layout.files) == {"1GB": 1, 60: 2, 1: 6}[limit]
    if limit == "1GB":
        assert layout.index is None and layout.files[0].name == "model.safetensors"
    else:
        assert layout.index["weight_map"] == {name: layout.files[i].name for name, (i, _) in layout.place.items()}
        assert layout.files[0].name.startswith("model-00001-of-0000")


def test_sizes():
    assert [parse_size(size) for size in (7, "5GB", "1.5 KiB", "2mb")] == [7, 5 * 10**9, 1536, 2 * 10**6]
    for size in ("", "-1", "5 apples", 0, "GB"):
        with pytest.raises(ValueError, match="max_shard_size must be"):
            parse_size(size)


def test_refusals():
    with pytest.raises(ValueError, match="several weights .* as a"):
        plan_layout([SPECS[0], SPECS[0]], 100, "model")
    with pytest.raises(ValueError, match=r"safetensors cannot hold z \(torch.complex128\)"):
        plan_layout([TensorSpec("z", torch.Size([1]), torch.complex128)], 100, "model")
