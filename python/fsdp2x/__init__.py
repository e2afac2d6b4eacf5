"""Shards HuggingFace models over ranks: FSDP2's ``fully_shard`` on a C++ engine.

``import fsdp2x`` starts nothing: no process group, no thread, no device context.
"""

# First, because it explains what to do if the extension was built for another torch.
from fsdp2x.base import native  # noqa: F401

# isort: split
from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

import torch.distributed.fsdp as _torch_fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp2x import checkpoint, export, moe, optim, sequence
from fsdp2x.base import gloo_threads  # noqa: F401, at the end of the process it waits for gloo
from fsdp2x.install import install, uninstall
from fsdp2x.io.export.stream import full_tensors
from fsdp2x.io.hf.load import LoadReport, from_pretrained, load_hf
from fsdp2x.io.hf.lora import add_lora, load_adapter, save_adapter
from fsdp2x.io.hf.save import save_hf
from fsdp2x.lifecycle.api import fully_shard
from fsdp2x.lifecycle.contexts import accumulate, unsharded
from fsdp2x.lifecycle.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp2x.lifecycle.replicas import check_module_states, sync_module_states
from fsdp2x.lifecycle.sleep import sleep, wake
from fsdp2x.memory import memory_report
from fsdp2x.models.activation_offload import offload_activations
from fsdp2x.models.freeze import freeze_module_prefix
from fsdp2x.models.tiled_mlp import apply_tiled_mlp
from fsdp2x.models.vision import shard_vision_language
from fsdp2x.optim import clip_grad_norm_, local_optimizer
from fsdp2x.optim.rebind import rebind_optimizer
from fsdp2x.plan.describe import describe
from fsdp2x.plan.profile import profile
from fsdp2x.sharding.offload import HostOffloadPolicy, cpu_offload_by_budget

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "GradientReductionHandle",
    "HostOffloadPolicy",
    "LoadReport",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "accumulate",
    "add_lora",
    "apply_tiled_mlp",
    "check_module_states",
    "checkpoint",
    "clip_grad_norm_",
    "cpu_offload_by_budget",
    "describe",
    "export",
    "freeze_module_prefix",
    "from_pretrained",
    "full_tensors",
    "fully_shard",
    "install",
    "load_adapter",
    "load_hf",
    "local_optimizer",
    "memory_report",
    "moe",
    "offload_activations",
    "optim",
    "profile",
    "rebind_optimizer",
    "register_fsdp_forward_method",
    "rl",
    "rollout",
    "save_adapter",
    "save_hf",
    "sequence",
    "shard_vision_language",
    "share_comm_ctx",
    "sleep",
    "sync",
    "sync_module_states",
    "uninstall",
    "unsharded",
    "wake",
]

__version__ = _version("fsdp2x")

if _TYPE_CHECKING:
    from fsdp2x import rl, rollout, sync


def __getattr__(name: str):
    """Imports rooms that a training loop may never use at their first use."""
    if name in ("rl", "rollout", "sync"):
        return _import_module(f"fsdp2x.{name}")
    raise AttributeError(f"module 'fsdp2x' has no attribute {name!r}")


if hasattr(_torch_fsdp, "DataParallelMeshDims"):  # since torch 2.12
    DataParallelMeshDims = _torch_fsdp.DataParallelMeshDims
    __all__.append("DataParallelMeshDims")
