"""Maps label tokens of a packed row to their samples: spreads values of samples on tokens, and counts them.

Every per-token value has the shape of the row's ``next_labels``, [1, positions]. Like the results of ``score``, it is
stored where its token is *predicted*. For example, a sample of 3 prompt and 2 response tokens, then one of 2 and 1:

    token         p0   p1   p2   a0   a1 |  q0   q1   b0
    next_labels -100 -100   a0   a1 -100 |-100   b0 -100
    sample                   0    0      |       1            (elsewhere none)

With sequence parallelism a rank has a part of the positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp2x.api import IGNORE
from fsdp2x.sequence import PackedBatch, SequenceShard


class RowTokens:
    """The label tokens of one packed row, or of this rank's slice of it.

        rows = list(sequence.micro_batches(samples, 4096))
        tokens = [rl.RowTokens(row) for row in rows]
        count = rl.count_step(tokens)

    Attributes:
        has_label: bool, [1, positions].
        sample_ids: indices of the samples among those that were packed.
        lengths: label tokens of each sample in the full row, int64, [samples].
    """

    def __init__(self, row: PackedBatch, shard: SequenceShard | None = None) -> None:
        """Makes them for ``row``, or for the ``shard`` that ``context.shard_inputs(row)`` made of it."""
        device = row.input_ids.device
        self.sample_ids = row.sample_ids
        self._ends = row.cu_seqlens.tolist()
        self._labelled = row.next_labels != IGNORE
        self._group = None if shard is None else shard.layout.shard
        self._layout = None if shard is None else shard.layout
        whole = torch.zeros(self._labelled.shape, dtype=torch.int64, device=device)
        for place, (start, stop) in enumerate(self._spans()):
            whole[0, start:stop] = place
        counted = torch.zeros(len(self.sample_ids), dtype=torch.int64, device=device)
        self.lengths = counted.index_add_(0, whole[self._labelled], self._labelled[self._labelled].long())
        self.has_label = self._cut(self._labelled)
        self._place = self._cut(whole)

    def _spans(self) -> Iterable[tuple[int, int]]:
        return zip(self._ends, self._ends[1:], strict=False)

    def _cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the positions of this rank."""
        if self._layout is None:
            return whole
        return self._layout.take(F.pad(whole, (0, self._layout.length - whole.shape[1])))

    def counts_samples(self) -> bool:
        """Whether this rank counts the row's samples: it is the first of those that share them."""
        return self._group is None or self._group.rank == 0

    def check(self, values: torch.Tensor, name: str) -> None:
        """Checks that ``values`` are per token of this row.

        Raises:
            ValueError: they are not. The message starts with ``name``.
        """
        if values.shape != self.has_label.shape:
            raise ValueError(
                f"{name}: expected one value for each position of this row, {list(self.has_label.shape)}, got shape "
                f"{list(values.shape)}"
            )

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Puts one value for each packed sample, in the order of ``samples``, on its tokens: [1, positions].

        Positions without a label get zero.
        """
        if values.ndim != 1 or any(index >= values.shape[0] for index in self.sample_ids):
            raise ValueError(
                f"spread: expected one value for each packed sample, got shape {list(values.shape)}. This row has the "
                f"samples {list(self.sample_ids)}."
            )
        values = values.to(self.has_label.device)
        return self._on_tokens(values[list(self.sample_ids)])

    def align(self, values: Sequence[torch.Tensor | Sequence[float]]) -> torch.Tensor:
        """Puts values of each sample's tokens where those tokens are predicted: fp32, [1, positions].

        Args:
            values: numbers of each packed sample, in the order of ``samples``, such as an engine's log-probabilities.
                A sample has one for each token of ``input_ids``, or for each label. Only samples of this row are read.

        Raises:
            ValueError: a sample has neither as many values as tokens nor as labels.
        """
        whole = torch.zeros(self._labelled.shape, dtype=torch.float32, device=self._labelled.device)
        for index, (start, stop), num_labels in zip(self.sample_ids, self._spans(), self.lengths.tolist(), strict=True):
            known = torch.as_tensor(values[index], dtype=torch.float32, device=whole.device)
            if known.shape == (stop - start,):
                whole[0, start : stop - 1] = known[1:]
            elif known.shape == (num_labels,):
                whole[0, start:stop][self._labelled[0, start:stop]] = known
            else:
                raise ValueError(
                    f"align: sample {index} has {stop - start} tokens and {num_labels} labels, but values of shape "
                    f"{list(known.shape)}"
                )
        return self._cut(whole.where(self._labelled, 0.0))

    def shares(self) -> torch.Tensor:
        """Returns 1 / label tokens of the token's sample, fp64, [1, positions]. Zero without a label."""
        return self._on_tokens(1.0 / self.lengths.clamp(min=1).double())

    def _on_tokens(self, of_row: torch.Tensor) -> torch.Tensor:
        padded = torch.cat((of_row, of_row.new_zeros(1)))
        return padded[self._place].where(self.has_label, 0)


@dataclass(frozen=True)
class StepCount:
    """Divisors of a step's means, over all ranks and micro-batches.

    Attributes:
        tokens, samples: float64 scalars, at least 1. Every packed sample counts, even one without labels.
        ranks: number of ranks over which gradients are averaged.
    """

    tokens: torch.Tensor
    samples: torch.Tensor
    ranks: int


def count_step(rows: Iterable[RowTokens], *, group: dist.ProcessGroup | None = None) -> StepCount:
    """Counts label tokens and samples of one optimizer step over all ranks. Collective.

    Args:
        rows: all micro-batches of this rank. Sequence-parallel ranks pass their slices.
        group: ranks over which gradients are averaged. Default: all.

    Raises:
        ValueError: there are no rows.
    """
    rows = list(rows)
    if not rows:
        raise ValueError(
            "fsdp2x.rl.count_step: no rows. A rank without samples passes the padding row of micro_batches."
        )
    tokens = torch.stack([row.has_label.sum() for row in rows]).sum()
    samples = sum(len(row.sample_ids) for row in rows if row.counts_samples())
    both = torch.stack((tokens, tokens.new_tensor(samples))).double()
    ranks = 1
    if dist.is_initialized():
        dist.all_reduce(both, group=group)
        ranks = dist.get_world_size(group)
    both.clamp_(min=1.0)
    return StepCount(both[0], both[1], ranks)
