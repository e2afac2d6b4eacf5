"""PEFT's adapters attached to a sharded model: trained as unsharded, switched, removed, and read by plain PEFT."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp2x
import models
from fsdp2x.lifecycle.tree import unit_states
from harness import distributed
from reference import adamw_of, only_fsdp2x, same, shard_auto, train_alike
from training import shared_folder

pytest.importorskip("peft")
EXACT = {"rtol": 1e-5, "atol": 1e-6}


def config(**settings):
    from peft import LoraConfig

    # Random in both factors, so that both have gradients from the first step on.
    return LoraConfig(**{"r": 3, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **settings})


def around(model):
    from peft import get_peft_model

    return get_peft_model(model, config())


def in_place(model):
    # transformers asks for a newer PEFT than its call needs.
    with mock.patch("transformers.integrations.peft.check_peft_version"):
        model.add_adapter(config(), "default")
    return model


def with_embeddings(model):
    from peft import get_peft_model

    return get_peft_model(model, config(target_modules=["embed_tokens", "q_proj"]))


def attach(ctx, how, twin, model):
    """Each rank draws other adapters; the first one's count."""
    torch.manual_seed(0)
    twin = how(twin)
    torch.manual_seed(ctx.rank)
    return twin, how(model)


def loss_of(model, rank, step):
    return model(**models.batch("llama", 10 * step + rank)).loss


def both(ctx, **options):
    twin = models.build("llama", use_cache=False)
    return twin, shard_auto(ctx, copy.deepcopy(twin), **options)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("transport", ["shm", "process_group"])
@pytest.mark.parametrize("when", ["first forward", "between steps"])
@pytest.mark.parametrize("how", [around, in_place, with_embeddings])
def test_trains_and_is_saved_as_unsharded(ctx, how, when, transport):
    from peft import PeftModel

    only_fsdp2x(ctx)
    twin, model = both(ctx, transport=transport)
    if when == "between steps":
        train_alike(ctx, twin, model, loss_of, num_steps=1, **EXACT)
    base = copy.deepcopy(twin)
    twin, model = attach(ctx, how, twin, model)
    optimizers = adamw_of(twin, model)
    train_alike(ctx, twin, model, loss_of, optimizers, num_steps=2, **EXACT)
    adapters = {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
    same(dict(fsdp2x.full_tensors(model, params=lambda name, param: "lora_" in name)), adapters)
    with shared_folder(ctx) as folder:
        save = fsdp2x.save_adapter if how is in_place else type(model).save_pretrained
        save(model, folder / "saved")
        loaded = PeftModel.from_pretrained(base, str(folder / "saved"))
        dist.barrier()
    same(loss_of(loaded, 0, 9), loss_of(twin, 0, 9), **EXACT)
    same(loss_of(model, 0, 9).detach(), loss_of(twin, 0, 9).detach(), **EXACT)


@distributed(world_sizes=(2,))
def test_adapters_are_switched_and_removed(ctx):
    only_fsdp2x(ctx)
    twin, model = both(ctx)
    twin, model = attach(ctx, around, twin, model)
    sides = (twin, model)

    def train(num_steps=1):
        train_alike(ctx, twin, model, loss_of, num_steps=num_steps, **EXACT)

    def is_the_same():
        same(loss_of(model, ctx.rank, 5).detach(), loss_of(twin, ctx.rank, 5).detach(), **EXACT)

    train()
    for side, seed in ((twin, 0), (model, ctx.rank)):
        torch.manual_seed(seed)
        side.add_adapter("second", config(r=2))
        side.set_adapter("second")
    train()
    for side in sides:
        side.set_adapter("default")
    train()
    with model.disable_adapter(), twin.disable_adapter():
        is_the_same()
    for side in sides:
        side.delete_adapter("default")
        side.set_adapter("second")
    train()
    assert len(list(model.named_parameters())) == len(list(twin.named_parameters()))
    twin, model = (side.unload() for side in sides)
    is_the_same()
    assert not any(group.is_replicated for state in unit_states(model) for group in state.groups)
    twin, model = attach(ctx, around, twin, model)
    train()
