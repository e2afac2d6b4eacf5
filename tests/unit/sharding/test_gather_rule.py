"""The rule that gathers parameters alone or together, by how a backend runs many gathers. Plans also use it."""

import warnings

import pytest
import torch

from fsdp2x.base.native import _C
from fsdp2x.sharding import transport

MIB = 2**20
HIDDEN = 4096


def unit(*sizes: tuple[int, int]) -> list[_C.ParamShape]:
    """Weights of these rows and columns in bf16, and the vectors of two norms."""
    types = (torch.float32, torch.bfloat16, torch.float32)
    return [_C.ParamShape(1, rows, columns, *types) for rows, columns in (*sizes, (HIDDEN, 1), (HIDDEN, 1))]


# Llama 3 8B: 416 MiB, q, o and the MLP 400 of them. Experts of Qwen3 30B as modules of their own, 1152 MiB, and as two
# weights of 768 and 384 MiB. A weight that towers over six of 8 MiB.
DENSE = unit((HIDDEN, HIDDEN), (1024, HIDDEN), (1024, HIDDEN), (HIDDEN, HIDDEN), *[(14336, HIDDEN)] * 3)
EXPERTS = unit(*[(768, 2048), (768, 2048), (2048, 768)] * 128)
FUSED = unit((128 * 1536, 2048), (128 * 2048, 768))
TOWER = unit((128256, HIDDEN), *[(1024, HIDDEN)] * 6)
UNITS = {"dense": DENSE, "experts": EXPERTS, "fused": FUSED, "tower": TOWER}
# Experts of Qwen3 235B, cut along their rows, of which more ranks than experts have as many each: 3072 and 1536 MiB, in
# blocks of 24 and 12. And of a small model, in blocks of 3 and 1.5.
TYPES = (torch.float32, torch.bfloat16, torch.float32)
STACKED = [_C.ParamShape(128, 3072, 4096, *TYPES), _C.ParamShape(128, 4096, 1536, *TYPES)]
SMALL_STACKED = [_C.ParamShape(128, 1536, 1024, *TYPES), _C.ParamShape(128, 1024, 768, *TYPES)]
# With 512 ranks and 768 rows, the packed segments have room for two rows of each rank.
EXPERTS_MIB = {2: 1152, 8: 1152, 64: 1152, 512: 1408}


def packed_mib(shapes: list[_C.ParamShape], gathers: str, world: int) -> int:
    """Returns the MiB of parameters that share one collective. Every other parameter has a separate one."""
    below = transport.pack_below_bytes(gathers, world)
    layout = _C.Layout(shapes, world, 0, True)
    return _C.packed_segment_bytes(layout, 2**63 if below is None else below) * world // MIB


# A grouped gather takes one launch for every number of ranks. Gathers in turn must outlast a launch, and the latency of
# that many ranks. How many run at once is not known of other backends, so they gather in one piece.
PACKED_MIB = [
    *(("grouped", world, {"dense": 16, "fused": 0, "tower": 48}) for world in EXPERTS_MIB),
    ("in turn", 2, {"dense": 80, "fused": 0, "tower": 48}),
    ("in turn", 64, {"dense": 416, "fused": 384, "tower": 48}),
    ("in turn", 512, {"dense": 416, "fused": 1152, "tower": 1052}),
    ("unknown", 2, {"dense": 416, "fused": 1152, "tower": 1050}),
    ("unknown", 64, {"dense": 416, "fused": 1152, "tower": 1050}),
]


@pytest.mark.parametrize(("gathers", "world", "expected"), PACKED_MIB)
def test_what_shares_a_gather(gathers, world, expected):
    found = {name: packed_mib(shapes, gathers, world) for name, shapes in UNITS.items()}
    assert found == {**expected, "experts": EXPERTS_MIB[world]}
    assert (transport.pack_below_bytes(gathers, world) is None) == (gathers == "unknown")


def plan_of(shapes: list[_C.ParamShape], gathers: str, world: int) -> tuple[int, int]:
    """Returns the number of collectives besides the packed one, and the MiB of the packed one."""
    below = transport.pack_below_bytes(gathers, world)
    chunks = _C.direct_chunk_bytes(_C.Layout(shapes, world, 0, True), 2**63 if below is None else below)
    assert all(chunk % 16 == 0 for chunk in chunks)
    packed = packed_mib(shapes, gathers, world)
    assert sum(chunks) * world // MIB + packed == sum(s.numel * 2 for s in shapes) // MIB
    return len(chunks), packed


@pytest.mark.parametrize("world", [2, 64, 256, 512])
def test_stacked_experts_are_gathered_by_block_where_that_costs_less_than_copying(world):
    """256 of them share one launch. If the device copies blocks faster than the host can launch them, there are none.

    Without grouped gathers there are none either.
    """
    assert plan_of(STACKED, "grouped", world) == (256, 0)
    assert plan_of(SMALL_STACKED, "grouped", world) == (0, 576)
    assert plan_of(STACKED, "in turn", world) == (0, 4608)
    assert plan_of(STACKED, "unknown", world) == (0, 4608)
    # 5 ranks do not divide 3072 rows evenly.
    assert plan_of([_C.ParamShape(2, 3072, 4096, *TYPES)], "grouped", 5) == (0, 48)


@pytest.mark.parametrize(
    ("device", "queues", "warns"), [("cuda:1", "1", True), ("cuda:1", "8", False), ("cpu", "1", False)]
)
def test_one_queue_for_all_streams_is_warned_of(monkeypatch, device, queues, warns):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        transport._warn_of_one_queue(torch.device(device))
    assert [str(one.message)[:38] for one in told] == ["fsdp2x: CUDA_DEVICE_MAX_CONNECTIONS=1 "] * warns
