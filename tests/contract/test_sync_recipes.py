"""Weight updates as trainers of reinforcement learning do them, replayed with their engines' method names."""

import asyncio
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

import fsdp2x
import verl_engine
from engines import Layerwise, step
from engines import wire as gathered
from fsdp2x.sync import InProcess, SyncError, WeightSource
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


# ---- ROLL on vLLM: buckets (slime on SGLang is what `test_sync_sglang.py` tests)


class RollVllm:
    """ROLL's extension of vLLM's workers, one of them: a flat bucket with its table, of each rank's its own."""

    def __init__(self, rank):
        self.rank, self.engine = rank, Layerwise()

    def serialize(self, items):
        """As its trainers do: bytes one after the other, without gaps."""
        flat, table = [], []
        for name, tensor in items:
            begin = sum(map(len, flat))
            flat.append(tensor.flatten().view(torch.int8))
            place = {"start_idx": begin, "end_idx": begin + len(flat[-1]), "numel": len(flat[-1])}
            table.append({"name": name, "shape": list(tensor.shape), "dtype": tensor.dtype, **place})
        return pickle.dumps({"bucket": torch.cat(flat), "tensors_meta": table})

    async def update_parameter_in_bucket(self, serialized_named_tensors, is_lora=False):
        assert not is_lora
        found = pickle.loads(serialized_named_tensors[self.rank])
        for place in found["tensors_meta"]:
            view = found["bucket"][place["start_idx"] : place["end_idx"]].view(place["dtype"])
            self.engine.load([(place["name"], view.reshape(place["shape"]))])

    def process_weights_after_loading(self):
        self.engine.finish()


@distributed(world_sizes=(2,))
def test_roll(ctx):
    """Its trainers gather a bucket into a list, each rank's payload at its place; two ranks infer."""
    model = make_model()
    worker = RollVllm(1)

    def update(items):
        payloads = [None] * ctx.world
        dist.all_gather_object(payloads, worker.serialize(items))
        asyncio.run(worker.update_parameter_in_bucket(payloads))

    target = InProcess(update, copies=False, finish=lambda version: worker.process_weights_after_loading())
    with fsdp2x.sync.connect(model, target, dtype=torch.bfloat16, bucket_bytes=3000) as sync:
        for version in range(2):
            sync.push(version=version)
            same(dict(sorted(worker.engine.weights.items())), wire(model, dtype=torch.bfloat16))
            step(model)


# ---- ChatLearn: blocks of layers, each whole before it is sent


class Chatlearn:
    """Its engine's side: handles of a block by name; vLLM keeps what it rebuilds of them until the update ends."""

    def __init__(self):
        self.engine, self.blocks = Layerwise(), 0

    def update_weights_from_ipc_handles(self, reduce_data):
        for name, (rebuild_func, rebuild_args) in reduce_data.items():
            self.engine.load([(name, rebuild_func(*rebuild_args))])
        self.blocks += 1


@distributed(world_sizes=(2, 3))
def test_chatlearn(ctx):
    """A handle names the memory of a tensor, which it does not copy."""
    model, rollout = make_model(), Chatlearn()
    source = WeightSource(model, torch.bfloat16, bucket_bytes=3000)
    for _ in range(2):
        for names, tensors in source.iter_groups():
            handles = {name: reduce_tensor(tensor) for name, tensor in zip(names, tensors, strict=True)}
            rollout.update_weights_from_ipc_handles(handles)
        rollout.engine.finish()
        same(dict(sorted(rollout.engine.weights.items())), wire(model, dtype=torch.bfloat16))
        step(model)
    assert rollout.blocks == 2 * len(source.groups())
