"""Random generators: what is drawn after loading is what would have been drawn."""

import random

import numpy
import pytest
import torch

from fsdp2x.checkpoint import CheckpointError
from fsdp2x.checkpoint.rng import read_rng, rng_file, rng_state, save_rng, seed_all, set_rng

CPU = torch.device("cpu")


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(3).tolist(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_round_trip(tmp_path):
    seed_all(5, 0)
    draw()
    save_rng(tmp_path, 3, rng_state(CPU))
    expected = [draw() for _ in range(3)]
    seed_all(6, 0)
    set_rng(read_rng(tmp_path, 3), CPU)
    assert [draw() for _ in range(3)] == expected


def test_seeds_differ_by_rank_and_repeat():
    drawn = []
    for seed, rank in ((1, 0), (1, 1), (2, 0), (1, 0)):
        seed_all(seed, rank)
        drawn.append(draw())
    assert drawn[0] == drawn[3]
    assert len({repr(d) for d in drawn}) == 3


def test_missing_and_damaged_states(tmp_path):
    assert read_rng(tmp_path, 0) is None
    for text in ("{", "[]", "{}"):
        (tmp_path / rng_file(0)).write_text(text)
        with pytest.raises(CheckpointError, match=r"rng-00000\.json: not a state of random generators"):
            read_rng(tmp_path, 0)
