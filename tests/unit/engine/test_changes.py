"""A delta sends the elements whose bits differ in the wire's dtype, on any number of threads or a device."""

import pytest
import torch

from fsdp2x.base.native import _C
from testing_extension import testing

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.complex128)
NUMEL = 100_003  # in ranges of several threads, and blocks that are cast one by one
ODD = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1e-40])


@pytest.mark.parametrize("held_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.each_pair
def test_elements_whose_bits_differ(dtype, held_dtype):
    if dtype.is_complex != held_dtype.is_complex:
        pytest.skip("torch casts no complex numbers to real ones")
    torch.manual_seed(0)
    now = torch.randn(NUMEL).mul(40)
    now[torch.randint(NUMEL, (500,))] = ODD.repeat(100) if dtype.is_floating_point else 3.0
    now = now.to(dtype)
    held = now.to(held_dtype)
    chosen = torch.rand(NUMEL) < 0.01
    held[chosen] = torch.randn(int(chosen.sum())).mul(40).to(held_dtype)
    cast = now.to(held_dtype)
    bits = [one.view(torch.uint8).view(NUMEL, -1) for one in (cast, held)]
    expected = (bits[0] != bits[1]).any(1).nonzero().view(-1)
    threads = torch.get_num_threads()
    try:
        for num, on_host in ((1, None), (4, None), (1, testing.reference_kernels())):
            torch.set_num_threads(num)
            assert _C.take_changes(now, held.clone(), expected.numel() - 1, on_host) is None
            taken = held.clone()
            positions, values = _C.take_changes(now, taken, expected.numel(), on_host)
            assert torch.equal(positions, expected)
            assert torch.equal(values.view(torch.uint8), cast[expected].view(torch.uint8))
            assert torch.equal(taken.view(torch.uint8), cast.view(torch.uint8))
    finally:
        torch.set_num_threads(threads)


def test_what_it_cannot_compare_is_refused():
    flat = torch.zeros(6)
    for other in (flat[::2], flat.view(2, 3), torch.zeros(5), torch.zeros(6, device="meta")):
        with pytest.raises(RuntimeError, match="two flat, dense tensors"):
            _C.take_changes(other, flat, 6)
