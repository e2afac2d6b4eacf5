"""Checks that fsdp2x is built, and for the installed torch. Imports no torch itself."""

import contextlib
import importlib
import re
from importlib.metadata import PackageNotFoundError, version


def check_torch(built_for: str, installed: str) -> None:
    """Raises ImportError unless major and minor agree, because torch's C++ interface changes between minor versions.

    Without this check the dynamic loader would fail with the mangled name of a missing symbol.
    """
    built, found = (re.match(r"(\d+)\.(\d+)", version) for version in (built_for, installed))
    if built is not None and found is not None and built.groups() == found.groups():
        return
    wanted = ".".join(built.groups()) if built is not None else built_for
    raise ImportError(
        f"fsdp2x was built for torch {built_for}, but torch {installed} is installed. Rebuild it with `pip install "
        "--no-build-isolation --no-cache-dir --no-deps --force-reinstall fsdp2x` (in a checkout: `.` instead of "
        f"`fsdp2x`), or install torch {wanted}."
    )


try:
    build_info = importlib.import_module("fsdp2x._build_info")  # which is there after a build only
except ImportError as error:
    raise ImportError(
        "fsdp2x has not been built: the compiled part is missing. Run `make build` in a checkout, or "
        "`pip install .`, and import it from outside the source folder."
    ) from error

with contextlib.suppress(PackageNotFoundError):  # a torch without metadata is checked when it is imported
    check_torch(build_info.TORCH_VERSION, version("torch"))

__all__ = ["build_info", "check_torch"]
