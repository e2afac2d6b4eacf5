"""Waits for the broadcasts of a gather, of which one fails while another runs."""

import time
from datetime import timedelta

import pytest

from fsdp2x.base.agreement import _is_done
from fsdp2x.base.collectives import _Parts


class Broadcast:
    """A work that ends after ``seconds``, with an error or not."""

    def __init__(self, seconds: float, fails: bool = False):
        self.end, self.fails = time.monotonic() + seconds, fails

    def is_completed(self) -> bool:
        return time.monotonic() >= self.end

    def wait(self, timeout: timedelta = timedelta(seconds=60)) -> bool:
        left = self.end - time.monotonic()
        time.sleep(max(0.0, min(left, timeout.total_seconds())))
        if not self.is_completed():
            raise RuntimeError("timed out")
        if self.fails:
            raise RuntimeError("connection closed by peer")
        return True


@pytest.mark.parametrize("fails_at", [0, 1, 2])
@pytest.mark.parametrize("after", [0.0, 0.05])
def test_a_failed_broadcast_ends_the_wait(fails_at, after):
    """Its error is raised at once, though the others would run for a minute."""
    works = [Broadcast(60), Broadcast(60), Broadcast(60)]
    works[fails_at] = Broadcast(after, fails=True)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        while not _is_done(_Parts(works), 0.02):
            assert time.monotonic() - begin < 5
    assert time.monotonic() - begin < 5


def test_broadcasts_that_end_are_done():
    parts = _Parts([Broadcast(0.1), Broadcast(0.0)])
    assert not _is_done(parts, 0.02)
    assert _is_done(parts, 1.0) and parts.is_completed()
