"""Pushes weights of a sharded model into running inference engines: ``connect`` once, ``push`` for each version."""

import sys

from fsdp2x.rl.sync.receiver import engine, engine_adapter, engine_group, vllm_worker
from fsdp2x.rl.sync.session import Session, connect
from fsdp2x.rl.sync.source import WeightSource
from fsdp2x.rl.sync.targets.base import PushReport, SyncError
from fsdp2x.rl.sync.targets.group_peer import GroupPeer
from fsdp2x.rl.sync.targets.in_process import InProcess
from fsdp2x.rl.sync.targets.peer import Peer
from fsdp2x.rl.sync.targets.sglang import Sglang
from fsdp2x.rl.sync.targets.vllm import Vllm

__all__ = [
    "GroupPeer",
    "InProcess",
    "Peer",
    "PushReport",
    "Session",
    "Sglang",
    "SyncError",
    "Vllm",
    "WeightSource",
    "connect",
]

# Engines load classes by path, such as fsdp2x.sync.vllm_worker.Fsdp2xWorker.
for _module in (engine, engine_adapter, engine_group, vllm_worker):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
