"""Parts of fsdp2x that only some configs need: imported when a setting asks for them, their errors named after it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from .config import ConfigError


def part(name: str, setting: str) -> ModuleType:
    """`fsdp2x.<name>`; raises `ConfigError` that names the setting when it, or a package that it needs, is missing."""
    try:
        return importlib.import_module(f"fsdp2x.{name}")
    except ModuleNotFoundError as error:
        assert not str(error.name).startswith("fsdp2x"), f"{name!r} is no part of this package"
        raise ConfigError(f"{setting}: needs the module {error.name}, which is not installed; unset it") from None


@contextlib.contextmanager
def said_of(setting: str) -> Iterator[None]:
    """What the model refuses becomes a `ConfigError` that names the setting."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise ConfigError(f"{setting}: {' '.join(str(error).split())}") from None
