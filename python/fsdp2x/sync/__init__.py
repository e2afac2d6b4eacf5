"""Weights of a sharded model into running inference engines: ``connect`` once, then ``push`` a version at a time."""

from fsdp2x.sync.outcomes import PushReport, SyncError
from fsdp2x.sync.session import Session, connect
from fsdp2x.sync.source import WeightSource
from fsdp2x.sync.targets.checkpoint_engine import CheckpointEngine
from fsdp2x.sync.targets.in_process import InProcess
from fsdp2x.sync.targets.peer import Peer
from fsdp2x.sync.targets.sglang import Sglang
from fsdp2x.sync.targets.vllm import Vllm

__all__ = [
    "CheckpointEngine",
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
