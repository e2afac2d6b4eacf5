"""Names of the files of a checkpoint, whatever its form."""

from __future__ import annotations

ASSETS_FOLDER = "hf"
FULL_FILE = "checkpoint.pt"
PARTS_FILE = "trainer.pt"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.json"
