"""The programs that test kernels, as CMake names them: one more is run on a device and as translated PTX at once."""

import re
from pathlib import Path

_LISTS = Path(__file__).resolve().parents[1] / "cpp" / "CMakeLists.txt"


def kernel_programs(kind: str) -> tuple[str, ...]:
    """Names of the programs, with ``kind`` ("device" or "ptx") in the place of "test_cuda"."""
    listed = re.search(r"^set\(kernel_tests ([^)]*)\)", _LISTS.read_text(), flags=re.MULTILINE)
    assert listed, f"{_LISTS} has no list of kernel_tests"
    return tuple(name.replace("test_cuda", kind) for name in listed[1].split())
