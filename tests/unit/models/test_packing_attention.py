"""Attention inside samples against its definition, the layouts it reads, and the heads of each rank."""

import pytest
import torch

from fsdp2x.models.sequence.attention import cut_decoder_inputs
from fsdp2x.models.sequence.blocks import Rules
from fsdp2x.models.sequence.exchange import exchanged_heads
from fsdp2x.models.sequence.layout import Peers, RankPart, from_attention_mask, from_position_ids, whole_rows
from fsdp2x.models.sequence.varlen import attend, attend_flat, flash_takes
from fsdp2x.sequence import SequenceLayout

LAYOUTS = {
    "whole": whole_rows(2, 9),
    "packed": SequenceLayout(1, 14, [(0, 0, 5), (0, 5, 6), (0, 6, 13)]),
    "padded": SequenceLayout(3, 8, [(0, 0, 8), (1, 2, 8), (2, 0, 3)]),
    "same_padding": SequenceLayout(2, 8, [(0, 1, 6), (1, 1, 6)]),
    "two_rows": SequenceLayout(2, 10, [(0, 0, 4), (0, 4, 9), (1, 0, 10)]),
    "gap": SequenceLayout(1, 10, [(0, 1, 4), (0, 6, 9)]),
}
RULES = {
    "plain": {},
    "scaled": {"scale": 0.7},
    "window": {"window": 3},
    "window_1": {"window": 1},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.1])},
    "all": {"scale": 0.4, "window": 2, "softcap": 0.8, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.1])},
}
# So little that no weight is dropped, but the implementation is that of dropout.
RULES |= {f"{name}_dropout": {**RULES[name], "dropout": 1e-12} for name in ("plain", "window")}


def part_of(rank, ulysses=1, context=1):
    places = divmod(rank, ulysses)
    return RankPart(
        Peers(None, rank, ulysses * context), Peers(None, places[1], ulysses), Peers(None, places[0], context)
    )


def tensors_of(layout, kv_heads=2, value_dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)

    def make(heads, dim):
        return torch.randn(layout.num_rows, heads, layout.length, dim, generator=generator).to(dtype).requires_grad_()

    return make(4, 8), make(kv_heads, 8), make(kv_heads, value_dim)


def defined(query, key, value, layout, rules):
    """softmax over what a query may see, one dense mask for the whole row, in float64."""
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (rules.scale or q.shape[-1] ** -0.5)
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    seen = torch.zeros(layout.num_rows, layout.length, layout.length, dtype=torch.bool)
    for row, start, stop in layout.samples:
        for i in range(start, stop):
            seen[row, i, max(start, i - (rules.window or layout.length) + 1) : i + 1] = True
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if rules.sinks is not None:
        scores = torch.cat((scores, rules.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : layout.length].nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def check(got, expected, tensors):
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-6)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(6))
    grads = torch.autograd.grad((got * upstream).sum(), tensors)
    wanted = torch.autograd.grad((expected * upstream).sum(), tensors)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other.nan_to_num(0.0), rtol=1e-4, atol=1e-5)
    assert grads[2].abs().max() > 0.01  # a window of one leaves queries and keys without a gradient


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.each_pair
def test_as_defined(name, rule):
    layout, rules = LAYOUTS[name], Rules(**RULES[rule])
    tensors = tensors_of(layout)
    check(attend(*tensors, layout, rules), defined(*tensors, layout, rules), tensors)


@pytest.mark.parametrize("window", [2, 63, 64, 65, 150, None])
def test_windows_in_blocks_of_a_long_sample(window):
    """Blocks of 64 queries: ends inside a block, at its border, and longer than the sample."""
    layout, rules = SequenceLayout(1, 205, [(0, 0, 130), (0, 130, 203)]), Rules(window=window)
    tensors = tensors_of(layout)
    check(attend(*tensors, layout, rules), defined(*tensors, layout, rules), tensors)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*LAYOUTS, "long"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("value_dim", [8, 6])
def test_parts_of_context_ranks(name, rule, size, value_dim):
    """Each rank's queries against all keys; what the ranks send to keys and values adds up.

    torch's flash kernels take plain rules and values as wide as keys."""
    layout = LAYOUTS.get(name, SequenceLayout(1, 204, [(0, 0, 130), (0, 130, 203)]))
    layout = layout.cut(None, layout.length + -layout.length % (2 * size), False)
    rules = Rules(**RULES[rule])
    query, key, value = tensors = tensors_of(layout, value_dim=value_dim)
    parts = [layout.cut(part_of(rank, context=size), layout.length, True) for rank in range(size)]
    outs = [attend(part.take(query, 2), key, value, part, rules) for part in parts]
    check(parts[0].join(outs), defined(*tensors, layout, rules), tensors)


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_sinks_get_their_gradient(softcap):
    layout = SequenceLayout(1, 60, [(0, 0, 41), (0, 41, 58)])
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.1], requires_grad=True)
    rules, tensors = Rules(sinks=sinks, softcap=softcap), tensors_of(layout)
    check(attend(*tensors, layout, rules), defined(*tensors, layout, rules), (*tensors, sinks))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_kv_heads_and_values_of_another_width(kv_heads):
    layout, rules = LAYOUTS["packed"], Rules()
    tensors = tensors_of(layout, kv_heads, value_dim=6)
    got = attend(*tensors, layout, rules)
    assert got.shape == (1, 14, 4, 6)
    check(got, defined(*tensors, layout, rules), tensors)


def test_a_row_of_padding_gives_zeros_and_a_graph():
    layout = SequenceLayout(1, 4, [])
    q, k, v = tensors_of(layout)
    out = attend(q, k, v, layout, Rules())
    assert out.shape == (1, 4, 4, 8) and not out.any()
    out.sum().backward()
    assert q.grad is not None and not q.grad.any()


def twin(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """torch's varlen_attn in a few lines; kv heads must be repeated by the caller, as before torch 2.12."""
    assert torch.equal(cu_q, cu_k) and cu_q.dtype == torch.int32 and max_q == max_k == int(cu_q.diff().max())
    assert query.shape[1] == key.shape[1] and window_size[1] == 0
    layout = SequenceLayout(1, len(query), [(0, a, b) for a, b in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False)])
    window = None if window_size[0] < 0 else window_size[0] + 1
    tensors = [x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
    return attend(*tensors, layout, Rules(scale=scale, window=window))[0]


def twin_with_groups(query, key, value, *arguments, enable_gqa=False, **options):
    assert enable_gqa and key.shape[1] < query.shape[1]
    groups = query.shape[1] // key.shape[1]
    return twin(query, *(x.repeat_interleave(groups, dim=1) for x in (key, value)), *arguments, **options)


@pytest.mark.parametrize("kernel", [twin, twin_with_groups])
@pytest.mark.parametrize("rule", ["plain", "scaled", "window"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_flat_call_is_the_same(name, rule, kernel):
    layout, rules = LAYOUTS[name], Rules(**RULES[rule])
    tensors = tensors_of(layout)
    check(attend_flat(*tensors, layout, rules, kernel), defined(*tensors, layout, rules), tensors)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_flat_call_for_the_part_of_a_context_rank(name):
    """The kernel aligns queries with the last of their keys."""

    def aligned(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        assert max_q == int(cu_q.diff().max()) and max_k == int(cu_k.diff().max())
        outs = []
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
            q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1))
        return torch.cat(outs)

    layout = LAYOUTS[name].cut(None, LAYOUTS[name].length + -LAYOUTS[name].length % 4, False)
    query, key, value = tensors = tensors_of(layout)
    parts = [layout.cut(part_of(rank, context=2), layout.length, True) for rank in range(2)]
    outs = [attend_flat(part.take(query, 2), key, value, part, Rules(), aligned) for part in parts]
    check(parts[0].join(outs), defined(*tensors, layout, Rules()), tensors)


@pytest.mark.parametrize("scale", [1.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_flat_call_without_samples(dtype, scale):
    """A rank with only padding passes zeros on, also if the sum of its queries exceeds the range of the dtype."""
    layout = SequenceLayout(1, 4, [])
    q, k, v = (x.detach().abs().mul(scale).to(dtype).requires_grad_() for x in tensors_of(layout))
    out = attend_flat(q, k, v, layout, Rules(), twin)
    out.sum().backward()
    assert out.shape == (1, 4, 4, 8) and out.dtype == dtype
    for one in (out, q.grad, k.grad, v.grad):
        assert torch.equal(one, torch.zeros_like(one))


@pytest.mark.parametrize(
    ("rules", "dtype", "value_dim", "takes"),
    [
        (Rules(), torch.bfloat16, 8, True),
        (Rules(window=3), torch.float16, 8, True),
        (Rules(), torch.float32, 8, False),
        (Rules(softcap=1.0), torch.bfloat16, 8, False),
        (Rules(dropout=0.1), torch.bfloat16, 8, False),
        (Rules(), torch.bfloat16, 6, False),
    ],
)
def test_what_the_flash_kernel_is_asked_for(rules, dtype, value_dim, takes):
    query, _, value = tensors_of(LAYOUTS["packed"], value_dim=value_dim, dtype=dtype)
    assert flash_takes(query, value, rules) == takes


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


@pytest.mark.parametrize(
    "samples", [[(0, 2, 2)], [(0, 0, 7)], [(1, 0, 3), (0, 0, 3)], [(0, 0, 3), (0, 2, 4)], [(2, 0, 1)], [(0, -1, 2)]]
)
def test_samples_that_cannot_be(samples):
    with pytest.raises(ValueError, match="a layout of 2 rows of 6 positions"):
        SequenceLayout(2, 6, samples)


def test_a_length_that_ranks_cannot_share():
    with pytest.raises(ValueError, match="length of 7 is not a multiple of 2"):
        SequenceLayout(1, 7, [(0, 0, 7)], part_of(0, ulysses=2))
    assert SequenceLayout(1, 8, [(0, 0, 7)], part_of(1, ulysses=2)).local_ranges == [(4, 8)]


@pytest.mark.parametrize(("ulysses", "context"), [(1, 1), (3, 1), (1, 2), (1, 3), (2, 2), (3, 2), (2, 3), (1, 8)])
def test_parts_are_a_partition_and_equal_work(ulysses, context):
    size = ulysses * context
    length = 2 * part_of(0, ulysses, context).multiple
    layouts = [whole_rows(2, length).cut(part_of(rank, ulysses, context), length, True) for rank in range(size)]
    whole = torch.arange(2 * length).view(2, length)
    parts = [layout.take(whole) for layout in layouts]
    assert all(part.shape == (2, layouts[0].local_length) for part in parts)
    assert torch.equal(layouts[0].join(parts), whole)
    work = [sum(stop * (stop + 1) - start * (start + 1) for start, stop in one.query_ranges) for one in layouts]
    assert len(set(work)) == 1


# ---- heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 2), (4, 1, 2), (6, 3, 2), (12, 4, 6), (8, 2, 8), (6, 2, 3)]
)
def test_each_query_head_meets_its_own_kv_head(heads, kv_heads, size):
    num, num_kv = exchanged_heads(heads, kv_heads, size)
    sent = torch.arange(kv_heads).repeat_interleave(num_kv * size // kv_heads).view(size, num_kv)
    met = sent.repeat_interleave(num // num_kv, dim=1).flatten()
    assert met.tolist() == [head // (heads // kv_heads) for head in range(heads)]


def test_heads_that_ranks_cannot_share():
    with pytest.raises(ValueError, match="6 attention heads cannot be split .*1, 2, 3, 6"):
        exchanged_heads(6, 2, 4)
    with pytest.raises(ValueError, match="6 attention heads .*4 kv heads"):
        exchanged_heads(6, 4, 2)


# ---- inputs of a decoder


def test_an_unknown_input_along_the_sequence():
    with pytest.raises(NotImplementedError, match=r"depth of shape \(2, 6\)"):
        cut_decoder_inputs({"depth": torch.zeros(2, 6)}, SequenceLayout(2, 6, [], part_of(0, ulysses=2)), 6)
