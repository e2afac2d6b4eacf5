"""The test extension ``fsdp2x._C_testing``: a device that is recorded, and the kernels on the host."""

import importlib.util
import sys
from pathlib import Path

from fsdp2x.base.native import _C

_NAME = "fsdp2x._C_testing"


def _load():
    """Loads the extension from the folder of ``_C``, whose symbols it uses."""
    if _NAME not in sys.modules:
        engine = Path(_C.__file__)
        spec = importlib.util.spec_from_file_location(_NAME, engine.with_name(f"_C_testing{engine.name[2:]}"))
        sys.modules[_NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_NAME])
    return sys.modules[_NAME]


testing = _load()
