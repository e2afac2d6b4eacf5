"""Shared libraries of this folder's C++ files."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tests"


def compiled(source: str, *options: str) -> str:
    """Returns the path of the library, which is kept for later runs. Skips the test without a compiler.

    ``options`` follow the source. The cache does not see changes of included files, unless a name in ``options`` has
    their version.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler, and {compiler} is not there")
    path = Path(__file__).with_name(source)
    command = [compiler, "-shared", "-fPIC", "-std=c++20", str(path), *options]
    state = hashlib.sha256(path.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    library = FOLDER / f"{path.stem}-{state}.so"
    if not library.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:  # other workers may also compile it
            made = Path(folder) / library.name
            subprocess.run([*command, "-o", str(made)], check=True)
            made.replace(library)
    return str(library)
