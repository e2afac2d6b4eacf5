"""Dtypes on a command line: torch's names for them, and the short ones of others."""

from __future__ import annotations

import argparse


def dtype(text: str) -> str:
    """Torch's name for it, for argparse."""
    from fsdp2x.train.config import ConfigError, dtype_name

    try:
        return dtype_name(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# How every option that is a dtype is declared.
DTYPE = {"type": dtype, "choices": ("float32", "bfloat16", "float16")}
