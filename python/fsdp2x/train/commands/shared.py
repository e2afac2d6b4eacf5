"""Helpers of the commands: dtypes as options, output from one rank, and mistakes as a sentence and exit status 2."""

from __future__ import annotations

import argparse
import logging
import os
import sys


def show(text: str) -> None:
    """Prints once, however many ranks run the command."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def mistake(error: Exception) -> int:
    """Prints the error, with options as they are on a command line, and returns the exit status."""
    # All ranks raise the same sentence, and the first rank prints it. A cause is a bug of fsdp2x: show where it
    # happened.
    if error.__cause__ is not None:
        logging.getLogger(__name__).error("unexpected failure", exc_info=error)
    elif os.environ.get("RANK", "0") == "0":
        for line in str(error).replace("force=True", "--force").splitlines():
            sys.stderr.write(f"fsdp2x: error: {line}\n")
    return 2


def _dtype(text: str) -> str:
    from fsdp2x.base.arguments import dtype_name

    return dtype_name(text)


# Declaration of every option that is a dtype: torch's names, or short ones such as bf16.
DTYPE = {"type": _dtype, "choices": ("float32", "bfloat16", "float16")}


def positive(text: str) -> int:
    """Parses a positive number for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number
