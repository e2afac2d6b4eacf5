"""Layouts from positions and masks, which heads go to which rank, and the inputs of decoders cut to a range."""

import pytest
import torch

from fsdp2x.models.sequence.attention import cut_decoder_inputs
from fsdp2x.models.sequence.layout import RankPart, from_attention_mask, from_position_ids, whole_rows
from fsdp2x.models.sequence.varlen import HeadPlan
from fsdp2x.sequence import SequenceLayout


def test_samples_begin_where_positions_restart():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 8, 9]])
    assert from_position_ids(positions, 2).samples == ((0, 0, 3), (0, 3, 5), (0, 5, 6), (1, 0, 6))
    assert from_position_ids(torch.tensor([[0, 1, 0]]), 2).samples == ((0, 0, 2), (0, 2, 3), (1, 0, 2), (1, 2, 3))


def test_positions_of_images_do_not_begin_samples_but_those_of_the_text_do():
    image = torch.tensor([0, 1, 1, 1, 2]).expand(3, 1, 5)
    assert from_position_ids(image, 1).samples == ((0, 0, 5),)
    text = torch.tensor([0, 1, 2, 0, 1]).expand(1, 1, 5)
    assert from_position_ids(torch.cat((text, image)), 1).samples == ((0, 0, 3), (0, 3, 5))


def test_padding_masks():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    layout = from_attention_mask(mask)
    assert layout.samples == ((0, 0, 2), (1, 1, 4)) and layout.num_padding == 7
    with pytest.raises(ValueError, match="row 0 has padding between tokens"):
        from_attention_mask(torch.tensor([[1, 0, 1]]))
    with pytest.raises(NotImplementedError, match=r"attention_mask of shape \(1, 1, 2, 2\)"):
        from_attention_mask(torch.ones(1, 1, 2, 2))


def test_one_call_for_rows_that_are_alike():
    assert whole_rows(2, 5).common_range() == (0, 5)
    assert SequenceLayout(2, 6, [(0, 1, 5), (1, 1, 5)]).common_range() == (1, 5)
    assert SequenceLayout(2, 6, [(0, 1, 5), (1, 1, 6)]).common_range() is None
    assert SequenceLayout(2, 6, [(0, 1, 5)]).common_range() is None
    assert SequenceLayout(1, 6, []).common_range() is None


@pytest.mark.parametrize(
    "samples", [[(0, 2, 2)], [(0, 0, 7)], [(1, 0, 3), (0, 0, 3)], [(0, 0, 3), (0, 2, 4)], [(2, 0, 1)], [(0, -1, 2)]]
)
def test_samples_that_cannot_be(samples):
    with pytest.raises(ValueError, match="a layout of 2 rows of 6 positions"):
        SequenceLayout(2, 6, samples)


def test_a_length_that_ranks_cannot_share():
    with pytest.raises(ValueError, match="a length of 7 cannot be cut into 2 equal parts"):
        SequenceLayout(1, 7, [(0, 0, 7)], RankPart(None, 0, 2))
    assert SequenceLayout(1, 8, [(0, 0, 7)], RankPart(None, 1, 2)).local_range == (4, 8)


# ---- heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 2), (4, 1, 2), (6, 3, 2), (12, 4, 6), (8, 2, 8), (6, 2, 3)]
)
def test_each_query_head_meets_its_own_kv_head(heads, kv_heads, size):
    plan = HeadPlan(heads, kv_heads, size)
    group = heads // kv_heads
    covered = []
    for rank in range(size):
        (start, stop), (first, last) = plan.heads(rank), plan.kv_heads(rank)
        index = plan.kv_index(rank)
        if index is None:
            per_kv = (stop - start) // (last - first)
            index = [place // per_kv for place in range(stop - start)]
        assert [first + place for place in index] == [head // group for head in range(start, stop)]
        covered += range(start, stop)
    assert covered == list(range(heads))


def test_heads_that_ranks_cannot_share():
    with pytest.raises(ValueError, match="6 attention heads cannot be split evenly; .* one of 1, 2, 3, 6"):
        HeadPlan(6, 2, 4)
    with pytest.raises(ValueError, match="6 attention heads are not a multiple of 4 kv heads"):
        HeadPlan(6, 4, 2)


# ---- inputs of a decoder


def test_everything_along_the_sequence_is_cut():
    visual = torch.tensor([[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]], dtype=torch.bool)
    deep = [torch.arange(5), torch.arange(5) + 10]
    inputs = {
        "inputs_embeds": torch.randn(2, 6, 3),
        "position_ids": torch.arange(6).expand(3, 2, 6),
        "visual_pos_masks": visual,
        "deepstack_visual_embeds": deep,
        "attention_mask": torch.ones(2, 6),
        "scale": torch.ones(5),
    }
    cut = cut_decoder_inputs(inputs, 2, 4, 6)
    assert torch.equal(cut["inputs_embeds"], inputs["inputs_embeds"][:, 2:4])
    assert cut["position_ids"].tolist() == [[[2, 3]] * 2] * 3
    assert cut["visual_pos_masks"].tolist() == [[True, False], [False, True]]
    assert [part.tolist() for part in cut["deepstack_visual_embeds"]] == [[1, 2], [11, 12]]
    assert cut["scale"] is inputs["scale"]


def test_an_unknown_input_along_the_sequence():
    with pytest.raises(NotImplementedError, match=r"the decoder's input depth of shape \(2, 6\) seems to run along"):
        cut_decoder_inputs({"depth": torch.zeros(2, 6)}, 0, 3, 6)
