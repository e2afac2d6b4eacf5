"""Sequence parallelism for HuggingFace models: each rank of a group computes a part of every sequence.

Everything but attention works on the part; around attention the ranks exchange heads for positions (Ulysses), or gather
keys and values (context parallelism), or both (``exchange.py``). Ranks of a group pass the same batch. Parameters are
sharded over all ranks, data-parallel times sequence-parallel: each rank's gradient is that of its own tokens, and their
sum over ranks is right.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.replicas import sum_of_bits
from fsdp2x.models.sequence.attention import SequenceAttention, base_model, cut_decoder_inputs, head_counts, layout_of
from fsdp2x.models.sequence.exchange import exchanged_heads
from fsdp2x.models.sequence.layout import KEYWORD, Peers, RankPart, SequenceLayout
from fsdp2x.models.sequence.packing import PackedBatch, next_labels

# Inputs of shape [rows, length] (or with more dims after it) that are padded with zeros.
_PADDED = ("input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids")
_AXES = ("context", "ulysses")


@dataclass(frozen=True)
class SequenceMesh:
    """Meshes of all ranks: ``data``, ``sequence``, and one of two for ``fully_shard``.

    ``shard`` is 1-D over all ranks. ``grid`` is 2-D (data, sequence): it replicates over the first axis and shards over
    the second (HSDP). ``sequence`` is 1-D, or 2-D (context, ulysses).
    """

    shard: DeviceMesh
    grid: DeviceMesh
    data: DeviceMesh
    sequence: DeviceMesh


@checked
def init_sequence_mesh(
    sequence_size: int, device_type: str | None = None, *, ulysses: int | None = None
) -> SequenceMesh:
    """Arranges all ranks as data-parallel times sequence-parallel. Consecutive ranks share sequences. Collective.

        mesh = init_sequence_mesh(2)
        fsdp2x.fully_shard(model, mesh=mesh.shard)
        context = apply_ulysses(model, mesh.sequence)  # or apply_context_parallel
        sampler = DistributedSampler(data, mesh.data.size(), mesh.data.get_local_rank())

    Args:
        sequence_size: ranks that share each sequence.
        ulysses: consecutive ranks that exchange heads inside ``apply_context_parallel``; ``sequence`` is then the 2-D
            mesh (context, ulysses).

    Raises:
        ValueError: a size that does not divide the number of ranks, or ``ulysses`` that does not divide the size.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    world = dist.get_world_size()
    if sequence_size < 1 or world % sequence_size:
        raise ValueError(f"sequence parallel size {sequence_size} does not divide the {world} ranks")
    if ulysses is not None and (ulysses < 1 or sequence_size % ulysses):
        raise ValueError(f"ulysses={ulysses} does not divide the sequence parallel size {sequence_size}")
    device_type = device_type or torch_private.accelerator_type()
    num_readers = world // sequence_size
    mesh = init_device_mesh(device_type, (num_readers, sequence_size), mesh_dim_names=("data", "sequence"))
    sequence = mesh["sequence"]
    if ulysses is not None:
        shape = (num_readers, sequence_size // ulysses, ulysses)
        sequence = init_device_mesh(device_type, shape, mesh_dim_names=("data", *_AXES))[_AXES]
    return SequenceMesh(torch_private.flatten_mesh(mesh, "data_sequence"), mesh, mesh["data"], sequence)


@dataclass(frozen=True)
class SequenceShard:
    """One micro-batch on a rank of a sequence-parallel group.

    Attributes:
        inputs: keyword arguments of the model's forward. Its logits are those of this rank's positions, in order.
        next_labels: [rows, positions of this rank], int64: the label that each position predicts, already shifted
            by one. -100 at padding and at each sample's last token. None without labels.
        layout: the samples in the padded rows.
        length: positions of a row before padding.
    """

    inputs: dict[str, Any]
    next_labels: torch.Tensor | None
    layout: SequenceLayout = field(repr=False)
    length: int


@checked
def apply_ulysses(model: nn.Module, group: dist.ProcessGroup | DeviceMesh):
    """Makes a HuggingFace model compute slices of sequences over the ranks of ``group``; returns the context.

        context = apply_ulysses(model, mesh.sequence)
        shard = context.shard_inputs(batch)                       # the same batch on all ranks of the group
        num_tokens = count_label_tokens(shard.next_labels)
        loss = token_mean_loss(model(**shard.inputs).logits, shard.next_labels, num_tokens)

    Call it before or after ``fully_shard``. Parameters must be sharded over the data-parallel and sequence-parallel
    ranks together (1-D over all, or HSDP), so that gradients are summed over the slices.

    Args:
        model: see ``use_varlen_attention``. Its attention heads must divide evenly over the ranks. A kv head that
            several ranks use is sent to each, and its gradients are summed.
        group: the sequence-parallel process group, or a 1-D mesh (``mesh["sequence"]``).

    Raises:
        ValueError: heads do not divide, a mesh has several axes, or parameters are sharded over a mesh without some of
            the group's ranks.
        NotImplementedError, TypeError: see ``use_varlen_attention``.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"apply_ulysses: expected one axis of a mesh, such as mesh['sequence'], got {group}")
        group = group.get_group()
    peers = _peers(group)
    return SequenceParallel(model, RankPart(peers, ulysses=peers, context=Peers()))


@checked
def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup | DeviceMesh):
    """As :func:`apply_ulysses`, but attention gathers keys and values: any number of heads and of ranks.

        mesh = init_sequence_mesh(4)                      # or (4, ulysses=2): context 2, with Ulysses of 2 inside
        fsdp2x.fully_shard(model, mesh=mesh.shard)
        context = apply_context_parallel(model, mesh.sequence)

    Each rank has two chunks of every row, one from each end, so that causal attention is the same work for all. Each
    layer all-gathers keys and values, before kv heads are repeated, and reduce-scatters their gradients. Autograd keeps
    the gathered tensors of a layer until its backward. With gradient checkpointing they exist for one layer only.

    Args:
        model: as ``use_varlen_attention`` takes.
        group: the process group, a 1-D mesh of it, or a 2-D mesh (context, ulysses) for Ulysses inside. The ranks of
            its second axis share a part and exchange heads, which they must divide evenly.

    Raises:
        ValueError: heads that do not divide over the Ulysses axis; a mesh with more axes, or with two that lack names,
            are swapped, or do not have their ranks in ascending order; parameters sharded over a mesh without some of
            the ranks.
        NotImplementedError, TypeError: as ``use_varlen_attention``.
    """
    if not isinstance(group, DeviceMesh) or group.ndim == 1:
        peers = _peers(group.get_group() if isinstance(group, DeviceMesh) else group)
        return SequenceParallel(model, RankPart(peers, ulysses=Peers(), context=peers))
    _check_axes(group)
    assert group.mesh_dim_names is not None, "checked"
    flat = torch_private.flatten_mesh(group, "_".join(group.mesh_dim_names))
    context, ulysses = (_peers(group.get_group(axis)) for axis in range(2))
    return SequenceParallel(model, RankPart(_peers(flat.get_group()), ulysses=ulysses, context=context))


def _check_axes(mesh: DeviceMesh) -> None:
    """Checks that ranks lie in the order in which ``RankPart`` counts them."""
    names, ranks = mesh.mesh_dim_names, mesh.mesh.flatten().tolist()
    if mesh.ndim != 2:
        problem = "takes one axis or the two of (context, ulysses)"
    elif names is None:
        problem = "needs a mesh with the named axes (context, ulysses)"
    elif names == _AXES[::-1]:
        problem = "takes the axes in the order (context, ulysses)"
    elif ranks != sorted(ranks):
        problem = "needs a mesh with its ranks in ascending order"
    else:
        return
    raise ValueError(f"apply_context_parallel {problem}, got {mesh}. Pass init_sequence_mesh(...).sequence.")


def _peers(group: dist.ProcessGroup) -> Peers:
    return Peers(group, dist.get_rank(group), dist.get_world_size(group))


class SequenceParallel(SequenceAttention):
    """A model under sequence parallelism: cuts its inputs and gathers its outputs.

    Made by :func:`apply_ulysses` and :func:`apply_context_parallel`.
    """

    shard: RankPart

    def __init__(self, model: nn.Module, shard: RankPart) -> None:
        self.shard = shard
        self._ranks = dist.get_process_group_ranks(shard.group)
        self._checked_meshes = False
        _check_meshes(model, self._ranks)
        outer = base_model(model)
        config = outer.get_decoder().config if hasattr(outer, "get_decoder") else None
        if config is not None and hasattr(config, "num_attention_heads"):
            exchanged_heads(*head_counts(config), shard.ulysses.size)  # raises
        super().__init__(model)
        # A vision-language model merges images into full sequences first, so its decoder's inputs are cut instead.
        self._cuts_early = self.decoder is outer or self.decoder is outer.base_model
        self._hooks.append(model.register_forward_pre_hook(self._before_model, with_kwargs=True))

    @property
    def size(self) -> int:
        """Ranks of the sequence-parallel group."""
        return self.shard.size

    def make_layout(self, inputs: dict[str, Any]) -> SequenceLayout | None:
        raise RuntimeError(
            "this model computes parts of sequences. Call it with the inputs that shard_inputs(batch) returns, or "
            "inside `with context.disabled()` for full sequences (generate, evaluation)."
        )

    def _before_model(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._depth:
            return
        if not self._checked_meshes:  # if sharded after apply_ulysses, the first forward is the first chance to check
            _check_meshes(module, self._ranks)
            self._checked_meshes = True
        if kwargs.get("labels") is not None:
            raise ValueError(
                f"{type(module).__name__}: a model's own loss is wrong at the ends of parts. Omit labels and use "
                "token_mean_loss(logits, shard.next_labels, num_tokens)."
            )
        keep = kwargs.get("logits_to_keep")
        if keep is not None and (isinstance(keep, torch.Tensor) or keep != 0):
            raise ValueError(
                f"{type(module).__name__}: logits_to_keep counts positions of this rank's part, not of the sequence. "
                "Omit it, and cut the result of gather_outputs(logits, shard)."
            )

    # ---- inputs

    def shard_inputs(self, batch: Mapping[str, Any] | PackedBatch) -> SequenceShard:
        """Pads the rows of ``batch`` so that the ranks can share them and cuts out this rank's part. Collective.

        The multiple is the number of ranks; under context parallelism twice their number.

        Args:
            batch: inputs of the model, the same on every rank of the group: ``input_ids`` [rows, length] (or
                ``inputs_embeds``), optionally ``attention_mask`` [rows, length] with padding at the ends,
                ``position_ids`` (restarting for packed samples; default: counted from the row's start), ``labels``, and
                a vision-language model's other inputs, which are not cut. Or a ``PackedBatch``.

        Raises:
            ValueError: ranks of the group passed batches that differ in any bit, another rank rejected its batch, or
                an input is invalid.
            TypeError: an input that runs along the sequence is not a tensor.
            NotImplementedError: an unknown input runs along the sequence.
        """
        shard, facts, error = None, None, None
        try:
            shard, facts = self._cut(batch)
        except Exception as raised:  # the other ranks wait for this one in _compare
            error = raised
        self._compare(facts)
        if error is not None:
            raise error
        assert shard is not None, "no error"
        return shard

    def _cut(self, batch: Mapping[str, Any] | PackedBatch) -> tuple[SequenceShard, torch.Tensor]:
        """Returns this rank's part of the batch, and numbers that are equal for equal batches. Local."""
        if isinstance(batch, PackedBatch):
            inputs, layout, labels = {**batch.inputs}, batch.layout, batch.labels
            inputs.pop(KEYWORD)
        else:
            inputs = {name: value for name, value in batch.items() if value is not None}
            labels = inputs.pop("labels", None)
            layout = None
        tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
        if tokens is None:
            raise ValueError(f"shard_inputs: expected input_ids or inputs_embeds, got {', '.join(inputs) or 'nothing'}")
        _check_tensors({**inputs, "labels": labels})
        layout = layout_of(inputs) if layout is None else layout
        rows, length = tokens.shape[:2]
        facts = _facts(rows, length, layout, {**inputs, "labels": labels})
        padding = -length % self.shard.multiple
        layout = layout.cut(self.shard, length + padding, inputs_sliced=self._cuts_early)
        positions = inputs.get("position_ids")
        if positions is None and self._cuts_early:
            positions = torch.arange(length, device=tokens.device).unsqueeze(0)
        if positions is not None:
            tail = torch.arange(padding, device=positions.device).expand(*positions.shape[:-1], -1)
            inputs["position_ids"] = torch.cat((positions, tail), dim=-1)
        if "attention_mask" in inputs:
            inputs["attention_mask"] = F.pad(inputs["attention_mask"], (0, padding))
        for name in _PADDED:
            if name in inputs:
                behind = (0, 0) * (inputs[name].ndim - 2)
                inputs[name] = F.pad(inputs[name], (*behind, 0, padding))
        if self._cuts_early:
            inputs.pop("attention_mask", None)  # the layout replaces it
            inputs = cut_decoder_inputs(inputs, layout, length)
        inputs |= {KEYWORD: layout, "use_cache": False}
        if labels is not None:
            if labels.shape != (rows, length):
                raise ValueError(f"labels of shape {tuple(labels.shape)} for {rows} rows of {length} tokens")
            labels = layout.take(next_labels(F.pad(labels, (0, padding), value=-100), layout))
        return SequenceShard(inputs, labels, layout, length), facts

    def _compare(self, facts: torch.Tensor | None) -> None:
        """Checks that every rank of the group has the same batch. A difference would mix two batches, or hang.

        Args:
            facts: result of ``_facts``, or None if this rank rejects its batch.
        """
        mine = torch.zeros(_NUM_FACTS, dtype=torch.int64, device="cpu") if facts is None else facts
        group = self.shard.group
        mine = mine.to(torch_private.object_device(group))
        everyone = mine.new_empty(self.size * _NUM_FACTS)
        dist.all_gather_into_tensor(everyone, mine, group=group)
        by_rank = dict(zip(self._ranks, everyone.view(self.size, -1).tolist(), strict=True))
        if facts is None:
            return
        if rejecting := [rank for rank, (valid, *_) in by_rank.items() if not valid]:
            raise ValueError(
                f"shard_inputs: rank {', '.join(map(str, rejecting))} of the sequence-parallel group rejected its "
                "batch, so this rank raises too. Read the error of that rank."
            )
        _, *columns = zip(*by_rank.values(), strict=True)
        differing = [name for name, column in zip(_FACTS, columns, strict=True) if len(set(column)) > 1]
        if differing:
            shapes = "; ".join(f"rank {rank}: {rows} x {length}" for rank, (_, rows, length, *_) in by_rank.items())
            raise ValueError(
                "shard_inputs: the ranks of a sequence-parallel group must pass the same batch, but they differ in "
                f"{', '.join(differing)} ({shapes}). Give the data loader the data-parallel rank, not the global one."
            )

    # ---- outputs

    def gather_outputs(self, values: torch.Tensor, shard: SequenceShard) -> torch.Tensor:
        """Gathers the full sequence on every rank: [rows, positions of this rank, ...] -> [rows, length, ...].

        It drops padding at the end. Backward gives each rank the gradient of its own slice, times the group's size.
        This is correct if every rank of the group computes the same loss and gradients are averaged over all ranks, as
        ``fully_shard`` does. The result is then the mean over data-parallel ranks. Collective, in forward only.

        Args:
            values: values of this rank's positions.
            shard: result of ``shard_inputs``.
        """
        if values.shape[:2] != (shard.layout.num_rows, shard.layout.local_length):
            raise ValueError(
                f"gather_outputs: values of shape {tuple(values.shape)} do not belong to {shard.layout}; expected "
                f"[{shard.layout.num_rows}, {shard.layout.local_length}, ...]"
            )
        return _Gather.apply(values, shard.layout)[:, : shard.length]


class _Gather(torch.autograd.Function):
    """Gathers parts of dim 1 from all ranks. Backward returns this rank's part of the gradient times their number."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, layout: SequenceLayout):
        ctx.layout = layout
        assert layout.shard is not None, "a layout over ranks"
        everyone = values.new_empty(layout.shard.size, *values.shape)
        dist.all_gather_into_tensor(everyone.view(-1), values.contiguous().view(-1), group=layout.shard.group)
        return layout.join(list(everyone))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        return ctx.layout.take(grad) * float(ctx.layout.shard.size), None


# ---- comparison of batches

_ALONG = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels")  # inputs along the sequence
_FACTS = ("rows", "length", "names, shapes or dtypes", "samples", *_ALONG, "other inputs")
_NUM_FACTS = 1 + len(_FACTS)


def _check_tensors(inputs: Mapping[str, Any]) -> None:
    for name in _ALONG:
        value = inputs.get(name)
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(
                f"shard_inputs: {name} must be a tensor, got {type(value).__name__}. Pass torch.tensor(...)."
            )
    for name, num_dims in (("input_ids", 2), ("inputs_embeds", 3)):
        value = inputs.get(name)
        if value is not None and value.ndim != num_dims:
            wanted = "[rows, length, hidden size]" if num_dims == 3 else "[rows, length]"
            raise ValueError(f"shard_inputs: {name} must have the shape {wanted}, got {list(value.shape)}")


def _facts(rows: int, length: int, layout: SequenceLayout, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Returns 1, for a valid batch, and an int64 for each of ``_FACTS``."""
    tensors = {name: value for name, value in sorted(inputs.items()) if isinstance(value, torch.Tensor)}
    shapes = zlib.crc32(repr([(name, value.dtype, *value.shape) for name, value in tensors.items()]).encode())
    known = torch.tensor([1, rows, length, shapes, zlib.crc32(repr(layout.samples).encode())], device="cpu")
    device = next(iter(tensors.values())).device
    sums = {name: sum_of_bits(value).to(device) for name, value in tensors.items()}
    zero = torch.zeros((), dtype=torch.int64, device=device)
    along = [sums.pop(name, zero) for name in _ALONG]
    others = zero
    for one in sums.values():
        others = 31 * others + one
    return torch.cat((known, torch.stack([*along, others]).cpu()))


def _check_meshes(model: nn.Module, ranks: list[int]) -> None:
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and param.requires_grad:
            missing = set(ranks) - set(param.device_mesh.mesh.flatten().tolist())
            if missing:
                raise ValueError(
                    f"{name} is sharded over the ranks {param.device_mesh.mesh.flatten().tolist()}, without "
                    f"{sorted(missing)} of the sequence-parallel group {ranks}. Its gradient would miss their part of "
                    "every sequence. Shard over all ranks of both axes: init_sequence_mesh().shard."
                )
