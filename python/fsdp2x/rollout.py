"""Samples rollouts: an engine that returns log-probabilities and takes new weights, and its client for trainers."""

from fsdp2x.rl.rollout.batch import sample
from fsdp2x.rl.rollout.client import ColocatedRollout, RolloutClient, RolloutError
from fsdp2x.rl.rollout.dispatch import EngineState
from fsdp2x.rl.rollout.sampling import Completion, Sampling
from fsdp2x.rl.rollout.server import RolloutServer

__all__ = [
    "ColocatedRollout",
    "Completion",
    "EngineState",
    "RolloutClient",
    "RolloutError",
    "RolloutServer",
    "Sampling",
    "sample",
]
