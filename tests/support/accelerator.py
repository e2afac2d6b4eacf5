"""An accelerator of two devices for tests, named "fake": its memory is the host's, torch's operations run on the CPU.

What the package does on any accelerator runs on it, streams and events through torch's own interface. The devices count
what they are asked for, so that work that goes to the wrong one is seen. Streams run at once: order is what
`streams.py` checks.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

NUM_DEVICES = 2
SOURCE = Path(__file__).with_name("accelerator.cpp")


def compiled(folder: Path) -> str:
    """The library that makes it, compiled once for this torch; skips where nothing compiles it."""
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = os.environ.get("CXX") or "c++"
    state = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"accelerator-{state}.so"
    if not library.exists():
        command = [compiler, "-shared", "-fPIC", "-O0", "-std=c++20", str(SOURCE), "-o", str(library)]
        command += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
        try:
            subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"needs a C++ compiler, {compiler} is none")
    return str(library)


class Accelerator:
    """The devices, from the call on until the process ends: only for processes of their own."""

    def __init__(self, library: str):
        torch.utils.rename_privateuse1_backend("fake")
        self._library = ctypes.CDLL(library)
        self._library.streams_used.restype = ctypes.c_uint64
        for name in ("num_allocations", "num_operations", "num_events", "num_device_faults"):
            getattr(self._library, name).restype = ctypes.c_long
        self._library.start()
        module = ModuleType("torch.fake")
        module.is_available = lambda: True
        module.is_initialized = lambda: True
        module.device_count = self._library.num_devices
        module.current_device = self._library.get_device
        module.set_device = lambda index: self._library.set_device(index)
        module.empty_cache = lambda: None
        module.synchronize = lambda device=None: None
        module._is_in_bad_fork = lambda: False
        module.manual_seed_all = lambda seed: None
        torch._register_device_module("fake", module)
        sys.modules["torch.fake"] = module

    def counts(self, index: int) -> dict[str, int]:
        """What a device has been asked for since the process began; streams are bits."""
        return {
            "allocations": self._library.num_allocations(index),
            "operations": self._library.num_operations(index),
            "events": self._library.num_events(index),
            "streams": self._library.streams_used(index),
        }

    @property
    def num_faults(self) -> int:
        """Events and memory of one device that were given to a stream of the other one."""
        return self._library.num_device_faults()
