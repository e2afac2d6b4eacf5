"""Which rank orthogonalises which matrices: every element once, whoever holds it gets it back, loads are even."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fsdp2x.optim.muon_plan import blocks_of, deal, step_flops


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """As torch.chunk cuts: (start, size), size 0 for the last ones."""
    rows = -(-size // parts)
    start = min(index * rows, size)
    return start, min(rows, size - start)


@st.composite
def arrangements(draw):
    """Parameters over a mesh: on each axis a replica, or a cut along one dim of the stack."""
    axes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda axes: _product(axes) <= 12))
    params = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7)))
        dims = draw(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=len(axes), max_size=len(axes)))
        pieces = []
        for rank in range(_product(axes)):
            start, held = [0, 0, 0], list(shape)
            stride = _product(axes)
            for size, dim in zip(axes, dims, strict=True):
                stride //= size
                if dim is not None:
                    begin, held[dim] = chunk(held[dim], size, rank // stride % size)
                    start[dim] += begin
            pieces.append((tuple(start), tuple(held)))
        params[number] = shape, pieces
    return _product(axes), params, draw(st.integers(1, 200))


def _product(sizes) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


@given(arrangements())
def test_every_element_is_dealt_once_and_comes_back(arrangement):
    world, params, round_numel = arrangement
    loads: dict[int, int] = {}
    dealt = deal({number: (shape, blocks_of(pieces)) for number, (shape, pieces) in params.items()}, round_numel, loads)
    jobs = [job for jobs in dealt.rounds for job in jobs] + dealt.local
    for number, (shape, pieces) in params.items():
        mine = [job for job in jobs if job.param == number]
        matrices = Counter(first for job in mine for first in range(job.first, job.first + job.shape[0]))
        assert matrices == Counter(range(shape[0]))
        for rank, (start, held) in enumerate(pieces):
            expected = 0 if 0 in held else held[0]
            blocks = [block for job in mine for block in job.blocks if rank in block.ranks]
            assert sum(block.shape[0] for block in blocks) == expected
            for block in blocks:
                assert block.start[1:] == start[1:] and block.shape[1:] == held[1:]
    for job in jobs:
        assert sum(_product(block.shape) for block in job.blocks) == _product(job.shape)
        senders = [job.sender(block) for block in job.blocks]
        assert job.owner in senders and len(set(senders)) == len(senders)
        assert all(sender in block.ranks for sender, block in zip(senders, job.blocks, strict=True))
    assert loads == {
        rank: sum(step_flops(*job.shape) for job in jobs if job.owner == rank) for rank in {job.owner for job in jobs}
    }
    for jobs in dealt.rounds:
        assert jobs
        for owner in {job.owner for job in jobs}:
            taken = [_product(job.shape) for job in jobs if job.owner == owner]
            assert len(taken) == 1 or sum(taken) <= round_numel


def test_loads_of_a_transformer_are_even():
    """A model of 12 layers over 8 ranks, cut by rows: the busiest has 2 % more than the mean."""
    world = 8
    layer = [(768, 768), (768, 768), (768, 768), (768, 768), (3072, 768), (3072, 768), (768, 3072)]
    params = {}
    for number, (rows, columns) in enumerate(layer * 12):
        cuts = [chunk(rows, world, rank) for rank in range(world)]
        pieces = [((0, start, 0), (1, size, columns)) for start, size in cuts]
        params[number] = (1, rows, columns), blocks_of(pieces)
    loads: dict[int, int] = {}
    dealt = deal(params, 64 * 2**20, loads)
    assert not dealt.local and len(dealt.rounds) == 1
    assert max(loads.values()) <= 1.1 * sum(loads.values()) / world


def test_experts_that_a_rank_has_whole_do_not_travel():
    """128 experts over 4 ranks, and over 2 ranks with 2 replicas, which share the work."""
    shape = (128, 64, 32)
    cut = [((32 * rank, 0, 0), (32, 64, 32)) for rank in range(4)]
    dealt = deal({0: (shape, blocks_of(cut))}, 1 << 20, {})
    assert not dealt.rounds and [job.shape[0] for job in dealt.local] == [32] * 4
    replicated = [((64 * (rank % 2), 0, 0), (64, 64, 32)) for rank in range(4)]
    loads: dict[int, int] = {}
    dealt = deal({0: (shape, blocks_of(replicated))}, 1 << 20, loads)
    assert not dealt.local and len(set(loads.values())) == 1 and len(loads) == 4
