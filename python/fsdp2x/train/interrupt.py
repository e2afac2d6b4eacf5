"""Ctrl-C while training: the run ends after its step, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

# torchrun gets the terminal's signal as well, and passes it on to its ranks, which have it already.
_ECHO_S = 2.0


class Interrupt:
    """Inside the block SIGINT is noted instead of raised. Other threads than the main one cannot ask for that."""

    def __init__(self, says: bool) -> None:
        self.noted = False
        self._says = says
        self._since = 0.0
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.noted:
            if "TORCHELASTIC_RUN_ID" in os.environ and now - self._since < _ECHO_S:
                return
            raise KeyboardInterrupt("interrupted twice: this run ends without saving")
        self.noted, self._since = True, now
        if self._says:
            # Not through logging, whose lock the interrupted code may hold.
            os.write(2, b"\nfsdp2x: interrupted: ending after this step; once more ends at once, without saving\n")
