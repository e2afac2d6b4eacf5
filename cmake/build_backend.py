"""The PEP 517 backend: scikit-build-core's, after a look whether there is a torch to build against.

Looking before any hook runs means that an environment without torch gets one sentence at once, instead of a download of
some torch from the package index followed by CMake's log.

A torch with CUDA gets the kernels compiled. Where no nvcc is installed, its packages are requirements of the build.
`-C cmake.define.FSDP2X_CUDA=OFF` leaves both out.
"""

import os
import shutil
import sys
from pathlib import Path

from scikit_build_core import build as _backend
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

from cuda_wheels import NoWheels, find_nvcc, requirements
from find_torch import Torch, TorchNotUsable, find_torch

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _require_torch(config_settings: dict | None) -> Torch:
    explicit = (config_settings or {}).get("cmake.define.FSDP2X_TORCH_DIR") or os.environ.get("FSDP2X_TORCH_DIR")
    try:
        return find_torch(explicit)
    except TorchNotUsable as error:
        raise SystemExit(str(error)) from None


def _lacks_nvcc(config_settings: dict | None) -> bool:
    """Whether kernels are wanted, and cmake/cuda.cmake would find no compiler for them."""
    folders = [Path(os.environ.get("CUDA_HOME", "")) / "bin", Path("/usr/local/cuda/bin")]
    is_there = "CUDACXX" in os.environ or shutil.which("nvcc") or any((one / "nvcc").is_file() for one in folders)
    return not is_there and (config_settings or {}).get("cmake.define.FSDP2X_CUDA") != "OFF"


def _compiler(torch: Torch, config_settings: dict | None) -> list[str]:
    try:
        return requirements(torch) if _lacks_nvcc(config_settings) else []
    except NoWheels:  # CMake warns
        return []


def _use_compiler(torch: Torch, config_settings: dict | None) -> None:
    """The hooks of a build have a process of their own."""
    if _lacks_nvcc(config_settings):
        try:
            os.environ["CUDACXX"] = str(find_nvcc(torch, sys.path))
        except NoWheels:
            return


def get_requires_for_build_wheel(config_settings=None):
    torch = _require_torch(config_settings)
    return _backend.get_requires_for_build_wheel(config_settings) + _compiler(torch, config_settings)


def get_requires_for_build_editable(config_settings=None):
    torch = _require_torch(config_settings)
    return _backend.get_requires_for_build_editable(config_settings) + _compiler(torch, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    _require_torch(config_settings)
    return _backend.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    _require_torch(config_settings)
    return _backend.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _use_compiler(_require_torch(config_settings), config_settings)
    return _backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _use_compiler(_require_torch(config_settings), config_settings)
    return _backend.build_editable(wheel_directory, config_settings, metadata_directory)
