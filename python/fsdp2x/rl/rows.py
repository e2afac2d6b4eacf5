"""Which sample each label token of a packed row belongs to: values of samples on tokens, sums of tokens over samples.

Everything per token has the shape of the row's ``next_labels``, [1, positions], and lies where its token is
*predicted*, as the results of ``score`` do. A sample of 3 prompt and 2 response tokens, then one of 2 and 1:

    token         p0   p1   p2   a0   a1 |  q0   q1   b0
    next_labels -100 -100   a0   a1 -100 |-100   b0 -100
    sample                   0    0      |       1            (elsewhere none)

Under sequence parallelism a rank has a part of the positions, and sums over samples are made over the ranks that share
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp2x.models.sequence.packing import IGNORE, PackedBatch
from fsdp2x.models.sequence.parallel import SequenceShard


class RowTokens:
    """The label tokens of one packed row, or of this rank's slice of it.

        rows = list(sequence.micro_batches(samples, 4096))
        tokens = [rl.RowTokens(row) for row in rows]
        count = rl.count_step(tokens)

    Attributes:
        has_label: bool [1, positions].
        sample_ids: the samples' indices in what was packed.
        lengths: label tokens of each sample in the whole row, int64 [samples].
    """

    def __init__(self, row: PackedBatch, shard: SequenceShard | None = None) -> None:
        """Of ``row``, or of the ``shard`` that ``context.shard_inputs(row)`` made of it."""
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
        self._whole_place, self._place = whole, self._cut(whole)

    def _spans(self) -> Iterable[tuple[int, int]]:
        return zip(self._ends, self._ends[1:], strict=False)

    def _cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The positions of this rank."""
        if self._layout is None:
            return whole
        return self._layout.take(F.pad(whole, (0, self._layout.length - whole.shape[1])))

    def counts_samples(self) -> bool:
        """Whether this rank counts the row's samples: the first of those that share them."""
        return self._group is None or self._group.rank == 0

    def check(self, values: torch.Tensor, name: str) -> None:
        """
        Raises:
            ValueError: ``values`` are not per token of this row; the message starts with ``name``.
        """
        if values.shape != self.has_label.shape:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, expected one value for each position of this row, "
                f"{list(self.has_label.shape)}"
            )

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """One value for each sample that was packed, in the order of ``samples``, on its tokens: [1, positions].

        Zero where there is no label.
        """
        if values.ndim != 1 or any(index >= values.shape[0] for index in self.sample_ids):
            raise ValueError(
                f"spread: values of shape {list(values.shape)}, expected one for each packed sample; this row has the "
                f"samples {list(self.sample_ids)}"
            )
        values = values.to(self.has_label.device)
        return self._on_tokens(values[list(self.sample_ids)])

    def on_last(self, values: torch.Tensor | Sequence[float]) -> torch.Tensor:
        """One value for each sample that was packed, on its last label token: [1, positions], zero elsewhere.

        Rewards of whole responses, as ``gae`` takes them. The value of a sample without labels is dropped.
        """
        positions = self._labelled[0].nonzero().flatten()
        samples = self._whole_place[0, positions]
        is_last = torch.zeros_like(self._labelled)
        is_last[0, positions] = samples != torch.cat((samples[1:], samples.new_full((1,), -1)))[: len(samples)]
        return self.spread(torch.as_tensor(values)).where(self._cut(is_last), 0.0)

    def labels_of_samples(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, samples) of the label tokens of the whole row, in its order: [..., labels] and int64 [labels].

        Collective over the sequence-parallel ranks, if there are any.

        Args:
            values: [..., positions] of this rank.
        """
        if self._layout is not None and self._group is not None and self._group.size > 1:
            parts = [torch.empty_like(values) for _ in range(self._group.size)]
            dist.all_gather(parts, values.contiguous(), group=self._group.group)
            values = self._layout.join(parts, dim=-1)
        positions = self._labelled[0].nonzero().flatten()
        return values[..., positions], self._whole_place[0, positions]

    def put_labels(self, values: torch.Tensor) -> torch.Tensor:
        """What belongs to the label tokens of the whole row, [labels], at those of this rank: [1, positions]."""
        whole = torch.zeros(self._labelled.shape, dtype=values.dtype, device=values.device)
        whole[self._labelled] = values
        return self._cut(whole)

    def align(self, values: Sequence[torch.Tensor | Sequence[float]]) -> torch.Tensor:
        """What is known of each token of each sample, where that token is predicted: fp32 [1, positions].

        Args:
            values: for each packed sample, in the order of ``samples``, numbers of its tokens (an engine's
                log-probabilities): one for each token of ``input_ids``, or one for each of its labels. Only those of
                the samples in this row are read.

        Raises:
            ValueError: neither as many as the sample's tokens nor as its labels.
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

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[1, positions] -> [samples of this row]: sums over the label tokens of each, detached.

        Collective over the sequence-parallel ranks, if there are any.
        """
        values = values.detach().where(self.has_label, 0.0).flatten()
        found = values.new_zeros(len(self.sample_ids) + 1)  # the last one: rows of padding have no sample
        found.index_add_(0, self._place.flatten(), values)
        found = found[: len(self.sample_ids)]
        if self._group is not None and self._group.size > 1:
            dist.all_reduce(found, group=self._group.group)
        return found

    def sums_on_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """:meth:`sums`, each on the tokens of its sample."""
        return self._on_tokens(self.sums(values))

    def means_on_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """As :meth:`sums_on_tokens`, over the number of the sample's label tokens."""
        return self._on_tokens(self.sums(values) / self.lengths.clamp(min=1))

    def shares(self) -> torch.Tensor:
        """What a token is of its sample: 1 / label tokens of the sample, fp64 [1, positions]; 0 without a label."""
        return self._on_tokens(1.0 / self.lengths.clamp(min=1).double())

    def _on_tokens(self, of_row: torch.Tensor) -> torch.Tensor:
        padded = torch.cat((of_row, of_row.new_zeros(1)))
        return padded[self._place].where(self.has_label, 0)


@dataclass(frozen=True)
class StepCount:
    """What the means of a step divide by, over all ranks and micro-batches.

    Attributes:
        tokens, samples: float64 scalars, at least 1. Every packed sample counts, also one without labels.
        ranks: over which gradients are averaged.
    """

    tokens: torch.Tensor
    samples: torch.Tensor
    ranks: int


def count_step(rows: Iterable[RowTokens], *, group: dist.ProcessGroup | None = None) -> StepCount:
    """Label tokens and samples of one optimizer step over all ranks. Collective.

    Args:
        rows: all micro-batches of this rank; sequence-parallel ranks pass their slices.
        group: the ranks over which gradients are averaged; default all.
    """
    rows = list(rows)
    if not rows:
        raise ValueError(
            "fsdp2x.rl.count_step: no rows; a rank without samples passes those of micro_batches, which pads"
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
