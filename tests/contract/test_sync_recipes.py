"""Weight updates as trainers of reinforcement learning do them, replayed with their engines' method names."""

import copy

import pytest
import torch

import fsdp2x
import verl_engine
from engines import step
from engines import wire as gathered
from fsdp2x.sync import SyncError
from harness import distributed
from models import build, tiny_lora
from reference import same


def make_model(name="qwen3_moe"):
    model = build(name)
    for layer in model.model.layers:
        fsdp2x.fully_shard(layer)
    return fsdp2x.fully_shard(model)


def wire(model, **options):
    return dict(sorted(gathered(model, **options).items()))


def adapted():
    """A PEFT model, unsharded, whose adapters change its base."""
    twin = tiny_lora()
    with torch.no_grad():
        for param in twin.parameters():
            param.add_(0.01)
    return twin


def merged(twin):
    """Merges the adapter with PEFT itself and casts to bf16 at the end."""
    whole = copy.deepcopy(twin).merge_and_unload()
    return {name: param.detach().bfloat16() for name, param in sorted(whole.named_parameters())}


# ---- verl: the backend of examples/integrations, by verl's registry


BACKENDS = {"memory": ({}, {}), "group": ({"group": "gloo"}, {}), "lora": ({}, {"merge": True})}


@pytest.mark.parametrize("kind", BACKENDS)
@distributed(world_sizes=(2, 3))
def test_verl(ctx, kind):
    """Trainers on all ranks update two rollouts on rank 0, twice. The second update has new rollouts."""
    options, lora = BACKENDS[kind]
    twin = adapted() if kind == "lora" else None
    model = make_model() if twin is None else fsdp2x.fully_shard(copy.deepcopy(twin))
    with verl_engine.installed():
        new = verl_engine.CheckpointEngineRegistry.new
        actor = verl_engine.FSDPEngine(model, lora)
        trainer = new("fsdp2x", is_master=ctx.rank == 0, bucket_size=3000, **options)
        verl_engine.same_methods(type(trainer), verl_engine.CheckpointEngine)
        for version in (None, 7):
            engines = [new("fsdp2x", bucket_size=3000, **options) for _ in range(2 if ctx.rank == 0 else 0)]
            rollouts = [verl_engine.Rollout(engine) for engine in engines]
            verl_engine.update_weights(trainer, actor, rollouts, version)
            expected = wire(model, dtype=torch.bfloat16) if twin is None else merged(twin)
            for rollout in rollouts:
                same(dict(sorted(rollout.weights.items())), expected)
            for each in (model, twin)[: 1 if twin is None else 2]:
                step(each)


@distributed(world_sizes=(2,))
def test_verl_says_what_failed(ctx):
    """A rollout that takes no weights: an error of the trainers, and of every rollout."""
    with verl_engine.installed():
        new = verl_engine.CheckpointEngineRegistry.new
        actor = verl_engine.FSDPEngine(make_model(), {})
        trainer = new("fsdp2x", is_master=ctx.rank == 0, bucket_size=3000)
        rollouts = [verl_engine.Rollout(new("fsdp2x", bucket_size=3000)) for _ in range(2 if ctx.rank == 0 else 0)]
        for rollout in rollouts[1:]:
            take = rollout.checkpoint_engine._put

            def fails(items, take=take):
                if items is not None:
                    raise ValueError("no room in the rollout")
                take(items)

            rollout.checkpoint_engine._put = fails
        with pytest.raises(SyncError, match="no room in the rollout"):
            verl_engine.update_weights(trainer, actor, rollouts, 1)
        for rollout in rollouts:
            assert "the weights are torn" in str(rollout.error) and "no room" in str(rollout.error)
