"""Helpers of the commands: dtypes as options, output from one rank, and errors of every rank.

A launcher ends the other ranks when the first one fails. So each rank writes the reason before it ends: briefly to
standard error, and completely to the error file of torchrun or `fsdp2x trl`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

# Frames of a traceback that ranks other than the first show.
_NUM_FRAMES = 3


def show(text: str) -> None:
    """Prints once, however many ranks run the command."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def mistake(error: Exception) -> int:
    """Prints the error, with options as they are on a command line, and returns the exit status.

    The first rank prints all lines, the others one.
    """
    if error.__cause__ is not None:  # a bug of fsdp2x
        unexpected(error)
        return 2
    text, rank = str(error).replace("force=True", "--force"), os.environ.get("RANK", "0")
    write_error_file(text)
    first, *more = text.splitlines() or [type(error).__name__]
    if rank == "0":
        said = "".join(f"fsdp2x: error: {line}\n" for line in [first, *more])
    else:
        said = f"fsdp2x: [rank {rank}] error: {first}{f' ({len(more)} more line(s))' if more else ''}\n"
    sys.stderr.write(said)
    return 2


def unexpected(error: Exception) -> int:
    """Logs an error with its traceback, which ranks other than the first shorten, and returns the exit status."""
    write_error_file("".join(traceback.format_exception(error)))
    logger = logging.getLogger(__name__)
    if os.environ.get("RANK", "0") == "0":
        logger.error("unexpected failure", exc_info=error)
    else:
        cause = error.__cause__ or error
        shown = traceback.format_exception(type(cause), cause, cause.__traceback__, limit=-_NUM_FRAMES, chain=False)
        logger.error("unexpected failure: %s\n%s", error, "".join(shown).rstrip())
    return 1


def write_error_file(text: str, is_mistake: bool = False) -> None:
    """Writes the reason of a failure where the launcher reads it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        now, part = time.time(), Path(path).with_suffix(".part")  # the launcher may end this process at any time
        with contextlib.suppress(OSError):
            part.write_text(json.dumps({"message": text, "timestamp": int(now), "time": now, "is_mistake": is_mistake}))
            part.rename(path)


def _dtype(text: str) -> str:
    from fsdp2x.base.arguments import dtype_name

    return dtype_name(text)


# Declaration of every option that is a dtype: torch's names, or short ones such as bf16.
DTYPE = {"type": _dtype, "choices": ("float32", "bfloat16", "float16")}


class NamesOf:
    """Choices of an option that `api.py` defines. It imports torch, so they are read when they are needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[str]:
        return iter(getattr(importlib.import_module("fsdp2x.api"), self._name))


def positive(text: str) -> int:
    """Parses a positive number for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number
