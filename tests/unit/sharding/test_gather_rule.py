"""The rule that gathers parameters alone or together, by how a backend runs many gathers. Plans also use it."""

import warnings

import pytest
import torch

from fsdp2x.sharding import transport


def test_what_shares_a_gather():
    """A grouped gather takes one launch for every number of ranks. Gathers in turn must outlast that many latencies.

    How many run at once is not known of other backends, so they gather in one piece.
    """
    grouped, in_turn, unknown = (
        [transport.pack_below_bytes(gathers, world) for world in (2, 64, 512)]
        for gathers in ("grouped", "in turn", "unknown")
    )
    assert len(set(grouped)) == 1 and 0 < grouped[0] < in_turn[0] < in_turn[1] < in_turn[2]
    assert unknown == [None] * 3


@pytest.mark.parametrize(
    ("device", "queues", "warns"), [("cuda:1", "1", True), ("cuda:1", "8", False), ("cpu", "1", False)]
)
def test_one_queue_for_all_streams_is_warned_of(monkeypatch, device, queues, warns):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        transport._warn_of_one_queue(torch.device(device))
    assert [str(one.message)[:38] for one in told] == ["fsdp2x: CUDA_DEVICE_MAX_CONNECTIONS=1 "] * warns
