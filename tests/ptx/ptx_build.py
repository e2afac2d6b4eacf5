"""Makes a library of kernels from CMake's PTX. Keeps compiled objects by their content."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ptx_reader import Entry, read_module
from ptx_translation import translate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "tests" / "support"))  # for command lines, because pytest has it

from kernel_programs import kernel_programs  # noqa: E402

FOLDER = Path(os.environ.get("FSDP2X_GPU_BUILD", ROOT / "build" / "gpu")) / "tests" / "ptx"
PROGRAMS = kernel_programs("ptx")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-w", f"-I{HERE}")
SANITIZE = ("-fsanitize=address", "-fno-omit-frame-pointer")


class NotBuilt(Exception):
    """The programs and PTX are missing; the message says what makes them."""


def program(name: str) -> Path:
    path = FOLDER / name
    if not path.is_file():
        raise NotBuilt(f"{path} is not built: run `make test-ptx` where nvcc and GoogleTest are")
    return path


@functools.cache
def entries(architecture: str) -> list[Entry]:
    """The kernels of an architecture, from all files."""
    try:
        files = (FOLDER / f"{architecture}.txt").read_text().split()
    except OSError as error:
        raise NotBuilt(f"no PTX in {FOLDER}: run `make test-ptx` where nvcc and GoogleTest are") from error
    return [entry for file in files for entry in read_module(Path(file).read_text())]


@functools.cache
def _tools() -> str:
    """Returns the dependencies of an object other than its source."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    return version + "".join((HERE / name).read_text() for name in ("grid.hpp", "values.hpp"))


def _compile(source: str, flags: Sequence[str], name: str | None = None) -> Path:
    """Returns an object of `source`, new or kept. Its kernel is named after its content."""
    key = hashlib.sha256("\0".join((source, _tools(), *flags)).encode()).hexdigest()[:20]
    path = FOLDER / "objects" / f"{key}.o"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        file = path.with_suffix(".cpp")
        file.write_text(source)
        partial = path.with_suffix(f".{os.getpid()}")
        command = [COMPILER, *flags, f"-DFSDP2X_KERNEL=kernel_{name or key}", "-c", str(file), "-o", str(partial)]
        subprocess.run(command, check=True)
        partial.rename(path)
    return path


def _list_of(kernels: Sequence[str]) -> str:
    """Returns the source of the function that gives the runtime its kernels."""
    return "\n".join(
        [
            '#include "grid.hpp"',
            "namespace fsdp2x::ptx {",
            *(f"extern const Kernel {kernel};" for kernel in kernels),
            f"static const Kernel* const all[] = {{{', '.join(f'&{kernel}' for kernel in kernels)}}};",
            'extern "C" const Kernel* const* fsdp2x_ptx_kernels(size_t* num) {',
            f"  *num = {len(kernels)};",
            "  return all;",
            "}",
            "}  // namespace fsdp2x::ptx",
            "",
        ]
    )


def library(architecture: str, sanitize: bool = False) -> Path:
    """The kernels of an architecture as a shared library."""
    flags = (*FLAGS, *SANITIZE) if sanitize else FLAGS
    sources = {translate(entry) for entry in entries(architecture)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, flags), sorted(sources, key=len, reverse=True)))
    objects.append(_compile(_list_of(sorted(f"kernel_{path.stem}" for path in objects)), flags))
    key = hashlib.sha256(" ".join(sorted(path.stem for path in objects)).encode()).hexdigest()[:20]
    path = FOLDER / "libraries" / f"{key}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, "-shared", *flags, *map(str, objects), "-o", str(partial)], check=True)
        partial.rename(path)
    return path


def run(
    name: str,
    kernels: Path,
    *arguments: str,
    order: str = "forward",
    reached: Path | None = None,
    sanitize: bool = False,
    timeout: float = 250,
) -> subprocess.CompletedProcess:
    """Runs a program over `kernels`. Raises `subprocess.TimeoutExpired`."""
    environment = {**os.environ, "FSDP2X_PTX_KERNELS": str(kernels), "FSDP2X_PTX_ORDER": order}
    if reached is not None:
        environment["FSDP2X_PTX_REACHED"] = str(reached)
    if sanitize:
        asan = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        environment |= {"LD_PRELOAD": asan.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [str(program(name)), "--gtest_brief=1", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def clear() -> None:
    """Forgets what was compiled."""
    for folder in ("objects", "libraries"):
        shutil.rmtree(FOLDER / folder, ignore_errors=True)
