"""Parts of fsdp2x that only some configs need, imported when a setting asks for them."""

from __future__ import annotations

import importlib
from types import ModuleType

from .config import ConfigError


def part(name: str, setting: str) -> ModuleType:
    """`fsdp2x.<name>`; raises `ConfigError` that names the setting when it, or a package that it needs, is missing."""
    try:
        return importlib.import_module(f"fsdp2x.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{setting}: needs the module {error.name}, which is not installed; unset it") from None
