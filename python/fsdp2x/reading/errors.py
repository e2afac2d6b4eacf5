"""What is wrong with what was read or written, in one sentence that names the file."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the message names the file, parameter or rank."""


class Damaged(CheckpointError):
    """Files that contradict themselves or each other. An older checkpoint may be whole."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, of at most 200 characters; its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
