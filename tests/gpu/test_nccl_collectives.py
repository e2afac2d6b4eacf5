"""One GPU: every NCCL collective of the package, over a group of this rank alone, with each of its backends.

A single rank gets back what it sent, so zeros, another dtype, and late values are noticed.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from fsdp2x.base import torch_private
from fsdp2x.lifecycle import transport_choice
from fsdp2x.sharding import transport
from harness import distributed
from one_gpu import device_of, each_backend, skipped_without_windows

pytestmark = pytest.mark.shows("collectives")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GATHERS = {"ProcessGroupNCCL": "grouped", "ProcessGroupNCCL2": "in turn"}


@contextlib.contextmanager
def alone(place: str, backend: str) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    device = torch.device(device_of(place), 0 if place == "cuda" else None)
    group = dist.new_group([0], backend=backend, use_local_synchronization=True)
    try:
        yield group, device
    finally:
        dist.destroy_process_group(group)


def values(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns nonzero numbers that every dtype holds."""
    return (torch.arange(numel, device=device) % 61 + 1).to(dtype)


@distributed(world_sizes=(1,), timeout=120)
@each_backend
def test_gathers(ctx, place, backend):
    """Gathers to other memory and in place, alone and as a group of skewed sizes."""
    with alone(place, backend) as (group, device):
        for dtype in (*DTYPES, torch.uint8):
            source = values(70003, dtype, device)
            output = torch.zeros_like(source)
            transport._all_gather_now(group, output, source)
            assert torch.equal(output, source), dtype
            transport._all_gather_now(group, output, output)
            assert torch.equal(output, source), f"{dtype} in place"
            sizes = (1, 8, 1000, 300_000, 7, 64, 4096, 1_000_003)
            sources = [values(size, dtype, device) for size in sizes for _ in range(3)]
            outputs = [one.clone() if i % 3 else torch.zeros_like(one) for i, one in enumerate(sources)]
            inputs = [outputs[i] if i % 3 == 1 else one for i, one in enumerate(sources)]
            transport._all_gather_group(group, outputs, inputs)
            for one, other in zip(outputs, sources, strict=True):
                assert torch.equal(one, other), f"{dtype}, {one.numel()} of a group"


@distributed(world_sizes=(1,), timeout=120)
@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(ctx, place, backend, dtype):
    """Sums and means. 16-bit ones were zero if the factor was read as another type."""
    with alone(place, backend) as (group, device):
        reduce = transport.device_reduction(group)
        for average in (False, True):
            source = values(70003, dtype, device)
            output = torch.zeros_like(source)
            reduce(output, source, average)
            assert torch.equal(output, source), average
            reduce(source, source, average)
            assert torch.equal(output, source), f"{average}, in place"
            transport_choice._all_reduce(group, None, source, average)
            assert torch.equal(output, source), f"{average}, of replicas"


@distributed(world_sizes=(1,), timeout=120)
@each_backend
def test_what_is_asked_of_the_backend(ctx, place, backend):
    """Its class says whether it groups gathers, and it has a separate timeout."""
    with alone(place, backend) as (group, device):
        name = type(group._get_backend(device)).__name__
        assert torch_private.gathers_of(group, device) == GATHERS.get(name, "unknown"), name
        assert (name in GATHERS) == (place == "cuda"), name
        asked = group._get_backend(device).options._timeout
        assert torch_private.group_timeout(group, device) == asked


@distributed(world_sizes=(1,), timeout=120)
@each_backend
def test_collectives_are_in_the_order_of_the_current_stream(ctx, place, backend):
    """The source is written late, and the result is read immediately: only the stream orders them."""
    if place != "cuda":
        pytest.skip("the CPU has no streams")
    with alone(place, backend) as (group, device):
        side = torch.cuda.Stream()
        expected = values(1_000_003, torch.float32, device)
        reduce = transport.device_reduction(group)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for name in ("gather", "group", "reduction", "all-reduce"):
                source, output = torch.zeros_like(expected), torch.zeros_like(expected)
                torch.cuda._sleep(50_000_000)
                source.copy_(expected)
                if name == "gather":
                    transport._all_gather_now(group, output, source)
                elif name == "group":
                    transport._all_gather_group(group, [output], [source])
                elif name == "reduction":
                    reduce(output, source, False)
                else:
                    output.copy_(source)
                    transport_choice._all_reduce(group, None, output, False)
                doubled = output + output
                source.zero_()
                output.zero_()
                assert torch.equal(doubled, expected + expected), name


# In a separate process: the backend of torch's symmetric memory cannot change.
@distributed(world_sizes=(1,), timeout=120, fresh=True)
@each_backend
@pytest.mark.parametrize("kind", ["process_group", "symmetric"])
@pytest.mark.shows("communication memory")
def test_memory_for_collectives(ctx, place, backend, kind):
    """Requested before the group has a communicator, then taken and freed repeatedly, with gathers and reductions."""
    with alone(place, backend) as (group, device):
        if kind == "symmetric" and place != "cuda":
            pytest.skip("the CPU has no symmetric memory")
        if kind == "symmetric" and not torch_private.has_symmetric_pool():
            pytest.skip("this torch has no pool of symmetric memory")
        allocate = torch_private.comm_allocator(kind, group, device)
        if allocate is None:
            pytest.skip(f"{backend} has no memory of its own on {device}")
        for size in (1 << 20, 3 << 20, 1 << 20):
            with skipped_without_windows():
                memory = allocate(size)
            assert memory.numel() == size and memory.dtype is torch.uint8 and memory.device == device
            part = memory.view(torch.float32)[: size // 8]
            expected = values(part.numel(), torch.float32, device)
            part.copy_(expected)
            transport._all_gather_now(group, part, part)
            transport.device_reduction(group)(part, part, True)
            assert torch.equal(part, expected)
            del memory, part
