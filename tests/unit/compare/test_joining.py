"""Batches of several ranks are joined in their order, and tensors are cut into the rows of each rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fsdp2x.compare.joining import Joined, Source
from fsdp2x.compare.judge import Run, judge
from fsdp2x.compare.trace import FORWARD, OUTPUT_GRADIENT, Event, Key, RankTrace


def key(phase=FORWARD):
    return Key(0, phase, "x", 0)


def run_a(folder, read, shapes=((1,), (1,))):
    """Runs `read(rank)` on two ranks, which record a tensor of the given shape."""
    results = []
    for rank, shape in enumerate(shapes):
        with Source(rank) as source:
            results.append(read(rank))
        source.save(folder)
        phases = (FORWARD, OUTPUT_GRADIENT)
        events = [Event(key(phase), tuple(shape), "float32", 0, 1) for phase in phases]
        RankTrace(events, torch.zeros(len(events), 1), {}).save(folder / f"trace-{rank}.pt")
    return results


def rows(rank=0, step=2, num=8, width=3):
    return [{"ids": torch.full((width,), i), "weight": torch.tensor(float(i))} for i in range(rank, num, step)]


def test_batches_are_joined_in_the_order_of_ranks(tmp_path):
    run_a(tmp_path, lambda rank: list(DataLoader(rows(rank), batch_size=2)))
    with Joined(0, 2, tmp_path) as joined:
        found = list(DataLoader(rows(step=1), batch_size=2))
    assert [batch["weight"].tolist() for batch in found] == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert found[0]["ids"].shape == (4, 3) and all(sorted(rows) == sorted(own) for _, rows, own in joined.rows)


@pytest.mark.parametrize("first", [0, 4])
def test_other_rows_are_found(tmp_path, first):
    """Both ranks of run a read the rows of rank 0. A loader of run b from row 4 on gives none of them."""
    run_a(tmp_path, lambda rank: list(DataLoader(rows(0), batch_size=2)))
    with Joined(0, 2, tmp_path) as joined:
        assert next(iter(DataLoader(rows(first, step=1), batch_size=2)))["weight"].tolist() == [0, 2, 0, 2]
    (found,) = judge(*[Run([RankTrace([], torch.empty(0, 1), {}, joined.rows)], 2)] * 3)
    assert found.key.name == "batches of loader 1, pass 1"
    note = f"b's loader does not give {2 + first // 2} of the 4 rows that the ranks of a read. In a, 2 of these rows"
    assert found.note.startswith(note)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            lambda rank: rows(rank, width=3 - rank),
            rows(),
            r"number 1 of the .* \.ids of the shapes \[\[2, 3\], \[2, 2\]\]",
        ),
        (
            lambda rank: rows(rank)[: 4 - rank * 2],
            rows(),
            "number 2 of the .* cannot be joined",
        ),
        (lambda rank: rows(rank), [row["ids"] for row in rows()], "have no tensors, or other ones than in run a"),
    ],
)
def test_mistakes(tmp_path, a, b, message):
    run_a(tmp_path, lambda rank: list(DataLoader(a(rank), batch_size=2)))
    with Joined(0, 2, tmp_path), pytest.raises(RuntimeError, match=message):
        list(DataLoader(b, batch_size=2))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 2), st.tuples(*[st.integers(1, 4)] * 2))
def test_tensors_are_cut_where_ranks_join(tmp_path_factory, shape, dim, sizes):
    dim %= len(shape)
    folder = tmp_path_factory.mktemp("runs")
    shapes = [[*shape[:dim], size, *shape[dim + 1 :]] for size in sizes]
    run_a(folder, lambda rank: None, shapes)
    joined, parts = Joined(0, 2, folder), [torch.randn(one) for one in shapes]
    whole = torch.cat(parts, dim)
    for found, part in zip(joined.cut(key(), whole), parts, strict=True):
        assert torch.equal(found, part)
    assert torch.equal(joined.cut(key(OUTPUT_GRADIENT), whole)[0], 2 * parts[0])
    assert joined.cut(key(), torch.randn(*shape, 7)) == []


@pytest.mark.parametrize("name", ["dropout", "alpha_dropout", "scaled_dot_product_attention"])
def test_masks_of_joined_rows_are_those_of_the_ranks(tmp_path, name):
    x = torch.ones(4, 4, 5)

    def draw(part):
        torch.manual_seed(3)
        options = {"input": part, "p": 0.5, "training": True}
        if name == "scaled_dot_product_attention":  # its mask has four rows that are not those of the batch
            options = {"query": part, "key": part, "value": part, "attn_mask": torch.eye(4), "dropout_p": 0.5}
        return [getattr(F, name)(**options) for _ in range(2)]

    masks = run_a(tmp_path, lambda rank: draw(x.chunk(2)[rank]))
    with Joined(0, 2, tmp_path):
        found = draw(x)
    for index in range(2):
        assert torch.equal(found[index], torch.cat([mask[index] for mask in masks]))
    assert not torch.equal(masks[0][0], masks[1][0]) and not torch.equal(found[0], found[1])
