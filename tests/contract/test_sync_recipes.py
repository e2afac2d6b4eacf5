"""Weight updates as trainers of reinforcement learning do them, replayed with their engines' method names."""

import asyncio
import base64
import io
import queue
import secrets
import threading

import pytest
import torch
import torch.distributed as dist

import fsdp2x
from engines import Layerwise
from fsdp2x.sync import InProcess, Peer, Sglang, SyncError, WeightSource
from fsdp2x.sync.engine import Receiver
from harness import distributed
from models import build, tiny_lora
from reference import same
from sglang_engine import Server, Unpickler, serving


def make_model(name="qwen3_moe"):
    model = build(name)
    for layer in model.model.layers:
        fsdp2x.fully_shard(layer)
    return fsdp2x.fully_shard(model)


def wire(model, **options):
    found = {}
    for bucket in fsdp2x.export.stream(model, **options):
        found.update((name, tensor.clone()) for name, tensor in bucket.items())
    return dict(sorted(found.items()))


def step(model):
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.5)


# ---- TRL: generation in the trainer's process, a tensor at a time


class Generation:
    """What calls `_iter_fsdp2_params` in TRL: each tensor is a call of the engine's loader."""

    def __init__(self, model):
        self.model, self.engine, self.resets = model, Layerwise(), 0

    def _iter_fsdp2_params(self, module):
        raise NotImplementedError

    def sync_weights(self):
        for name, param in self._iter_fsdp2_params(self.model):
            self.engine.load([(name, param)])
        self.engine.finish()
        self.resets += 1


@pytest.mark.parametrize("kind", ["experts", "lora"])
@distributed(world_sizes=(2,))
def test_trl(ctx, kind):
    """With experts under the names that engines load, and adapters merged, which TRL does on the model itself."""
    twin = tiny_lora()
    with torch.no_grad():
        for param in twin.parameters():
            param.add_(0.01)
    model = make_model() if kind == "experts" else fsdp2x.fully_shard(twin)

    class Ours(Generation):
        def _iter_fsdp2_params(self, module):
            return WeightSource(module, torch.bfloat16, merge_adapters=kind == "lora")

    generation = Ours(model)
    for _ in range(2):
        generation.sync_weights()
        if kind == "experts":
            same(dict(sorted(generation.engine.weights.items())), wire(model, dtype=torch.bfloat16))
            step(model)
    assert not any("lora_" in name or "base_layer" in name for name in generation.engine.weights)


# ---- verl: a backend of its checkpoint engines


class Backend:
    """A `CheckpointEngine` of verl, of which trainers and rollouts have one each, for one update."""

    def __init__(self, model=None):
        self.model, self.receiver, self.target = model, None, None

    def prepare(self):
        if self.model is not None:
            return {}
        self.arrived: queue.Queue = queue.Queue()
        self.receiver = Receiver(f"@verl-{secrets.token_hex(8)}", lambda items: self.arrived.put(items))
        return {"address": self.receiver.address}

    @classmethod
    def build_topology(cls, trainer_world_size, rollout_world_size, metadata):
        addresses = [entry["address"] for entry in metadata if entry]
        return {"addresses": [addresses] * trainer_world_size}, {"addresses": [None] * rollout_world_size}

    def init_process_group(self, addresses):
        self.target = Peer(addresses) if addresses else None

    async def send_weights(self, weights):
        """`weights`, verl's own generator of gathered parameters, is not drawn from: nobody gathers."""
        with fsdp2x.sync.connect(self.model, self.target, dtype=torch.bfloat16, bucket_bytes=3000) as sync:
            sync.push(version=0)

    async def receive_weights(self):
        def receive():
            self.arrived.put(self.receiver.receive(60.0))

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        while isinstance(items := await asyncio.to_thread(self.arrived.get, timeout=60), list):
            for name, tensor in items:
                yield name, tensor
        thread.join(60)
        assert items["state"] == "clean", items

    def finalize(self):
        if self.receiver is not None:
            self.receiver.close()


@distributed(world_sizes=(2, 3))
def test_verl(ctx):
    """Trainers on all ranks, two rollouts beside rank 0; an update after the other, each with backends of its own."""
    model = make_model()
    for _ in range(2):
        trainer, rollouts = Backend(model), [Backend() for _ in range(2 if ctx.rank == 0 else 0)]
        metadata = [None] * ctx.world
        dist.all_gather_object(metadata, [trainer.prepare(), *(rollout.prepare() for rollout in rollouts)])
        of_trainers, of_rollouts = Backend.build_topology(
            ctx.world, 2, [one for of_rank in metadata for one in of_rank]
        )
        trainer.init_process_group(of_trainers["addresses"][ctx.rank])
        for index, rollout in enumerate(rollouts):
            rollout.init_process_group(of_rollouts["addresses"][index])
        found = [{} for _ in rollouts]

        async def take(rollout, into):
            async for name, tensor in rollout.receive_weights():
                into[name] = tensor

        threads = [
            threading.Thread(target=lambda r=rollout, i=into: asyncio.run(take(r, i)), daemon=True)
            for rollout, into in zip(rollouts, found, strict=True)
        ]
        for thread in threads:
            thread.start()
        asyncio.run(trainer.send_weights(iter(())))
        for thread in threads:
            thread.join(60)
        for backend in (trainer, *rollouts):
            backend.finalize()
        expected = wire(model, dtype=torch.bfloat16)
        for into in found:
            same(dict(sorted(into.items())), expected)
        step(model)


# ---- slime and ROLL on SGLang; ROLL on vLLM: buckets


@distributed(world_sizes=(2,))
def test_slime(ctx):
    """Pause, flush, buckets, label, continue, over HTTP; a server that refuses stays paused until the next update."""
    model, addresses = make_model(), [None]
    expected = wire(model, dtype=torch.bfloat16)
    server = Server({name: value.shape for name, value in expected.items()}, num_workers=2)
    with serving(server) as url:
        addresses = [url]
        dist.broadcast_object_list(addresses)
        with fsdp2x.sync.connect(model, Sglang(addresses[0]), dtype=torch.bfloat16, bucket_bytes=3000) as sync:
            server.broken["update_weights_from_tensor"] = "discard the whole weights"
            with pytest.raises(SyncError, match="discard the whole weights"):
                sync.push(version=0)
            sync.push(version=1)
        if ctx.rank == 0:
            assert server.generate() == ("1", "1")
            for weights in server.weights:
                same(dict(sorted(weights.items())), expected)
        dist.barrier()


class RollWorker:
    """ROLL's extension of vLLM's workers: one flat bucket with its table, loaded at once."""

    def __init__(self, rank):
        self.rank, self.engine = rank, Layerwise()

    def update_parameter_in_bucket(self, serialized_named_tensors, is_lora=False):
        assert not is_lora
        places = Unpickler(io.BytesIO(base64.b64decode(serialized_named_tensors[self.rank]))).load()
        flat = places["flattened_tensor"]
        items = [
            (place.name, flat[place.start_idx : place.end_idx].view(place.dtype).view(place.shape))
            for place in places["metadata"]
        ]
        self.engine.load(items)

    def process_weights_after_loading(self):
        self.engine.finish()


@distributed(world_sizes=(2,))
def test_roll(ctx):
    from fsdp2x.hf.names import TensorSpec
    from fsdp2x.sync.targets.sglang_payload import flattened_bucket

    model, worker = make_model(), RollWorker(1)

    def update(items):
        specs = [TensorSpec(name, tensor.shape, tensor.dtype) for name, tensor in items]
        payload = flattened_bucket(specs, [tensor for _, tensor in items])
        worker.update_parameter_in_bucket([None, payload])

    target = InProcess(update, copies=False, finish=lambda version: worker.process_weights_after_loading())
    with fsdp2x.sync.connect(model, target, dtype=torch.bfloat16, bucket_bytes=3000) as sync:
        for version in range(2):
            sync.push(version=version)
            same(dict(sorted(worker.engine.weights.items())), wire(model, dtype=torch.bfloat16))
            step(model)


# ---- ChatLearn: blocks of layers, each whole before it is sent


class Chatlearn:
    """Its engine's side: the tensors of a block by name, which stay alive until the block is loaded."""

    def __init__(self):
        self.weights, self.blocks = {}, 0

    def update_weights_from_ipc_handles(self, reduce_data):
        self.weights.update((name, tensor.clone()) for name, tensor in reduce_data.items())
        self.blocks += 1


@distributed(world_sizes=(2, 3))
def test_chatlearn(ctx):
    model, engine = make_model(), Chatlearn()
    source = WeightSource(model, torch.bfloat16)
    for _ in range(2):
        for names, tensors in source.iter_groups():
            engine.update_weights_from_ipc_handles(dict(zip(names, tensors, strict=True)))
        same(dict(sorted(engine.weights.items())), wire(model, dtype=torch.bfloat16))
        step(model)
    assert engine.blocks == 2 * len(source.groups())
