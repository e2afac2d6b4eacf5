"""Bins by a budget of tokens, and rows made of them: budgets, balance, labels at seams, padding that is counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2x.models.sequence.layout import KEYWORD
from fsdp2x.sequence import micro_batches, pack_by_budget, pack_samples

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(50, 120), more=st.integers(0, 12))
def test_every_sample_once_within_the_budget(lengths, budget, more):
    bins = pack_by_budget(lengths, budget, num_bins=more)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    totals = [sum(lengths[index] for index in members) for members in bins]
    assert all(total <= budget for total in totals) and totals == sorted(totals, reverse=True)
    assert len(bins) >= more and bins == pack_by_budget(lengths, budget, num_bins=more)
    # Two bins that would fit in one are not opened: best-fit leaves at most one bin half empty.
    if more == 0:
        assert len(bins) <= max(1, 2 * -(-sum(lengths) // budget)) or not lengths


@pytest.mark.parametrize(
    ("lengths", "num_bins", "expected"),
    [
        ([4, 6, 10], None, [[0, 1], [2]]),  # what fills a bin exactly shares no bin and opens no other
        ([10], None, [[0]]),
        ([3, 2], 4, [[0], [1], [], []]),
        ([], None, []),
        ([], 2, [[], []]),
    ],
)
def test_bins(lengths, num_bins, expected):
    assert pack_by_budget(lengths, 10, num_bins=num_bins) == expected


def test_bins_are_balanced_unless_the_budget_forbids_it():
    assert [len(members) for members in pack_by_budget([1] * 21, 10)] == [7, 7, 7]  # filling first: 10, 10 and 1
    lengths = [6, 5, 5, 4, 4, 4, 2]  # 6 + 4, 5 + 5, 4 + 4 + 2 fill three bins of 10; spreading longest first overflows
    bins = pack_by_budget(lengths, 10)
    assert [sum(lengths[index] for index in members) for members in bins] == [10, 10, 10]


@pytest.mark.parametrize(
    ("lengths", "budget", "said"),
    [
        ([3, 11], 10, "sample 1 has 11 tokens, more than max_tokens=10"),
        ([3, 0], 10, "sample 1 has 0 tokens"),
        ([3], 0, "max_tokens must be at least 1"),
    ],
)
def test_wrong_arguments(lengths, budget, said):
    with pytest.raises(ValueError, match=said):
        pack_by_budget(lengths, budget)


# ---- rows

SAMPLES = [
    {"input_ids": [5, 6, 0], "labels": [-100, 6, 0]},  # ends with token 0, which also pads
    {"input_ids": torch.tensor([7])},
    {"input_ids": [8, 9]},
]


def test_a_row_of_samples():
    row = pack_samples(SAMPLES, pad_to_multiple_of=4)
    assert row.input_ids.tolist() == [[5, 6, 0, 7, 8, 9, 0, 0]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert row.labels.tolist() == [[-100, 6, 0, -100, -100, 9, -100, -100]]
    assert row.next_labels.tolist() == [[6, 0, -100, -100, 9, -100, -100, -100]]
    assert row.cu_seqlens.tolist() == [0, 3, 4, 6] and row.cu_seqlens.dtype == torch.int32
    assert row.num_padding == 2 and row.sample_ids == (0, 1, 2)
    assert row.layout.samples == ((0, 0, 3), (0, 3, 4), (0, 4, 6)) and row.layout.num_padding == 2
    assert row.inputs[KEYWORD].samples == row.layout.samples and row.inputs["use_cache"] is False


def test_labels_of_one_sample_never_follow_another():
    """The first token of a sample has a label of its own in the data; nothing before it may be asked for it."""
    row = pack_samples([{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7, 8], "labels": [7, 8]}])
    assert row.labels.tolist() == [[-100, 6, -100, 8]]


def test_members_padding_and_unpacking():
    """Padding is known by its count and not by its token; an empty row is padding without labels."""
    row = pack_samples(SAMPLES, pad_to_multiple_of=8)
    assert [part.tolist() for part in row.unpack(row.input_ids)] == [[5, 6, 0], [7], [8, 9]]
    with pytest.raises(ValueError, match=r"values of shape \(1, 3\) for 8 tokens"):
        row.unpack(torch.zeros(1, 3))
    row = pack_samples(SAMPLES, [2, 0])
    assert row.input_ids.tolist() == [[8, 9, 5, 6, 0]] and row.sample_ids == (2, 0) and row.num_padding == 0
    row = pack_samples(SAMPLES, [], pad_to_multiple_of=3, pad_token_id=9)
    assert row.input_ids.tolist() == [[9, 9, 9]] and row.labels.tolist() == [[-100] * 3]
    assert row.num_padding == 3 and row.layout.samples == () and row.unpack(row.input_ids) == []


def test_images_are_joined_and_tokens_run_along_the_row():
    samples = [
        {
            "input_ids": [1, 2],
            "mm_token_type_ids": [0, 1],
            "pixel_values": torch.ones(3, 4),
            "position_ids": torch.zeros(3, 2),
        },
        {"input_ids": [3, 4, 5], "mm_token_type_ids": [0, 0, 0], "position_ids": torch.ones(3, 3)},
    ]
    row = pack_samples(samples, pad_to_multiple_of=2)
    assert row.extras["pixel_values"].shape == (3, 4)
    assert row.extras["mm_token_type_ids"].tolist() == [[0, 1, 0, 0, 0, 0]]
    assert row.position_ids.shape == (3, 1, 6) and row.inputs["pixel_values"] is row.extras["pixel_values"]


def test_a_per_token_input_that_some_samples_lack():
    with pytest.raises(ValueError, match="mm_token_type_ids .* missing"):
        pack_samples([{"input_ids": [1, 2], "mm_token_type_ids": [0, 1]}, {"input_ids": [3]}])


def test_micro_batches_of_one_process():
    samples = [{"input_ids": list(range(1, 1 + n))} for n in (5, 3, 4, 2)]
    rows = list(micro_batches(samples, 8, pad_to_multiple_of=4, prepare=lambda row: row.to("cpu")))
    assert sorted(index for row in rows for index in row.sample_ids) == [0, 1, 2, 3]
    assert all(row.input_ids.shape[1] <= 8 for row in rows)
    assert [row.input_ids.shape for row in micro_batches([], 8, pad_to_multiple_of=4)] == [(1, 4)]
