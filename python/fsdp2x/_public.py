"""The names of `fsdp2x` itself, which imports this file when one of them is used first.

It imports the folders that a training loop may never need only with their own names.
"""

from typing import TYPE_CHECKING

import torch.distributed.fsdp as _torch_fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp2x import optim
from fsdp2x.installer import install, uninstall
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

if TYPE_CHECKING:
    from fsdp2x import checkpoint, export, moe, rl, rollout, sequence, sync

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

if hasattr(_torch_fsdp, "DataParallelMeshDims"):  # since torch 2.12
    DataParallelMeshDims = _torch_fsdp.DataParallelMeshDims
    __all__.append("DataParallelMeshDims")
