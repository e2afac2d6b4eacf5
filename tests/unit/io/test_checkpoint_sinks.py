"""Files that sinks write, as torch, torch DCP, and safetensors read them, and the checksums of their chunks."""

import itertools
import os
import random
import threading
import zlib
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.checkpoint.disk import BLOCK_BYTES, DirectFile, bytes_of
from fsdp2x.io.checkpoint.manifest import make_manifest, read_manifest
from fsdp2x.io.checkpoint.plan import Chunk, plan_alone
from fsdp2x.io.checkpoint.sinks import SINKS, Contents, DcpSink, FullSink, _archive_around, finish, write_chunks
from fsdp2x.io.checkpoint.sources import open_checkpoint, verify_folder
from fsdp2x.io.formats.dcp import DcpTensors
from fsdp2x.io.formats.safe_files import OpenFiles

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]


def tensors_of_all_kinds():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(7, 5, generator=generator).to(dtype) for dtype in DTYPES]
    tensors += [torch.tensor(3.5), torch.empty(0, 4), torch.randn(1 << 20, generator=generator)]
    return {f"model.{number}": tensor for number, tensor in enumerate(tensors)}


def same_bits(one, other):
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bytes_of(one), bytes_of(other))


def save(folder, form, tensors, values):
    paths = {name: tuple(name.split(".", 1)) for name in [*tensors, *values]}
    plan = plan_alone({**tensors, **values}, paths)
    manifest = make_manifest(step=3, world_size=1, aliases={}, form=form)
    contents = Contents(manifest, values, {"step": 3, "rng": [{}]})
    layout = SINKS[form].lay_out(folder, plan)
    data = [bytes_of(tensors[chunk.name]) for chunk in plan.mine]
    finish(folder, form, plan, contents, [write_chunks(SINKS[form], folder, 0, layout, plan.mine, data)])


@pytest.mark.parametrize("form", SINKS)
def test_tensors_of_all_kinds(tmp_path, form):
    tensors, values = tensors_of_all_kinds(), {"optimizer.lr": 0.5, "optimizer.betas": (0.9, 0.95)}
    save(tmp_path, form, tensors, values)
    manifest = read_manifest(tmp_path)
    with OpenFiles() as files:
        verify_folder(tmp_path, files, manifest)
        opened = open_checkpoint(tmp_path, files, manifest, rank=0)
        assert opened.values == values and opened.parts["step"] == 3
        assert opened.tensors.keys() == tensors.keys()
        assert all(same_bits(opened.tensors[name].whole(), tensors[name]) for name in tensors)
        if form == "full":
            read = load_file(tmp_path / "checkpoint.safetensors")
        else:
            read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            loaded = {**read, **dict.fromkeys(values)}
            dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
            assert {name: loaded[name] for name in values} == values
            table = DcpTensors(tmp_path, files)
            assert all(same_bits(table[name].whole(), tensors[name]) for name in tensors)
        assert all(same_bits(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_every_changed_byte_of_a_chunk_is_found(tmp_path, form):
    save(tmp_path, form, {"model.a": torch.arange(4.0).view(2, 2)}, {})
    manifest = read_manifest(tmp_path)
    (file,) = tmp_path.glob("*.safetensors" if form == "full" else "__0_0.distcp")
    content = file.read_bytes()
    with OpenFiles() as files:
        found = set()
        for place in range(len(content)):
            file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            try:
                verify_folder(tmp_path, files, manifest)
            except CorruptFile as error:
                if f"{file.name}: model.a at [0, 0]: damaged" in str(error):
                    found.add(place)
    assert len(found) == 4 * 4


def test_what_safetensors_cannot_hold_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot hold model.a \(torch.complex128\). Save with form='sharded'"):
        save(tmp_path, "full", {"model.a": torch.zeros(2, dtype=torch.complex128)}, {})


@pytest.mark.parametrize("kind", ["direct", "through the page cache", "without threads"])
def test_files_cross_blocks(tmp_path, monkeypatch, kind):
    if kind == "through the page cache":
        monkeypatch.setattr(os, "O_DIRECT", 0)
    if kind == "without threads":  # as in Python 3.12 once the main thread has ended
        monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError))
    pieces = [os.urandom(size) for size in (1, BLOCK_BYTES - 5, 4096, BLOCK_BYTES * 2 + 17, 3)]
    file = DirectFile(tmp_path / "file")
    for index, piece in enumerate(pieces):
        if index % 2:
            assert file.data(torch.frombuffer(bytearray(piece), dtype=torch.uint8)) == zlib.crc32(piece)
        else:
            file.put(piece)
    file.close()
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_an_archive_of_more_than_4_gib_is_laid_out(tmp_path):
    """Its bytes are a hole in a sparse file."""
    head, tail = _archive_around(torch.float32, (5 << 28,))
    with open(tmp_path / "sparse.pt", "wb") as file:
        file.write(head)
        file.seek(5 << 30, os.SEEK_CUR)
        file.write(tail)
    (loaded,) = [torch.load(tmp_path / "sparse.pt", weights_only=True, mmap=True)]
    assert loaded.numel() == 5 << 28 and loaded[-1] == 0


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_chunks_of_any_cut_make_up_their_tensors(tmp_path, form):
    rng = random.Random(0)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
        whole = torch.randn(shape)
        plan = plan_alone({"model.x": whole}, {"model.x": ("model", "x")})
        layout = SINKS[form].lay_out(folder, plan)
        cuts = [sorted({0, size, *rng.choices(range(size), k=2)}) for size in shape]
        written = []
        for rank, box in enumerate(itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))):
            part = whole[tuple(slice(*ends) for ends in box)].contiguous()
            chunk = Chunk("model.x", whole.dtype, shape, tuple(first for first, _ in box), tuple(part.shape))
            written.append(write_chunks(SINKS[form], folder, rank, layout, [chunk], [bytes_of(part)]))
            assert written[-1][0][0].entry["crc32"] == zlib.crc32(part.numpy().tobytes())
        manifest = make_manifest(step=1, world_size=1, aliases={}, form=form)
        metadata = plan.metadata.state_dict_metadata["model.x"]
        metadata.chunks = [
            type(metadata.chunks[0])(torch.Size(one.entry["offsets"]), torch.Size(one.entry["sizes"]))
            for (one,), _ in written
        ]
        finish(folder, form, plan, Contents(manifest), written)
        manifest = read_manifest(folder)
        with OpenFiles() as files:
            sources = [open_checkpoint(folder, files, manifest).tensors["model.x"]]
            sources += [DcpTensors(folder, files)["model.x"]] if form == "sharded" else []
            for source in sources:
                assert torch.equal(source.whole(), whole)
                first = [rng.randrange(size) for size in shape]
                out = torch.empty([rng.randrange(1, size - at + 1) for at, size in zip(first, shape, strict=True)])
                source.read(first, out)
                ends = [slice(at, at + size) for at, size in zip(first, out.shape, strict=True)]
                assert torch.equal(out, whole[tuple(ends)])
            verify_folder(folder, files, manifest)


def test_sinks_without_chunks_make_no_file(tmp_path):
    for sink in (DcpSink, FullSink):
        assert write_chunks(sink, tmp_path, 0, None, [], []) == ([], {})
    assert not list(tmp_path.iterdir())
