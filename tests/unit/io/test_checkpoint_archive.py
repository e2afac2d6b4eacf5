"""Archives that torch reads, checksums of concatenations, and the sinks that write them."""

import io
import os
import random
import zipfile
import zlib

import pytest
import torch

from fsdp2x.io.checkpoint.archive import Archive, Stored
from fsdp2x.io.checkpoint.disk import BLOCK_BYTES, Sink, bytes_of, combine
from fsdp2x.io.checkpoint.forms import runs
from fsdp2x.io.checkpoint.plan import Chunk

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]


def test_checksums_of_parts_combine():
    generator = random.Random(0)
    for _ in range(50):
        one = generator.randbytes(generator.randrange(0, 300))
        other = generator.randbytes(generator.randrange(0, 70000))
        assert combine(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)


def tensors_of_all_kinds():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(7, 5, generator=generator).to(dtype) for dtype in DTYPES]
    return [*tensors, torch.tensor(3.5), torch.empty(0, 4), torch.randn(1 << 20, generator=generator)]


def test_torch_reads_what_is_written(tmp_path):
    tensors = tensors_of_all_kinds()
    stored = [Stored(key, t.dtype, tuple(t.shape)) for key, t in enumerate(tensors)]
    archive = Archive(
        {"tensors": stored, "tied": [stored[0], stored[0]], "note": ("plain", 1), "own": torch.arange(3)}, stored
    )
    path = tmp_path / "file.pt"
    sources = [bytes_of(t) for t in tensors]
    sink = Sink(path)
    archive.write(sink, sources)
    sink.close()
    content = path.read_bytes()
    assert (len(content), zlib.crc32(content)) == (archive.num_bytes, sink.crc)
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
    for loaded in (torch.load(path, weights_only=True), torch.load(path, weights_only=True, mmap=True)):
        for mine, theirs in zip(tensors, loaded["tensors"], strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            assert torch.equal(bytes_of(mine), bytes_of(theirs))
        assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr() == loaded["tensors"][0].data_ptr()
        assert loaded["note"] == ("plain", 1) and loaded["own"].tolist() == [0, 1, 2]


def test_more_than_4_gib_in_a_sparse_file(tmp_path):
    stored = [Stored(0, torch.float32, (5 << 28,)), Stored(1, torch.int64, (3,))]
    archive = Archive(stored, stored)
    assert archive.data_offsets[1] > 5 << 30
    path = tmp_path / "sparse.pt"
    with open(path, "wb") as file:
        for record in archive.records:
            file.seek(record.header_offset)
            file.write(record.header)
            if record.content is not None:
                file.write(record.content)
            elif record.num_bytes < 100:
                file.write(torch.tensor([7, 8, 9]).numpy().tobytes())
            file.seek(record.offset + record.num_bytes)
            file.write(record.descriptor(0))
        file.seek(archive.directory_offset)
        file.write(archive.directory([0] * len(archive.records)))
    one, other = torch.load(path, weights_only=True, mmap=True)
    assert one.numel() == 5 << 28 and one[-1] == 0
    assert other.tolist() == [7, 8, 9]


@pytest.mark.parametrize("direct", [True, False])
def test_sinks_cross_blocks(tmp_path, monkeypatch, direct):
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    pieces = [os.urandom(size) for size in (1, BLOCK_BYTES - 5, 4096, BLOCK_BYTES * 2 + 17, 3)]
    sink = Sink(tmp_path / "file")
    for index, piece in enumerate(pieces):
        if index % 2:
            assert sink.data(torch.frombuffer(bytearray(piece), dtype=torch.uint8)) == zlib.crc32(piece)
        else:
            sink.put(piece)
    sink.close()
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(pieces)
    assert sink.crc == zlib.crc32(content)


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [
        ((6, 4), (2, 0), (3, 4)),
        ((6, 4), (0, 1), (6, 2)),
        ((3, 4, 5), (0, 2, 0), (3, 2, 5)),
        ((3, 4, 5), (1, 2, 1), (2, 2, 3)),
        ((7,), (5,), (2,)),
        ((), (), ()),
        ((4, 3), (4, 0), (0, 3)),
        ((2, 3, 1, 4), (0, 1, 0, 0), (2, 1, 1, 4)),
    ],
)
def test_runs_of_a_chunk_are_its_bytes(shape, offsets, sizes):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].contiguous()
    written = bytearray(whole.numel() * 4)
    source = bytes(bytes_of(part).tolist())
    for begin, start, num_bytes in runs(Chunk("x", torch.int32, shape, offsets, sizes)):
        written[begin : begin + num_bytes] = source[start : start + num_bytes]
    expected = torch.zeros_like(whole)
    expected[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = part
    assert bytes(written) == io.BytesIO(expected.numpy().tobytes()).getvalue()
