"""Vision-language models: ranks with and without images in one step, frozen and trainable towers, uncast inputs."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import models
from fsdp2x.models.freeze import freeze_module_prefix
from fsdp2x.models.vision import shard_vision_language
from harness import distributed
from reference import both_transports, grads, params, train_alike

IMAGE_TOKEN = 36
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def tiny_vlm():
    model = models.tiny_vlm()
    model.config.image_token_id = IMAGE_TOKEN
    return model


def batch(rank, step, image):
    """Text, with an image of 4 x 4 patches (4 tokens after merging) in front when `image`."""
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    ids = torch.randint(3, IMAGE_TOKEN, (1, 9), generator=generator)
    if not image:
        return {"input_ids": ids, "labels": ids.clone()}
    ids = torch.cat([torch.full((1, 4), IMAGE_TOKEN), ids], dim=1)
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    kinds = (ids == IMAGE_TOKEN).int()
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
    return {
        "input_ids": ids,
        "labels": labels,
        "mm_token_type_ids": kinds,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def loss_of(images):
    """`images(step, rank)` says who has one."""
    return lambda model, rank, step: model(**batch(rank, step, images(step, rank))).loss


@distributed(world_sizes=(2, pytest.param(3, marks=pytest.mark.full)), only_fsdp2x=True)
@pytest.mark.parametrize("frozen", [True, False])
@both_transports
def test_an_image_on_one_rank_only(ctx, transport, frozen):
    """Rank 0, then another rank, then no rank has an image. A frozen tower stays unchanged, bit for bit."""
    reference = tiny_vlm()
    if frozen:
        assert freeze_module_prefix(reference, "visual") > 0
    ours = copy.deepcopy(reference)
    before = {name: param.detach().clone() for name, param in ours.named_parameters() if "visual" in name}
    shard_vision_language(ours, transport=transport)
    assert not any(isinstance(module, fsdp2x.FSDPModule) for module in ours.model.visual.modules())
    has_image = loss_of(lambda step, rank: rank == {0: 0, 1: ctx.world - 1}.get(step))
    train_alike(ctx, reference, ours, has_image, evens=transport != "shm", **TOLERANCE)
    after = params(ours)
    for name, value in before.items():
        assert torch.equal(after[name], value) == frozen, name
    has_image(ours, ctx.rank, 2).backward()
    unused = {param.grad is None for name, param in ours.named_parameters() if "visual" in name}
    assert unused == {frozen or transport == "shm"}, "zeros, where every rank has to send something"


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_inputs_of_the_tower_are_not_cast(ctx):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, seen = tiny_vlm(), {}
    visual = model.model.visual

    def look(name):
        return lambda module, args, kwargs: seen.update({name: (args, kwargs)})

    shard_vision_language(model, mp_policy=policy)
    model.model.register_forward_pre_hook(look("root"), with_kwargs=True)
    visual.blocks[0].register_forward_pre_hook(look("block"), with_kwargs=True)
    model.model.language_model.layers[0].register_forward_pre_hook(look("layer"), with_kwargs=True)
    model(**batch(ctx.rank, 0, True)).loss.backward()

    def dtypes(name):
        args, kwargs = seen[name]
        flat = [*args, *kwargs.values(), *kwargs.get("position_embeddings", ())]
        return {one.dtype for one in flat if isinstance(one, torch.Tensor) and one.is_floating_point()}

    assert dtypes("root") == {torch.float32}, "the pixels as they came; the tower chooses its dtype itself"
    assert torch.float32 in dtypes("block"), "the rotary embeddings stay float32"
    assert dtypes("layer") == {torch.bfloat16}
    assert all(grad.isfinite().all() for grad in grads(model).values() if grad is not None)


@distributed(world_sizes=(1,))
def test_towers_that_are_not_there(ctx):
    with pytest.raises(ValueError, match="has no module 'vision_model'"):
        shard_vision_language(tiny_vlm(), tower="vision_model")
    with pytest.raises(ValueError, match="has no module named visual, .*tower="):
        shard_vision_language(models.build("llama"))
