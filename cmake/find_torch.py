"""Finds the torch that fsdp2x is built against, without importing it, and prints what CMake needs as key=value lines.

Order: an explicit directory (`FSDP2X_TORCH_DIR`), a torch on `sys.path`, a torch in the site-packages of `sys.prefix`.
The last one is what a plain `pip install .` finds: pip's build isolation hides the environment's packages from import,
but the interpreter still belongs to that environment.
"""

import argparse
import importlib.machinery
import re
import site
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIN_VERSION = (2, 11)
MAX_VERSION = (2, 15)
SUPPORTED = "{}.{} to {}.{}".format(*MIN_VERSION, *MAX_VERSION)


class TorchNotUsable(Exception):
    """No torch was found, or one that fsdp2x cannot be built against; the message is for the user."""


@dataclass(frozen=True)
class Torch:
    """A torch package directory and what its files say about it."""

    path: Path
    version: str
    cuda: str | None  # the CUDA version it was compiled with, as "13.0"

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        return parse_release(self.version)

    @property
    def cxx11_abi(self) -> int:
        """The `_GLIBCXX_USE_CXX11_ABI` that torch was compiled with, read from the constructor of c10::Error."""
        old_abi = b"_ZN3c105ErrorC1ENS_14SourceLocationESs"
        return 0 if old_abi in (self.path / "lib" / "libc10.so").read_bytes() else 1


def parse_release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise TorchNotUsable(f"torch has a version that cannot be read: {version!r}")
    return int(match[1]), int(match[2])


def read_torch(path: Path) -> Torch | None:
    """The torch in `path`, or None if `path` is no torch package (missing, or left over from an uninstall)."""
    try:
        text = (path / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^__version__\s*(?::\s*\w+\s*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return Torch(path.resolve(), match[1], cuda and cuda[1]) if match else None


def importable_torch_dirs() -> list[Path]:
    """Where `import torch` would look; asks the path finder only, so nothing is imported."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    return [Path(spec.origin).parent]


def environment_torch_dirs(prefix: str = sys.prefix, base_prefix: str = sys.base_prefix) -> list[Path]:
    """The torch directories of the environment at `prefix`, and of its base where the environment shows that one."""
    prefixes = [prefix]
    config = Path(prefix) / "pyvenv.cfg"
    if config.is_file() and re.search(r"^include-system-site-packages\s*=\s*true", config.read_text(), re.M | re.I):
        prefixes.append(base_prefix)
    return [Path(directory) / "torch" for directory in site.getsitepackages(prefixes)]


def find_torch(explicit: str | None = None, candidates: Iterable[Path] | None = None) -> Torch:
    """The first usable torch. Raises `TorchNotUsable` with a sentence that says what to do."""
    if explicit:
        torch = read_torch(Path(explicit))
        if torch is None:
            raise TorchNotUsable(
                f"FSDP2X_TORCH_DIR is {explicit!r}, which is not a torch package (it has no version.py): "
                "give the directory that holds torch/__init__.py."
            )
    else:
        if candidates is None:
            candidates = importable_torch_dirs() + environment_torch_dirs()
        torch = next(filter(None, map(read_torch, candidates)), None)
        if torch is None:
            raise TorchNotUsable(
                "fsdp2x is compiled against the torch of your environment, and none was found: install torch "
                f"{SUPPORTED} first, then run `pip install --no-build-isolation .`, or name its directory in "
                "FSDP2X_TORCH_DIR; with uv, add `fsdp2x = [{ requirement = "
                '"torch", match-runtime = true }]` under [tool.uv.extra-build-dependencies].'
            )
    if not MIN_VERSION <= torch.release <= MAX_VERSION:
        raise TorchNotUsable(f"fsdp2x supports torch {SUPPORTED}; found torch {torch.version} in {torch.path}.")
    for needed in ("include/ATen/ATen.h", "include/pybind11/pybind11.h", "lib/libc10.so", "lib/libtorch_python.so"):
        if not (torch.path / needed).is_file():
            raise TorchNotUsable(
                f"torch {torch.version} in {torch.path} has no {needed}: fsdp2x needs a torch with its headers and "
                "shared libraries, as the wheels for Linux have them."
            )
    return torch


def main() -> int:
    parser = argparse.ArgumentParser(description="Print where torch is, as key=value lines.")
    parser.add_argument("--dir", default="", help="directory of the torch package; empty: search for it")
    arguments = parser.parse_args()
    try:
        torch = find_torch(arguments.dir)
    except TorchNotUsable as error:
        print(error, file=sys.stderr)
        return 1
    print(f"dir={torch.path}")
    print(f"version={torch.version}")
    print("major={}\nminor={}".format(*torch.release))
    print(f"cxx11_abi={torch.cxx11_abi}")
    print(f"cuda={torch.cuda or ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
