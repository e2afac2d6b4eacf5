"""Gathers of small models over gloo that run as those of large ones."""

from contextlib import contextmanager

import pytest

from fsdp2x.base import collectives
from fsdp2x.lifecycle import transport_choice
from fsdp2x.sharding import transport


@contextmanager
def everything_is_large():
    """Gathers in place what can be, and by messages. Yields what each gather in place was given."""
    gathered = []

    def gather_in_place(group, outputs, sources, count):
        gathered.append([output.numel() for output in outputs])
        return collectives.gather_in_place(group, outputs, sources, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MESSAGE_BYTES", 0)
        patch.setattr(transport_choice, "MESSAGE_BYTES", 0)
        patch.setattr(transport, "pack_below_bytes", lambda gathers, world: 0)
        patch.setattr(transport_choice, "gather_in_place", gather_in_place)
        yield gathered
