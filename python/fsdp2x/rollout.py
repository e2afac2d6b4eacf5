"""Samples responses of a model in this process, with their log-probabilities."""

from fsdp2x.rl.rollout.batch import sample
from fsdp2x.rl.rollout.sampling import Completion, Sampling

__all__ = ["Completion", "Sampling", "sample"]
