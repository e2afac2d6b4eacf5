"""Starts the engine of a run: in each trainer's process, in processes of the run, or a server that already runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from fsdp2x.base.failures import on_rank_0
from fsdp2x.lifecycle.sleep import sleep, wake
from fsdp2x.rl.rollout.client import ColocatedRollout, RolloutClient
from fsdp2x.rl.rollout.sampling import Completion, Sampling
from fsdp2x.rl.sync.targets.base import EngineTarget
from fsdp2x.train.config import ConfigError
from fsdp2x.train.distributed import World
from fsdp2x.train.grpo.config import RolloutSection
from fsdp2x.train.grpo.http_engines import ADAPTER, HttpEngine

END_S = 60


class Engine(Protocol):
    """Interface for sampling. `ask` returns at once, `collect` is collective and waits."""

    target: EngineTarget

    def ask(self, prompts: Sequence, sampling: Sampling) -> None: ...

    def collect(self) -> list[Completion]: ...

    def close(self) -> None: ...


def start_engine(
    config: RolloutSection,
    world: World,
    output: Path,
    build: Callable[[], torch.nn.Module],
    write_config: Callable[[Path], None],
    adapter_base: str | None,
    dtype: torch.dtype,
    closing: contextlib.ExitStack,
) -> Engine:
    """Returns the engine that `rollout` asks for. `closing` ends what is started here. Collective.

    Args:
        build: function that makes the full model, for an engine in this process.
        write_config: function that writes a `config.json` into a folder, for engines that this run starts.
        adapter_base: folder of the base weights, if only an adapter is pushed.
        dtype: dtype of weights and computation of engines that this run makes.

    Raises:
        ConfigError: a run over several hosts asks for engines of this host.
        RolloutError: an engine does not answer.
    """
    if config.engine == "colocated":
        return ColocatedRollout(build().to(world.device, dtype))
    if config.engine in ("vllm", "sglang"):
        adapter = ADAPTER if adapter_base is not None else None
        return HttpEngine(config.engine, config.addresses[0], adapter=adapter, timeout_s=config.timeout_s)
    addresses = config.addresses
    if world.local_size != world.size:
        raise ConfigError("rollout.engine: server is for ranks of one host. Use vllm or sglang across hosts.")
    if not addresses:
        addresses = on_rank_0(lambda: [f"@fsdp2x-grpo-{secrets.token_hex(6)}-{i}" for i in range(config.num_engines)])
        if world.is_main:
            folder = Path(adapter_base or output / "engine").expanduser()
            if adapter_base is None:
                write_config(folder)
            for address in addresses:
                closing.callback(_end, _launch(folder, address, world, dtype, config.timeout_s))
    client = RolloutClient(addresses, contact_s=config.timeout_s, timeout_s=config.timeout_s)
    closing.callback(client.close)
    return client


def _launch(folder: Path, address: str, world: World, dtype: torch.dtype, timeout_s: float) -> subprocess.Popen:
    """Starts a `fsdp2x rollout` process, which ends by itself when its trainers have left."""
    words = [sys.executable, "-m", "fsdp2x", "rollout", str(folder), "--address", address]
    words += ["--device", world.device.type, "--dtype", str(dtype).removeprefix("torch."), "--once", f"{timeout_s:g}"]
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    return subprocess.Popen(words, env=environment)


def _end(process: subprocess.Popen) -> None:
    """Waits for a process that ends when its trainers have left, or else ends it."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def trainer_asleep(engine: Engine, trained: Sequence[tuple[torch.nn.Module, Any]]) -> Iterator[None]:
    """Keeps shards and optimizer state of trained models in CPU memory while a colocated engine samples."""
    asleep = trained if isinstance(engine, ColocatedRollout) else ()
    with contextlib.ExitStack() as stack:
        for model, optimizer in asleep:
            sleep(model, optimizer)
            stack.callback(wake, model, optimizer)
        yield
