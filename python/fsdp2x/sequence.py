"""Trains on long sequences and packed samples: packing, attention within samples, sequence parallelism, and losses."""

from fsdp2x.models.sequence.attention import SequenceAttention, use_varlen_attention
from fsdp2x.models.sequence.layout import SequenceLayout
from fsdp2x.models.sequence.loss import (
    count_label_tokens,
    mean_over_ranks,
    token_log_probs,
    token_mean_loss,
)
from fsdp2x.models.sequence.packing import PackedBatch, micro_batches, pack_by_budget, pack_samples
from fsdp2x.models.sequence.parallel import (
    SequenceMesh,
    SequenceParallel,
    SequenceShard,
    apply_context_parallel,
    apply_ulysses,
    init_sequence_mesh,
)

__all__ = [
    "PackedBatch",
    "SequenceAttention",
    "SequenceLayout",
    "SequenceMesh",
    "SequenceParallel",
    "SequenceShard",
    "apply_context_parallel",
    "apply_ulysses",
    "count_label_tokens",
    "init_sequence_mesh",
    "mean_over_ranks",
    "micro_batches",
    "pack_by_budget",
    "pack_samples",
    "token_log_probs",
    "token_mean_loss",
    "use_varlen_attention",
]
