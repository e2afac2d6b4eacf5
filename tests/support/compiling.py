"""Shared libraries of this folder's C++ files."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def compiled(source: str, folder: Path, *options: str) -> str:
    """The path of the library in ``folder``; skips where nothing compiles it. ``options`` stand behind the source."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler, and {compiler} is not there")
    library = folder / Path(source).with_suffix(".so")
    command = [compiler, "-shared", "-fPIC", "-std=c++20", str(Path(__file__).with_name(source)), *options]
    subprocess.run([*command, "-o", str(library)], check=True)
    return str(library)
