"""Converts random-number state of one rank to plain values: Python's, numpy's if loaded, torch's CPU and GPU's."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from fsdp2x.base.failures import CorruptFile, first_line

_NUMPY_WORDS = 624
_MOST_HEX = 1 << 20


def seed_all(seed: int, rank: int) -> None:
    """Seeds the generators of one rank from the run's seed. They differ between ranks and repeat in each run."""
    mixed = (seed * 1_000_003 + rank + 1) % 2**63
    random.seed(mixed)
    torch.manual_seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed % 2**32)


def device_of(model: torch.nn.Module) -> torch.device:
    """Returns the device whose generators a checkpoint saves in addition to the CPU's."""
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def rng_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state().numpy(force=True).tobytes().hex(),
    }
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    if (module := _device_module(device)) is not None:
        state[device.type] = module.get_rng_state(device).numpy(force=True).tobytes().hex()
    return state


def check_rng(state: Any, device: torch.device, where: str) -> None:
    """Raises `CorruptFile` for what `set_rng` could not take. Changes nothing."""
    if not isinstance(state, dict) or not state.keys() >= {"python", "torch"}:
        raise CorruptFile(f"{where}: not a state of random generators")
    try:
        random.Random().setstate(_python_state(state["python"]))
        torch.Generator().set_state(_tensor(state["torch"]))
        if "numpy" in state:
            _numpy_state(state["numpy"])
        for name in state.keys() - {"python", "torch", "numpy"}:  # of an accelerator, which may not exist here
            torch.device(name)
            words = _tensor(state[name])
            if device.type == name:
                torch.Generator(device).set_state(words)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise CorruptFile(f"{where}: not a state of random generators: {first_line(error)}") from None


def set_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Takes over a state that `check_rng` accepted."""
    random.setstate(_python_state(state["python"]))
    torch.set_rng_state(_tensor(state["torch"]))
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, position, has_gauss, cached = _numpy_state(state["numpy"])
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if device.type in state and (module := _device_module(device)) is not None:
        module.set_rng_state(_tensor(state[device.type]), device)


def _device_module(device: torch.device) -> Any:
    """Returns torch's module with an accelerator's generators. None for the CPU and devices without generators."""
    module = getattr(torch, device.type, None)
    return module if device.type != "cpu" and hasattr(module, "get_rng_state") else None


def _python_state(state: Any) -> tuple:
    version, words, gauss = state
    if type(version) is not int or not all(type(word) is int for word in words):
        raise ValueError("Python's words are not integers")
    if gauss is not None and type(gauss) is not float:
        raise ValueError(f"Python's next Gaussian is {gauss!r}")
    return version, tuple(words), gauss


def _numpy_state(state: Any) -> tuple:
    """Checks the position, because numpy itself would read from any."""
    name, keys, position, has_gauss, cached = state
    numbers = [*keys, position, has_gauss]
    is_right = name == "MT19937" and len(keys) == _NUMPY_WORDS and all(type(number) is int for number in numbers)
    is_right = is_right and all(0 <= key < 2**32 for key in keys) and 0 <= position <= _NUMPY_WORDS
    if not is_right or has_gauss not in (0, 1) or type(cached) is not float:
        raise ValueError("numpy's words are not a state of its generator")
    return name, keys, position, has_gauss, cached


def _tensor(text: Any) -> torch.Tensor:
    if not isinstance(text, str) or not 0 < len(text) < _MOST_HEX:
        raise ValueError("a generator's bytes are not hexadecimal text")
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
