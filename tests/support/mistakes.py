"""One harness for mistakes: a call or a command that gets something wrong says so in one sentence, and does nothing."""

from collections.abc import Callable

import pytest

# Errors for users; anything else is a fault of the package.
ERRORS = (ValueError, TypeError, RuntimeError, NotImplementedError)


def said_by(mistake: Callable[..., object], *arguments: object, **keywords: object) -> str:
    """The sentence of a call that is refused, with the notes of its error."""
    with pytest.raises(ERRORS) as error:
        mistake(*arguments, **keywords)
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


def faults_of(words: list[str], capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Runs a command that must be refused: by a status, and a last line that is an error and no traceback."""
    from fsdp2x.train.cli import main

    caplog.clear()
    faults = []
    try:
        if main(words) == 0:
            faults.append("was taken")
    except SystemExit as stop:
        if not stop.code:
            faults.append("was taken")
    except BaseException as error:
        faults.append(f"raised {type(error).__name__}: {error}")
    said = capfd.readouterr().err
    if not faults and "error: " not in said.strip().rpartition("\n")[2]:
        faults.append(f"ended with {said[-200:]}")
    if "Traceback" in said or any(record.exc_info for record in caplog.records):
        faults.append("has a traceback")
    return faults
