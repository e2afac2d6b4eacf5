"""The PEP 517 backend: scikit-build-core's, after a look whether there is a torch to build against.

Looking before any hook runs means that an environment without torch gets one sentence at once, instead of a download of
some torch from the package index followed by CMake's log.
"""

import os

from scikit_build_core import build as _backend
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

from find_torch import TorchNotUsable, find_torch

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


def _require_torch(config_settings: dict | None) -> None:
    explicit = (config_settings or {}).get("cmake.define.FSDP2X_TORCH_DIR") or os.environ.get("FSDP2X_TORCH_DIR")
    try:
        find_torch(explicit)
    except TorchNotUsable as error:
        raise SystemExit(str(error)) from None


def get_requires_for_build_wheel(config_settings=None):
    _require_torch(config_settings)
    return _backend.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    _require_torch(config_settings)
    return _backend.get_requires_for_build_editable(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    _require_torch(config_settings)
    return _backend.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    _require_torch(config_settings)
    return _backend.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _require_torch(config_settings)
    return _backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _require_torch(config_settings)
    return _backend.build_editable(wheel_directory, config_settings, metadata_directory)
