"""Conversions of transformers on traced tensors: random calls, rows of converted weights, and what cannot be traced."""

import random

import pytest
import torch

from fsdp2x.io.conversions import Traced, evaluate
from fsdp2x.io.formats.tensors import LoadedTensor
from fsdp2x.io.hf.files import Checkpoint
from fsdp2x.io.hf.recipes import file_values, make_recipes, source_of
from models import build
from reference import same


def random_call(rng, tensors):
    """A result that `torch` makes of some of the tensors, which all have three dims."""
    one, dim = rng.choice(tensors), rng.randrange(3)
    alike = [other for other in tensors if other.shape == one.shape]
    calls = [
        lambda: torch.cat([one, *rng.choices(alike, k=2)], dim=dim),
        lambda: torch.stack([one, rng.choice(alike)], dim=-1).flatten(2),
        lambda: rng.choice(torch.chunk(one, 2, dim=dim)),
        lambda: rng.choice(one.chunk(3, dim=dim)).contiguous(),
        lambda: rng.choice(torch.split(one, [1, one.shape[dim] - 1], dim=dim)),
        lambda: torch.transpose(one, dim0=dim, dim1=(dim + 1) % 3).contiguous(),
        lambda: one.transpose(dim, 0),
        lambda: (2 * one).view(one.shape).to(torch.float64),
        lambda: one[1:] if one.shape[0] > 1 else one[...],
    ]
    return rng.choice(calls)()


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed):
    """Repeated with values, and read by boxes, a traced result is what torch makes of the values."""
    values = {name: torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(seed)) for name in "ab"}
    traced = [Traced.of(name, value.shape, value.dtype) for name, value in values.items()]
    real, rng, other = list(values.values()), random.Random(seed), random.Random(seed)
    for _ in range(5):
        real.append(random_call(rng, real))
        traced.append(random_call(other, traced))
    sources = {name: LoadedTensor(value) for name, value in values.items()}
    for made, expected in zip(traced, real, strict=True):
        assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(evaluate(made, values, {}), expected)
        source = source_of(made, sources)
        assert torch.equal(source.whole(), expected)
        start = [rng.randrange(size) for size in expected.shape]
        ends = [rng.randint(first, size) for first, size in zip(start, expected.shape, strict=True)]
        part = expected[tuple(map(slice, start, ends))]
        source.read(start, out := torch.empty_like(part))
        assert torch.equal(out, part)


@pytest.mark.parametrize("name", ["qwen3_moe", "hrm_text"])
def test_rows_of_converted_weights(tmp_path, name):
    """Fused experts and split matrices: only the bytes of the rows are read. Undone, they are the files again."""
    model = build(name)
    model.save_pretrained(tmp_path)
    weights = dict(model.named_parameters())
    with Checkpoint([tmp_path]) as files:
        recipes = make_recipes(model, files.tensors, {key: weight.shape for key, weight in weights.items()})
        assert recipes.used == set(files.tensors) != set(weights) and not recipes.unexpected
        for key, weight in weights.items():
            before, half = files.read_bytes, len(weight) // 2
            rows = torch.empty_like(weight[half:])
            recipes.sources[key].read([half] + [0] * (weight.dim() - 1), rows)
            same({key: rows}, {key: weight[half:]})
            assert files.read_bytes - before == rows.nbytes, key
        held = {key: LoadedTensor(weight.detach()) for key, weight in weights.items()}
        saved = file_values(model, {key: (weight.shape, weight.dtype) for key, weight in weights.items()}, held)
        same(
            {key: source.whole() for key, source in sorted(saved.items())},
            {key: source.whole() for key, source in sorted(files.tensors.items())},
        )


@pytest.mark.parametrize("write", [lambda one: one.mul_(2), lambda one: one.__setitem__(0, 1.0)])
def test_a_conversion_that_writes_is_refused(write):
    with pytest.raises(NotImplementedError, match="the conversion writes into a tensor by"):
        write(Traced.of("a", (2, 3), torch.float32))


def test_a_call_with_several_results_runs_once():
    known = {}
    for index, part in enumerate(torch.chunk(Traced.of("a", (4, 2), torch.float32), 4)):
        assert torch.equal(
            evaluate(part, {"a": torch.arange(8.0).view(4, 2)}, known)[0], torch.arange(8.0)[2 * index :][:2]
        )
    assert len(known) == 1
