"""How a command ends when what was asked for cannot be done: one sentence from one rank, exit status 2."""

from __future__ import annotations

import logging
import os
import sys


def mistake(error: Exception) -> int:
    """Says what is wrong and returns the exit status."""
    # All ranks raise the same sentence; the first rank says it. A cause is a slip of ours: show where it happened.
    if error.__cause__ is not None:
        logging.getLogger(__name__).error("unexpected failure", exc_info=error)
    elif os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"fsdp2x: error: {error}\n")
    return 2
