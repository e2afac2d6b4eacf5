"""Packs samples of different lengths into rows by a token budget, with the same number of rows on every rank.

Bins depend only on lengths, so every process that sees the same lengths makes the same bins.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import problems_of_all
from fsdp2x.models.sequence.layout import KEYWORD, SequenceLayout

IGNORE = -100
# Ranks that agree on the number of rows: a group, all ranks (None), or only this process.
Group = dist.ProcessGroup | Literal["alone"] | None
_PER_TOKEN = ("input_ids", "labels", "position_ids")


@checked
def pack_by_budget(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    num_bins: int | None = None,
    group: Group = None,
) -> list[list[int]]:
    """Packs samples into balanced bins of at most ``max_tokens`` tokens, the fullest bin first. Collective.

    All ranks of ``group`` get the same number of bins: as many as best-fit decreasing needs on the rank that needs
    most. Ranks with fewer samples get empty bins. Samples are then spread over the bins, longest first, each into the
    emptiest bin, so that micro-batches have similar lengths.

    Args:
        lengths: tokens of each sample, at least 1.
        max_tokens: budget of a bin. With sequence parallelism it is the budget of a row over all ranks of the group.
        num_bins: minimum number of bins.
        group: ranks that must agree. Default: all. ``"alone"``: only this process, without communication.

    Returns:
        Indices of samples for each bin.

    Raises:
        ValueError: on every rank of ``group`` if a length is below 1 or a sample exceeds the budget.
    """
    return _bins(lengths, max_tokens, num_bins or 0, group, _find_problem(lengths, max_tokens))


def _bins(lengths: Sequence[int], max_tokens: int, num_bins: int, group: Group, problem: str | None) -> list[list[int]]:
    alone = group == "alone" or not dist.is_initialized()
    if alone and problem is not None:
        raise ValueError(problem)
    need = 0 if problem is not None else max(num_bins, len(_best_fit(lengths, max_tokens)))
    if not alone:
        everyone = group or dist.group.WORLD
        assert isinstance(everyone, dist.ProcessGroup), "the default process group is one"
        need = _agree(need, problem, everyone)
    return _spread(lengths, max_tokens, need)


def _find_problem(lengths: Sequence[int], max_tokens: int) -> str | None:
    if max_tokens < 1:
        return f"pack_by_budget: max_tokens must be at least 1, got {max_tokens}"
    for index, length in enumerate(lengths):
        if length < 1:
            return f"pack_by_budget: sample {index} has {length} tokens, expected at least 1"
        if length > max_tokens:
            return (
                f"pack_by_budget: sample {index} has {length} tokens, more than max_tokens={max_tokens}. Raise the "
                "budget, or truncate the sample."
            )
    return None


def _agree(need: int, problem: str | None, group: dist.ProcessGroup) -> int:
    """Returns the largest need of all ranks. If one rank has an error, all raise, so that none waits for it later."""
    mine = torch.tensor([need, problem is not None], dtype=torch.int64, device=torch_private.object_device(group))
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
    most, failed = mine.tolist()
    if failed:
        raise ValueError(problems_of_all(problem, group))
    return most


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Puts each sample, longest first, into the fullest bin with room for it. An exact fit is allowed."""
    bins: list[list[int]] = []
    by_total: list[tuple[int, int]] = []  # total and minus the bin, ascending
    for index in _longest_first(lengths):
        place = bisect.bisect_right(by_total, (max_tokens - lengths[index], 0)) - 1
        if place < 0:
            bins.append([index])
            bisect.insort(by_total, (lengths[index], 1 - len(bins)))
        else:
            total, minus_bin = by_total.pop(place)
            bins[-minus_bin].append(index)
            bisect.insort(by_total, (total + lengths[index], minus_bin))
    return bins


def _spread(lengths: Sequence[int], max_tokens: int, num_bins: int) -> list[list[int]]:
    """Returns ``num_bins`` balanced bins within the budget. The caller knows that best-fit needs no more."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    by_total = [(0, b) for b in range(num_bins)]  # a heap
    for index in _longest_first(lengths):
        total, emptiest = by_total[0]
        if total and total + lengths[index] > max_tokens:
            # Balancing first can fail where filling first does not, so keep the tight bins.
            bins = _best_fit(lengths, max_tokens)
            bins += [[] for _ in range(num_bins - len(bins))]
            break
        bins[emptiest].append(index)
        heapq.heapreplace(by_total, (total + lengths[index], emptiest))
    bins.sort(key=lambda members: (-sum(lengths[i] for i in members), sorted(members)))
    return [sorted(members) for members in bins]


# ---- batches


@dataclass(frozen=True)
class PackedBatch:
    """Samples concatenated in one row, with padding at the end.

    Attributes:
        input_ids: int64, [1, tokens].
        position_ids: [1, tokens], from 0 in each sample and in the padding. [kinds, 1, tokens] if samples have
            positions of several kinds.
        labels: [1, tokens]. -100 at padding and at each sample's first token, which no token of the sample predicts.
        cu_seqlens: int32 on the CPU, [samples + 1]. First positions of the samples, and the end of the last one.
        sample_ids: indices of the samples among the packed ones.
        num_padding: positions at the end without a sample, or the full row of an empty bin.
        extras: the samples' other tensors joined along dim 0 (``pixel_values``, ``image_grid_thw``), per-token ones
            along the row.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    sample_ids: tuple[int, ...]
    num_padding: int
    extras: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def layout(self) -> SequenceLayout:
        ends = self.cu_seqlens.tolist()
        samples = [(0, start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
        return SequenceLayout(1, self.input_ids.shape[1], samples)

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward, without labels."""
        own = {"input_ids": self.input_ids, "position_ids": self.position_ids, KEYWORD: self.layout, "use_cache": False}
        return {**self.extras, **own}

    @property
    def next_labels(self) -> torch.Tensor:
        """The label each position predicts, [1, tokens]. -100 at a sample's last token and at padding."""
        return next_labels(self.labels, self.layout)

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Splits per-token values [1, tokens, ...] into a tensor [length, ...] per sample, without padding."""
        if values.shape[:2] != self.input_ids.shape:
            raise ValueError(f"unpack: values of shape {tuple(values.shape)} for {self.input_ids.shape[1]} tokens")
        ends = self.cu_seqlens.tolist()
        return [values[0, start:stop] for start, stop in zip(ends, ends[1:], strict=False)]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Returns the batch on a device. ``cu_seqlens`` stays on the CPU."""
        moved = {name: getattr(self, name).to(device) for name in _PER_TOKEN}
        return replace(self, **moved, extras={name: tensor.to(device) for name, tensor in self.extras.items()})


def next_labels(labels: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
    """Moves labels [rows, length] one to the left inside each sample. -100 at its end and at padding."""
    shifted = torch.full_like(labels, IGNORE)
    for row, start, stop in layout.samples:
        shifted[row, start : stop - 1] = labels[row, start + 1 : stop]
    return shifted


@checked
def pack_samples(
    samples: Sequence[Mapping[str, Any]],
    members: Sequence[int] | None = None,
    *,
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
) -> PackedBatch:
    """Packs the samples ``members`` (default: all) into one row, padded to a multiple. No samples give a padding row.

    Args:
        samples: mappings with ``input_ids`` [length] (a tensor or list) and optionally ``labels`` [length] (default:
            the tokens), ``position_ids`` [length] or [kinds, length], an ``attention_mask`` [length] without padding,
            further tensors along the tokens (``mm_token_type_ids``), and other tensors, which are joined along dim 0
            (``pixel_values``).
        members: indices of the samples to pack.
        pad_token_id: token id of padding.
        pad_to_multiple_of: number whose multiple the row's length must be.

    Raises:
        ValueError: labels or positions differ in length from the tokens, some samples lack a tensor of others, or an
            ``attention_mask`` has padding.
    """
    chosen = range(len(samples)) if members is None else members
    parts = [_as_tensors(index, samples[index]) for index in chosen]
    lengths = [part["input_ids"].shape[0] for part in parts]
    total = sum(lengths)
    num_padding = -total % pad_to_multiple_of if total else pad_to_multiple_of
    ids = [part["input_ids"] for part in parts]
    labels = [torch.cat((torch.full_like(part["labels"][:1], IGNORE), part["labels"][1:])) for part in parts]
    positions = [part["position_ids"] for part in parts]
    device = ids[0].device if ids else "cpu"
    if num_padding:
        ids.append(torch.full((num_padding,), pad_token_id, device=device))
        labels.append(torch.full((num_padding,), IGNORE, device=device))
        kinds = positions[0].shape[:-1] if positions else ()
        positions.append(torch.arange(num_padding, device=device).expand(*kinds, -1))
    row = torch.cat(positions, dim=-1)
    return PackedBatch(
        input_ids=torch.cat(ids).unsqueeze(0),
        position_ids=row.unsqueeze(-2),
        labels=torch.cat(labels).unsqueeze(0),
        cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32),
        sample_ids=tuple(chosen),
        num_padding=num_padding,
        extras=_join_extras(parts, lengths, num_padding),
    )


def _as_tensors(index: int, sample: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if not isinstance(sample, Mapping):
        raise ValueError(f"pack_samples: sample {index} is a {type(sample).__name__}, expected a mapping of tensors")
    part = {name: _as_tensor(index, name, value) for name, value in sample.items() if value is not None}
    ids = part.get("input_ids")
    if ids is None or ids.ndim != 1 or ids.numel() == 0:
        shape = "none" if ids is None else list(ids.shape)
        raise ValueError(
            f"pack_samples: sample {index} needs input_ids of shape [length], at least 1 long, got {shape}"
        )
    part.setdefault("labels", ids)
    part.setdefault("position_ids", torch.arange(ids.shape[0], device=ids.device))
    for name in _PER_TOKEN:
        if part[name].shape[-1:] != ids.shape:
            raise ValueError(f"pack_samples: sample {index} has {name} {list(part[name].shape)} for {len(ids)} tokens")
    mask = part.pop("attention_mask", None)
    if mask is not None and (mask.shape != ids.shape or not mask.all()):
        raise ValueError(
            f"pack_samples: sample {index} has padding in its attention_mask, or a mask of another length. Remove the "
            "padding from all of its tensors before packing."
        )
    part["input_ids"], part["labels"] = ids.long(), part["labels"].long()
    return part


def _as_tensor(index: int, name: str, value: Any) -> torch.Tensor:
    try:
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
        raise ValueError(f"pack_samples: sample {index} has {name} {shown}, expected a tensor or numbers") from None


def _join_extras(parts: list[dict[str, torch.Tensor]], lengths: list[int], num_padding: int) -> dict[str, torch.Tensor]:
    """Joins other tensors. Samples may lack images, but all must have a tensor along the tokens."""
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part if name not in _PER_TOKEN):
        having = [(part[name], length) for part, length in zip(parts, lengths, strict=True) if name in part]
        if all(value.shape[:1] == (length,) for value, length in having) and name.endswith("_ids"):
            if len(having) != len(parts):
                raise ValueError(f"pack_samples: {name} runs along the tokens but is missing in some samples")
            padding = having[0][0].new_zeros(num_padding, *having[0][0].shape[1:])
            joined[name] = torch.cat([value for value, _ in having] + [padding]).unsqueeze(0)
        else:
            joined[name] = torch.cat([value for value, _ in having])
    return joined


@checked
def micro_batches(
    samples: Sequence[Any],
    max_tokens: int,
    *,
    group: Group = None,
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
    prepare: Callable[[PackedBatch], PackedBatch] | None = None,
) -> Iterator[PackedBatch]:
    """Yields the samples of one step as packed rows, the same number on every rank of ``group`` (default: all).

    Collective at the first item. Ranks with fewer rows end with empty ones: a row of padding without labels takes part
    in every collective of a forward and backward and adds nothing. See :func:`pack_by_budget` and
    :func:`pack_samples` for the arguments. ``prepare`` is applied to each row: ``lambda row: row.to("cuda")``. If a
    sample is not a mapping, every rank raises.
    """
    problem, lengths = None, []
    try:
        lengths = [_as_tensors(index, sample)["input_ids"].shape[0] for index, sample in enumerate(samples)]
    except ValueError as error:
        problem = str(error)  # raised on every rank, so that none waits for this one
    problem = problem or _find_problem(lengths, max_tokens)
    for members in _bins(lengths, max_tokens, 1, group, problem):
        row = pack_samples(samples, members, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of)
        yield row if prepare is None else prepare(row)
