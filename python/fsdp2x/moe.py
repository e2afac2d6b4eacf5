"""Shards mixtures of experts: one unit per expert group, grouped GEMM, and expert parallelism. See README.md."""

from fsdp2x.models.moe.parallel import expert_parallel
from fsdp2x.models.moe.units import ExpertGroup, apply_expert_patch, find_experts, shard_experts, use_grouped_gemm

__all__ = [
    "ExpertGroup",
    "apply_expert_patch",
    "expert_parallel",
    "find_experts",
    "shard_experts",
    "use_grouped_gemm",
]
