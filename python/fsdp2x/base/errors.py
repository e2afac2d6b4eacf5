"""The errors that name a file or a setting, in one sentence each; the command line shows them without a traceback."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. The message names the file, parameter or rank."""


class CorruptFile(CheckpointError):
    """Files contradict themselves or each other. An older checkpoint may be intact."""


class ConfigError(ValueError):
    """A setting that cannot be used. The message names its dotted path, what was got and what is expected."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, at most 200 characters, or its type if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
