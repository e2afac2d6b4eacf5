"""A verl for tests: the environment of its checkpoint engines in release 0.9.1, with the examples/integrations backend.

verl's manager runs in the driver, and its engines run in trainer and rollout processes. Here a rank is a trainer, and
its rollouts run in threads.
"""

import abc
import asyncio
import contextlib
import importlib.util
import inspect
import sys
import threading
import types
from pathlib import Path
from unittest import mock

import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "verl_checkpoint_engine.py"


class CheckpointEngineRegistry:
    _registry = {}

    def register(backend):
        def wrapper(cls):
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def get(cls, backend):
        return cls._registry[backend]

    @classmethod
    def new(cls, backend, *args, **kwargs):
        return cls.get(backend)(*args, **kwargs)


class CheckpointEngine(abc.ABC):
    wire_format = "named_tensors"

    @abc.abstractmethod
    def prepare(self): ...

    @classmethod
    @abc.abstractmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata): ...

    @abc.abstractmethod
    def init_process_group(self, **kwargs): ...

    @abc.abstractmethod
    def finalize(self): ...

    @abc.abstractmethod
    async def send_weights(self, weights, global_steps=None): ...

    @abc.abstractmethod
    async def receive_weights(self, global_steps=None): ...


def parameters(kind, name):
    found = inspect.signature(inspect.getattr_static(kind, name).__get__(None, kind)).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


def same_methods(kind, base):
    """Whether a backend has all that the base class asks for, with the same parameters."""
    assert base.__abstractmethods__ <= set(dir(kind)), base.__abstractmethods__
    for name in base.__abstractmethods__ - {"init_process_group"}:  # which takes what `build_topology` says
        assert parameters(kind, name) == parameters(base, name), name
    assert inspect.iscoroutinefunction(kind.send_weights) and kind.wire_format == base.wire_format


class FSDPEngine:
    """Gives weights as verl's does: nothing is gathered before the generator is drawn from, which fails here."""

    def __init__(self, module, lora):
        self.module, self.model_config = module, types.SimpleNamespace(lora=lora)

    def get_per_tensor_param(self, layered_summon=False, base_sync_done=False, **kwargs):
        def gathered():
            raise AssertionError("verl gathers")
            yield

        return gathered(), None


@contextlib.contextmanager
def installed():
    """While it lasts `import verl` finds the names above, and the example has registered itself with them."""
    names = ("verl", "verl.checkpoint_engine", "verl.utils", "verl.utils.device", "verl.workers", "verl.workers.engine")
    modules = {name: types.ModuleType(name) for name in (*names, "ray", "ray.util")}
    modules["ray"].util = modules["ray.util"]
    modules["ray.util"].get_node_ip_address = lambda: "127.0.0.1"
    modules["verl.utils.device"].get_device_name = lambda: "cpu"
    modules["verl.workers.engine"].FSDPEngine = FSDPEngine
    modules["verl.checkpoint_engine"].CheckpointEngine = CheckpointEngine
    modules["verl.checkpoint_engine"].CheckpointEngineRegistry = CheckpointEngineRegistry
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(CheckpointEngineRegistry, "_registry", {}),
        mock.patch.object(FSDPEngine, "get_per_tensor_param", FSDPEngine.get_per_tensor_param),
    ):
        spec = importlib.util.spec_from_file_location("verl_checkpoint_engine", EXAMPLE)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        yield


class Rollout:
    """Takes the checkpoint engine's weights as they arrive, like verl's worker next to an inference engine."""

    def __init__(self, engine):
        self.checkpoint_engine, self.weights, self.error = engine, {}, None

    async def update_weights(self, global_steps=None):
        async for name, tensor in self.checkpoint_engine.receive_weights(global_steps=global_steps):
            self.weights[name] = tensor

    def start(self, global_steps):
        def run():
            try:
                asyncio.run(self.update_weights(global_steps))
            except RuntimeError as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()


def update_weights(trainer, actor, rollouts, global_steps):
    """Runs the manager's calls of one update, in its order. The rollouts are on rank 0."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (trainer.prepare(), [each.checkpoint_engine.prepare() for each in rollouts]))
    of_trainers, of_rollouts = [one for one, _ in everyone], everyone[0][1]
    topology = type(trainer).build_topology(len(of_trainers), len(of_rollouts), of_trainers + of_rollouts)
    for keywords, metadata in zip(topology, (of_trainers, of_rollouts), strict=True):
        assert all(len(values) == len(metadata) for values in keywords.values())
    trainer.init_process_group(**{key: values[dist.get_rank()] for key, values in topology[0].items()})
    for index, rollout in enumerate(rollouts):
        rollout.checkpoint_engine.init_process_group(**{key: values[index] for key, values in topology[1].items()})
        rollout.start(global_steps)
    try:
        per_tensor_param, _ = actor.get_per_tensor_param()
        asyncio.run(trainer.send_weights(per_tensor_param, global_steps=global_steps))
    finally:
        for rollout in rollouts:
            rollout.join()
        for engine in (trainer, *(rollout.checkpoint_engine for rollout in rollouts)):
            engine.finalize()
