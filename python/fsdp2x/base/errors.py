"""Errors for users, and how they are reworded. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

E = TypeVar("E", bound=Exception)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. The message names the file, parameter or rank."""


class CorruptFile(CheckpointError):
    """Files contradict themselves or each other. An older checkpoint may be intact."""


class ConfigError(ValueError):
    """A setting that cannot be used. The message names its dotted path, and what was expected and got."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, at most 200 characters, or its type if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


@contextlib.contextmanager
def reworded(kind: type[E], say: str | Callable[[Exception], str], *caught: type[Exception]) -> Iterator[None]:
    """Raises exceptions of the block as ``kind``, with ``say`` before their text, or with what ``say`` makes of them.

    Args:
        kind: the type to raise. An exception of this type passes, unless ``caught`` names it.
        say: a setting or a place, or a function from the exception to the message.
        caught: the types to reword. Default: those that mean an argument that does not fit. With ``OSError``, the place
            is the file, and the text need not name it again.
    """
    caught = caught or (ValueError, TypeError, NotImplementedError, ImportError)
    try:
        yield
    except caught as error:
        is_kind = isinstance(error, kind)
        if is_kind and kind not in caught:
            raise
        said = getattr(error, "strerror", None) if OSError in caught else None
        said = said or " ".join(str(error).split())
        text = f"{say}: {said}" if isinstance(say, str) else say(error)
        raise kind(text) from (error.__cause__ if is_kind else None)
