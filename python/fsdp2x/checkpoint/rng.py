"""Random-number state of one rank as JSON: Python's, numpy's when it is loaded, torch's CPU and CUDA generators."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from .agree import CheckpointError
from .directory import write_file


def rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.json"


def seed_all(seed: int, rank: int) -> None:
    """Generators of one rank from the run's seed; different on each rank, the same in each run."""
    mixed = (seed * 1_000_003 + rank + 1) % 2**63
    random.seed(mixed)
    torch.manual_seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed % 2**32)


def rng_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state().numpy(force=True).tobytes().hex(),
    }
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy(force=True).tobytes().hex()
    return state


def save_rng(folder: Path, rank: int, state: dict[str, Any]) -> None:
    write_file(folder / rng_file(rank), json.dumps(state))


def read_rng(folder: Path, rank: int) -> dict[str, Any] | None:
    """The state that this rank saved, or None when the checkpoint has no such rank."""
    path = folder / rng_file(rank)
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not {"python", "torch"} <= set(state):
            raise ValueError("python or torch state is missing")
        return state
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not a state of random generators: {error}") from None


def set_rng(state: dict[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
