"""Policies: log-probabilities without logits, advantages, corrections, losses, a frozen reference model."""

from fsdp2x.rl.head import HeadScores, LogitTransform, head_scores
from fsdp2x.rl.losses import (
    DAPO,
    GRPO,
    PolicyLoss,
    PolicySettings,
    group_advantages,
    importance_weights,
    policy_loss,
)
from fsdp2x.rl.rows import RowTokens, StepCount, count_step
from fsdp2x.rl.score import Reference, Scores, score
from fsdp2x.rl.tiled_loss import causal_lm_loss, use_tiled_loss
from fsdp2x.rl.trl_rollout import rollout_func

__all__ = [
    "DAPO",
    "GRPO",
    "HeadScores",
    "LogitTransform",
    "PolicyLoss",
    "PolicySettings",
    "Reference",
    "RowTokens",
    "Scores",
    "StepCount",
    "causal_lm_loss",
    "count_step",
    "group_advantages",
    "head_scores",
    "importance_weights",
    "policy_loss",
    "rollout_func",
    "score",
    "use_tiled_loss",
]
