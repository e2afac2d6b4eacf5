"""Without a group, every public function that takes one uses all ranks. A group of one rank waits for no other rank."""

import inspect

import pytest
import torch
import torch.distributed as dist

from fsdp2x import sequence
from harness import distributed

LENGTHS = ([3, 4, 5, 8, 7], [2])  # four rows of 8 tokens at most, and one


def samples(rank):
    return [{"input_ids": [1] * length} for length in LENGTHS[rank]]


# Name -> its result on a rank with a group. A group of all ranks gives all of them the same value, one rank another.
CALLS = {
    "count_label_tokens": lambda rank, **group: float(
        sequence.count_label_tokens(torch.ones(rank + 1, dtype=torch.int64), **group)
    ),
    "mean_over_ranks": lambda rank, **group: float(sequence.mean_over_ranks(torch.tensor(float(rank)), **group)),
    "micro_batches": lambda rank, **group: len(list(sequence.micro_batches(samples(rank), 8, **group))),
    "pack_by_budget": lambda rank, **group: len(sequence.pack_by_budget(LENGTHS[rank], 8, **group)),
    "token_mean_loss": lambda rank, **group: float(
        sequence.token_mean_loss(torch.zeros(1, 4), torch.ones(1, dtype=torch.int64), 1, **group)
    ),
}


def test_the_table_has_every_function_with_a_default_group():
    found = {name for name in sequence.__all__ if _default_group(getattr(sequence, name)) is None}
    assert found == set(CALLS)


def _default_group(function):
    if inspect.isclass(function):
        return inspect.Parameter.empty
    parameter = inspect.signature(function).parameters.get("group")
    return inspect.Parameter.empty if parameter is None else parameter.default


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("name", CALLS)
def test_no_group_is_all_ranks(ctx, name):
    one = dist.new_subgroups(1)[0]
    call, found = CALLS[name], [None, None]
    dist.all_gather_object(found, CALLS[name](ctx.rank))
    assert found[0] == found[1] == call(ctx.rank, group=dist.group.WORLD)
    alone = [None, None]
    dist.all_gather_object(alone, call(ctx.rank, group=one))
    assert alone != found


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("name", ["micro_batches", "pack_by_budget"])
def test_alone_asks_nobody(ctx, name):
    if ctx.rank == 0:
        assert CALLS[name](0, group="alone") == 4
        with pytest.raises(ValueError, match="group must be .*'alone'"):
            CALLS[name](0, group="all")
