"""An accelerator of two devices for tests, named "fake". It uses CPU memory, and torch's operations run on the CPU.

All that fsdp2x does on any accelerator runs on it, with torch's own streams and events. The devices count their
requests, which shows work on the wrong device. Streams run at once, because `streams.py` checks their order.
"""

import ctypes
import sys
from types import ModuleType

import torch

from compiling import compiled


def library() -> str:
    """The library that makes it, for the installed torch."""
    from torch.utils.cpp_extension import include_paths, library_paths

    includes, libraries = [f"-I{path}" for path in include_paths()], [f"-L{path}" for path in library_paths()]
    return compiled(
        "accelerator.cpp", f"-DFOR_TORCH={torch.__version__}", "-O0", *includes, *libraries, "-ltorch_cpu", "-lc10"
    )


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
        """Counts a device's requests since the process began. Streams are bits."""
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
