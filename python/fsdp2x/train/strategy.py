"""Resolves settings that depend on the number of ranks, on the device or on the text, once when a run begins.

Strategies by name and `fsdp_size` -> the mesh and the resharding that `fully_shard` is called with:

    name                 mesh over N ranks, axes      freed after forward     what it is
    FULL_SHARD           (N,)        [fsdp]           all but the last unit   ZeRO-3
    SHARD_GRAD_OP        (N,)        [fsdp]           no                      ZeRO-2: gathered from forward to backward
    NO_SHARD             (N, 1)      [ddp, fsdp]      no                      every rank has everything, as DDP
    HYBRID_SHARD         (N/S, S)    [ddp, fsdp]      all but the last unit   shards inside a node, copies across nodes
    HYBRID_SHARD_ZERO2   (N/S, S)    [ddp, fsdp]      no

S is `fsdp_size`, by default the ranks of one node. Without a name, `fsdp_size` decides. At most 1, or N, is one axis
over all ranks. A divisor of N in between is HSDP. `reshard_after_forward` may then be set by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2x.train.config import (
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScalerConfig,
    SequenceRanks,
    TrainSection,
)
from fsdp2x.train.distributed import any_rank, explain_emulation

HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
RESHARD: dict[str, bool | None] = {
    "FULL_SHARD": None,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": False,
    "HYBRID_SHARD": None,
    "HYBRID_SHARD_ZERO2": False,
}


@dataclass(frozen=True)
class MeshPlan:
    """A mesh before its process groups exist. `str()` is the line that a run prints when it starts."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    reshard_after_forward: bool | int | None
    sequence_ranks: SequenceRanks = SequenceRanks()

    @property
    def num_replicas(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def shard_size(self) -> int:
        return self.shape[-1]

    def make(self, device_type: str) -> DeviceMesh:
        """Makes the process groups. Collective."""
        return init_device_mesh(device_type, self.shape, mesh_dim_names=self.axes)

    def __str__(self) -> str:
        freed = {
            None: "reshard after forward: all units except the last",
            True: "reshard after forward",
            False: "gathered from forward to backward",
        }
        reshard = self.reshard_after_forward
        kept = freed[reshard] if reshard in freed else f"kept over {reshard} ranks after forward"
        kept = "nothing to gather" if self.shard_size == 1 else kept
        sp = f"; sequences over {self.sequence_ranks}" if self.sequence_ranks.total > 1 else ""
        copies = f"{self.num_replicas} copies of " if self.num_replicas > 1 else ""
        shards = "1 shard" if self.shard_size == 1 else f"{self.shard_size} shards"
        return f"{self.name}: mesh {self.shape} [{', '.join(self.axes)}], {copies}{shards}, {kept}{sp}"


def plan_mesh(config: ParallelConfig, world_size: int, local_world_size: int) -> MeshPlan:
    """Returns the mesh of a run of `world_size` ranks, `local_world_size` of which are on this node.

    Raises:
        ConfigError: sizes do not divide each other, or settings contradict the strategy's name.
    """
    plan_expert_mesh(config, world_size)
    name, size, reshard = config.strategy, config.fsdp_size, config.reshard_after_forward
    sp = config.sequence_ranks
    if world_size % sp.total:
        got = sp.ulysses if sp.context == 1 else sp
        raise ConfigError(f"parallel.sequence_parallel: got {got}, expected a divisor of the {world_size} ranks")
    if name is not None and reshard is not None and reshard != RESHARD[name]:
        means = {None: "null (all units except the last)", True: "true", False: "false"}[RESHARD[name]]
        raise ConfigError(
            f"parallel.reshard_after_forward: got {reshard!r} with parallel.strategy={name}, which means {means}. "
            "Omit one of them."
        )
    if size is not None and size > 1 and (size > world_size or world_size % size):
        raise ConfigError(f"parallel.fsdp_size: got {size}, expected a divisor of the {world_size} ranks")
    if name is None:
        split = size is not None and 1 < size < world_size
        name = "FSDP" if not split else "HSDP"
    else:
        reshard = RESHARD[name]
        split = name in HYBRID
        _check_size(name, size, world_size)
        if name == "NO_SHARD":
            return MeshPlan(name, (world_size, 1), ("ddp", "fsdp"), reshard, sp)
    if not split:
        return MeshPlan(name, (world_size,), ("fsdp",), reshard, sp)
    if size is None:
        size = local_world_size
    if size > world_size or world_size % size:
        raise ConfigError(f"ranks of this node: got {size}, expected a divisor of the {world_size} ranks")
    return MeshPlan(name, (world_size // size, size), ("ddp", "fsdp"), reshard, sp)


def plan_expert_mesh(config: ParallelConfig, world_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns shape and axes of the experts' mesh: (efsdp, ep), or (replicate, efsdp, ep) if efsdp is smaller.

    Raises:
        ConfigError: sizes do not divide the ranks.
    """
    ep = config.expert_parallel
    if world_size % ep:
        raise ConfigError(f"parallel.expert_parallel: got {ep}, expected a divisor of the {world_size} ranks")
    rest = world_size // ep
    efsdp = config.expert_fsdp_size or rest
    if rest % efsdp:
        raise ConfigError(
            f"parallel.expert_fsdp_size: got {efsdp}, expected a divisor of the {rest} ranks that expert_parallel={ep} "
            f"leaves of {world_size}"
        )
    if efsdp == rest:
        return (rest, ep), ("efsdp", "ep")
    return (rest // efsdp, efsdp, ep), ("replicate", "efsdp", "ep")


def usual_node(world_size: int) -> int:
    """Returns the default ranks of a node: 8 if there are more and 8 divides them, else all."""
    return 8 if world_size % 8 == 0 and world_size else world_size


def _check_size(name: str, size: int | None, world_size: int) -> None:
    if size is None:
        return
    if name == "NO_SHARD" and size > 1:
        raise ConfigError(f"parallel.fsdp_size: got {size} with NO_SHARD, which shards nothing. Omit fsdp_size.")
    if name in ("FULL_SHARD", "SHARD_GRAD_OP") and 1 < size < world_size:
        hybrid = "HYBRID_SHARD" if name == "FULL_SHARD" else "HYBRID_SHARD_ZERO2"
        raise ConfigError(
            f"parallel.fsdp_size: got {size} with {name}, which shards over all {world_size} ranks. For groups of "
            f"{size} ranks use {hybrid}."
        )
    if name in HYBRID and size <= 1:
        raise ConfigError(
            f"parallel.fsdp_size: got {size} with {name}, expected the ranks of one shard group. Omit it for the "
            "ranks of one node, or use NO_SHARD for copies only."
        )


# ---- batches, steps, dtypes

DEFAULT_BATCH_SIZE = 8


@dataclass(frozen=True)
class Batching:
    """Blocks per rank and micro-batch, micro-batches per step, and blocks per rank in evaluation."""

    batch_size: int
    accumulation: int
    eval_batch_size: int


def describe_step(batch_size: int, accumulation: int, readers: int) -> str:
    total = batch_size * accumulation * readers
    return f"{total} sequences ({batch_size} per rank x {accumulation} micro-batches x {readers} data-parallel ranks)"


def resolve_batching(train: TrainSection, num_readers: int) -> Batching:
    """Resolves batch sizes. `num_readers` ranks read different text: all, or one per group that shares sequences.

    Raises:
        ConfigError: a global batch does not divide evenly.
    """
    batch_size, accumulation, total = train.batch_size, train.accumulation, train.global_batch_size
    if total is None:
        batch_size, accumulation = batch_size or DEFAULT_BATCH_SIZE, accumulation or 1
    elif batch_size is None:
        accumulation = accumulation or 1
        batch_size = _quotient("train.global_batch_size", total, num_readers, accumulation, "micro-batches")
    else:
        steps = _quotient("train.global_batch_size", total, num_readers, batch_size, "blocks a micro-batch")
        if accumulation is not None and accumulation != steps:
            raise ConfigError(
                f"train.global_batch_size: got {total}, but {num_readers} ranks x batch_size {batch_size} x "
                f"accumulation {accumulation} are {num_readers * batch_size * accumulation}. Omit one of them."
            )
        accumulation = steps
    eval_batch_size = train.eval_batch_size or batch_size
    if train.global_eval_batch_size is not None:
        if train.eval_batch_size is not None:
            raise ConfigError("train: got both eval_batch_size and global_eval_batch_size, expected one of them")
        eval_batch_size = _quotient("train.global_eval_batch_size", train.global_eval_batch_size, num_readers, 1, "")
    return Batching(batch_size, accumulation, eval_batch_size)


def _quotient(path: str, total: int, num_readers: int, other: int, unit: str) -> int:
    if total % (num_readers * other):
        times = f" x {other} {unit}" if other > 1 else ""
        raise ConfigError(f"{path}: got {total}, expected a multiple of {num_readers} ranks{times}")
    return total // (num_readers * other)


def resolve_steps(train: TrainSection, num_blocks: int, blocks_per_step: int) -> int:
    """Returns the optimizer steps of the whole run. An epoch has the full steps that its blocks give."""
    if train.epochs is None and train.steps is not None:
        return train.steps
    by_epochs = max((train.epochs or 1) * num_blocks // blocks_per_step, 1)
    return min(by_epochs, train.steps) if train.steps else by_epochs


def resolve_param_dtype(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> torch.dtype | None:
    """Returns the compute dtype of blocks. None: the dtype of the parameters."""
    wanted = parallel.param_dtype
    if wanted not in (None, "auto"):
        return getattr(torch, wanted)
    if device.type == "cpu" or (wanted is None and model.dtype != "float32"):
        return None
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16 if wanted == "auto" else None


def resolve_ns_dtype(config: OptimizerConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of Muon's iterations. Every rank gets the same, because they exchange matrices in it.

    Collective if the optimizer is Muon and the dtype is "auto".
    """
    if config.muon_ns_dtype != "auto":
        return getattr(torch, config.muon_ns_dtype)
    is_slow = config.name == "muon" and any_rank(explain_emulation(torch.bfloat16, device) is not None, device)
    return torch.float32 if is_slow else torch.bfloat16


def resolve_scaling(scaler: ScalerConfig, model: ModelConfig, param_dtype: torch.dtype | None) -> bool:
    """Returns whether the loss is scaled.

    Raises:
        ConfigError: parameters are in float16, whose gradients have no range left to be unscaled in.
    """
    half = (param_dtype or getattr(torch, model.dtype)) == torch.float16
    enabled = half if scaler.enabled is None else scaler.enabled
    if enabled and model.dtype == "float16":
        raise ConfigError(
            "model.dtype: got 'float16', but float16 gradients cannot be unscaled. Set model.dtype=float32 and "
            "parallel.param_dtype=float16."
        )
    return enabled
