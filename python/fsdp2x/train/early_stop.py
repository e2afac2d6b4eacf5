"""Early stopping: detects that the held-out loss no longer falls, and names the best checkpoint."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2x.io.checkpoint.directory import mark, retain
from fsdp2x.train.metrics import Metrics

# A link in the folder of checkpoints to the one with the lowest held-out loss.
BEST = "best"


@dataclass
class EarlyStop:
    """Counts evaluations without a lower loss. All ranks see the same losses, so all end at the same step.

    A loss is lower if it is below the lowest one, and by at least `min_delta`.
    """

    patience: int
    min_delta: float
    best_loss: float = math.inf
    best_step: int | None = None
    num_worse: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_worse >= self.patience

    def update(self, step: int, loss: float) -> bool:
        """Takes the loss of an evaluation after `step`. Returns whether it is the best so far."""
        if loss < self.best_loss and loss <= self.best_loss - self.min_delta:
            self.best_loss, self.best_step, self.num_worse = loss, step, 0
            return True
        self.num_worse += 1
        return False

    def report(self, step: int, metrics: Metrics, checkpoints: Path) -> None:
        """Reports the best checkpoint when the run ends after ``step``, and why it ended."""
        if self.is_over:
            metrics.say("ended after step %d: no lower held-out loss in %d evaluations", step, self.num_worse)
        metrics.say("best: step %s, held-out loss %.4f, %s", self.best_step, self.best_loss, checkpoints / BEST)
        metrics.write("best", step, best_step=self.best_step, loss=self.best_loss, stopped=self.is_over)

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_step": self.best_step, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues counting. The settings stay as configured."""
        self.best_loss, self.best_step = float(state["best_loss"]), state["best_step"]
        self.num_worse = int(state["num_worse"])


def point_to_best(best: Path, keep: int, keep_every: int) -> None:
    """Marks a checkpoint, points the link `best` to it, and unmarks the former one unless `keep_every` keeps it.

    Call it on one rank.
    """
    mark(best)
    root, link = best.parent, best.parent / BEST
    former = root / os.readlink(link) if link.is_symlink() else best
    temporary = root / f".tmp-{BEST}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(best.name)
    os.replace(temporary, link)
    if former.name != best.name and former.is_dir():
        step = int(former.name.rpartition("-")[2])
        if not (keep_every and step % keep_every == 0):
            mark(former, False)
            retain(root, keep)
