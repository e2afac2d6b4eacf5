"""Copies past the caches: any size and alignment, and nothing beyond the target."""

import pytest
import torch

from fsdp2x.base.native import _C


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 100_003])
@pytest.mark.parametrize(("into", "out_of"), [(0, 0), (1, 0), (0, 3), (17, 5)])
def test_bytes_arrive(size, into, out_of):
    source = torch.randint(0, 256, (size + out_of,), dtype=torch.uint8)[out_of:]
    memory = torch.zeros(size + into + 64, dtype=torch.uint8)
    weights = torch.randn(7)
    copy = torch.empty(7)
    _C.stream_copies([memory[into : into + size], copy], [source, weights])
    assert torch.equal(memory[into : into + size], source) and torch.equal(copy, weights)
    assert not memory[:into].any() and not memory[into + size :].any()


@pytest.mark.parametrize(
    ("targets", "sources", "message"),
    [
        ([torch.empty(3)], [], "as many targets"),
        ([torch.empty(3)], [torch.empty(4)], "differ in size"),
        ([torch.empty(3, 3).t()], [torch.empty(3, 3)], "contiguous"),
        ([torch.empty(3)], [torch.empty(3, device="meta")], "CPU"),
    ],
)
def test_refuses(targets, sources, message):
    with pytest.raises(RuntimeError, match=message):
        _C.stream_copies(targets, sources)
