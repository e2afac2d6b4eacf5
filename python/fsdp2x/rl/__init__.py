"""Policies: log-probabilities without logits, advantages, corrections, losses, a frozen reference model."""

from fsdp2x.rl.head import HeadScores, head_scores
from fsdp2x.rl.products import LogitTransform
from fsdp2x.rl.score import Scores, score

__all__ = ["HeadScores", "LogitTransform", "Scores", "head_scores", "score"]
