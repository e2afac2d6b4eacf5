"""``WeightSource`` in the hands of what vLLM's trainer classes do with a source: chunks of their own, kept tensors."""

import pytest
import torch

import fsdp2x
from engines import step
from engines import wire as whole
from fsdp2x.sync import WeightSource
from harness import distributed
from models import STACK_UNITS, Stack, build, mixed_stack, tiny_vlm
from reference import same, shard

MODELS = ["qwen3", "qwen3_moe", "mixtral", "vlm", "tied"]


def make_model(name):
    if name == "vlm":
        return fsdp2x.fully_shard(tiny_vlm())
    if name != "tied":
        return fsdp2x.fully_shard(build(name))
    model = build("qwen3")
    model.lm_head.weight = model.model.embed_tokens.weight
    return fsdp2x.fully_shard(model)


def sent_in_chunks(source, chunk_bytes):
    """As the packed broadcast: tensors until a chunk is full, which is glued then; what was declared says how."""
    declared, chunks, waiting, num_bytes = source.metadata(), [], [], 0
    for param, (name, tensor) in zip(declared, source, strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == (param.name, param.dtype, param.shape)
        waiting.append(tensor.contiguous().view(-1).view(torch.uint8))
        num_bytes += waiting[-1].numel()
        if num_bytes > chunk_bytes:
            chunks.append(torch.cat(waiting))
            waiting, num_bytes = [], 0
    stream = torch.cat([*chunks, *waiting])
    found, begin = {}, 0
    for param in declared:
        end = begin + torch.Size(param.shape).numel() * param.dtype.itemsize
        found[param.name] = stream[begin:end].clone().view(param.dtype).view(param.shape)
        begin = end
    assert begin == stream.numel()
    return found


@pytest.mark.parametrize("transport", ["shm", "process_group"])
@pytest.mark.parametrize("name", MODELS)
@distributed(world_sizes=(1, 2, 3))
def test_what_arrives_is_the_model(ctx, name, transport):
    """Chunks of any size, tensors kept to the end, a second pass after a step, against the gathered weights."""
    model = make_model(name)
    source = WeightSource(model, torch.bfloat16, bucket_bytes=3000, transport=transport)
    for _ in range(2):
        expected = whole(model, dtype=torch.bfloat16)
        assert {param.name for param in source.metadata()} == set(expected)
        for chunk_bytes in (1, 5000, 1 << 30):
            same(dict(sorted(sent_in_chunks(source, chunk_bytes).items())), dict(sorted(expected.items())))
        same(dict(sorted(dict(list(source)).items())), dict(sorted(expected.items())))
        step(model)


@pytest.mark.parametrize("name", MODELS)
@distributed(world_sizes=(2,))
def test_groups_are_layers(ctx, name):
    """In one piece each, in rising order, stack by stack; what stands before and after is not in one of them."""
    source = WeightSource(make_model(name), bucket_bytes=3000)
    groups, names = source.groups(), [param.name for param in source.metadata()]
    assert [name for group in groups for name in group] == names and source.held_names() is None
    stacks = [{layer_number(name) for name in group} for group in groups]
    assert all(len(numbers) == 1 for numbers in stacks)
    numbers = [next(iter(one)) for one in stacks]
    assert len(set(numbers)) >= len(numbers) - 1, "a layer lies in two places"
    inner = [number for number in numbers if number is not None]
    assert numbers in (inner, [None, *inner], [*inner, None], [None, *inner, None]) and len(inner) >= 2
    for stack in {prefix for prefix, _ in inner}:
        found = [number for prefix, number in inner if prefix == stack]
        assert found == sorted(set(found))
    taken = list(source.iter_groups())
    assert [group for group, _ in taken] == groups
    same({n: t for group, tensors in taken for n, t in zip(group, tensors, strict=True)}, dict(list(source)))


def layer_number(name):
    parts = name.split(".")
    return next(((".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdigit()), None)


@distributed(world_sizes=(2,))
def test_a_vision_model_is_put_in_order(ctx):
    """The weights between its two stacks come last, as in vLLM."""
    model = fsdp2x.fully_shard(tiny_vlm())
    names = [param.name for param in WeightSource(model).metadata()]
    assert sorted(names) == sorted(whole(model)) and names != list(whole(model))


@distributed(world_sizes=(2, 3))
def test_a_rank_that_only_takes_part(ctx):
    model = shard(ctx, mixed_stack(), STACK_UNITS)
    source = WeightSource(model, receive=ctx.rank == 0, bucket_bytes=300)
    found = dict(list(source))
    assert list(found) == [param.name for param in source.metadata()]
    expected = dict(sorted(whole(model).items()))
    if ctx.rank == 0:
        same(dict(sorted(found.items())), expected)
    assert all((tensor is None) == (ctx.rank > 0) for tensor in found.values())


@distributed(world_sizes=(2,))
def test_what_is_refused(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    with pytest.raises(ValueError, match="WeightSource: keep: no parameter matches 'nope'"):
        WeightSource(model, keep={"nope": torch.float32})
    with pytest.raises(ValueError, match="bucket_bytes must be positive"):
        WeightSource(model, bucket_bytes=0)
    source = WeightSource(model)

    def ask(*_):
        with pytest.raises(RuntimeError, match="WeightSource: a forward of the model is running. Send between"):
            next(iter(source))

    hook = model.blocks[1].register_forward_hook(ask)
    model(torch.randn(2, 6))
    hook.remove()
    assert len(list(source)) == len(source.metadata())
