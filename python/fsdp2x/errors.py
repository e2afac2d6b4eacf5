"""The errors of files that are read or written. Each is one sentence that names the file."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. The message names the file, parameter or rank."""


class CorruptFile(CheckpointError):
    """Files contradict themselves or each other. An older checkpoint may be intact."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, at most 200 characters, or its type if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
