"""A bar of bytes on a terminal, on rank 0; nothing elsewhere, or without tqdm."""

from __future__ import annotations

from fsdp2x.base.failures import rank_and_size


class ProgressBar:
    """Shown while it is open and standard error is a terminal; gone when it is closed."""

    def __init__(self, total_bytes: int, what: str, wanted: bool = True) -> None:
        self._bar = None
        if wanted and rank_and_size()[0] == 0:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            # disable=None: none where nobody looks.
            self._bar = tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, leave=False, disable=None)

    def add(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(num_bytes)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
