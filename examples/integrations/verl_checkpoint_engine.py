"""verl: a backend of its checkpoint engines, from the trainers' shards to the rollouts; verl itself gathers nothing.

actor_rollout_ref.rollout.checkpoint_engine.backend=fsdp2x
actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_checkpoint_engine   # on the workers' PYTHONPATH
+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.fsdp2x.group=gloo     # or nccl: rollouts on other hosts
"""

import asyncio
import functools
import queue
import secrets
import socket

import ray.util
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name
from verl.workers.engine import FSDPEngine

import fsdp2x
from fsdp2x.rl.sync.receiver.engine import Receiver
from fsdp2x.rl.sync.receiver.engine_group import GroupReceiver

TIMEOUT_S = 300.0


@CheckpointEngineRegistry.register("fsdp2x")
class Fsdp2xCheckpointEngine(CheckpointEngine):
    """One for each trainer, which verl tells whether it is the master, and one for each worker of the rollouts."""

    trainer = None  # whose weights verl sends: noted when verl asks for them

    def __init__(self, bucket_size, is_master=None, dtype="bfloat16", group=None):
        self.bucket_size, self.is_master, self.is_rollout = bucket_size, is_master, is_master is None
        self.dtype, self.group = getattr(torch, dtype), group
        self.receiver: Receiver | None = None
        self.target: fsdp2x.sync.Peer | fsdp2x.sync.GroupPeer | None = None

    def prepare(self):
        """Returns where this process listens: each rollout, or the trainers' master for their group with rollouts."""
        if self.is_rollout:
            # One bucket, so trainers wait for a slow rollout.
            self.arrived = queue.Queue(maxsize=1)
            if self.group is None:
                self.receiver = Receiver(f"@fsdp2x-verl-{secrets.token_hex(8)}", self._put, timeout_s=TIMEOUT_S)
                return {"address": self.receiver.address}
        elif self.is_master and self.group is not None:
            host = ray.util.get_node_ip_address()
            with socket.create_server((host, 0)) as free:
                return {"address": f"tcp://{host}:{free.getsockname()[1]}"}
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        place = {"addresses": [each["address"] for each in metadata if each], "num_rollouts": rollout_world_size}
        return tuple(
            {key: [value] * world_size for key, value in place.items()}
            for world_size in (actor_wg_world_size, rollout_world_size)
        )

    def init_process_group(self, addresses, num_rollouts):
        if self.is_rollout:
            if self.group is not None:
                self.receiver = GroupReceiver(addresses[0], self._put, timeout_s=TIMEOUT_S)
        elif self.group is None:
            self.target = fsdp2x.sync.Peer(addresses)
        else:
            self.target = fsdp2x.sync.GroupPeer(addresses[0], num_rollouts, backend=self.group)

    async def send_weights(self, weights, global_steps=None):
        """``weights``, verl's generator of gathered parameters, is not drawn from."""
        model, lora = self.trainer.module, self.trainer.model_config.lora
        options = {"merge_adapters": hasattr(model, "peft_config") and lora.get("merge", False), "dtype": self.dtype}
        with fsdp2x.sync.connect(model, self.target, bucket_bytes=self.bucket_size, **options) as sync:
            sync.push(version=global_steps or 0)

    async def receive_weights(self, global_steps=None):
        push = asyncio.create_task(asyncio.to_thread(self._receive))
        while (items := await asyncio.to_thread(self.arrived.get)) is not None:
            for name, tensor in items:
                yield name, tensor.to(get_device_name())
        if (status := await push)["state"] != "clean":
            raise RuntimeError(f"the weights are {status['state']}: {status['reason']}")

    def finalize(self):
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = self.target = None

    def _receive(self):
        try:
            return self.receiver.receive(TIMEOUT_S)
        finally:
            self._put(None)

    def _put(self, items):
        self.arrived.put(items, timeout=TIMEOUT_S)


def _noting(ask):
    @functools.wraps(ask)
    def get_per_tensor_param(engine, *args, **kwargs):
        Fsdp2xCheckpointEngine.trainer = engine
        return ask(engine, *args, **kwargs)

    return get_per_tensor_param


FSDPEngine.get_per_tensor_param = _noting(FSDPEngine.get_per_tensor_param)
