"""Optimizers that step over the local shards of all parameters in one call, and gradient clipping."""

from fsdp2x.optim.adamw import AdamW
from fsdp2x.optim.clip import clip_grad_norm_
from fsdp2x.optim.ema import EMA
from fsdp2x.optim.local_optimizer import local_optimizer
from fsdp2x.optim.muon import Muon, muon_param_groups

__all__ = ["EMA", "AdamW", "Muon", "clip_grad_norm_", "local_optimizer", "muon_param_groups"]
