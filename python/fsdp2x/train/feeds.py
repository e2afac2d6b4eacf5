"""Turns data into the losses of a step: blocks through the model's loss, samples packed, sequences cut.

A feed yields the micro-batches of a step as calls. Each runs a forward and returns this rank's share of the loss. The
mean over ranks of the sum of shares is the mean over all tokens of the step, and so are the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fsdp2x.api import IGNORE, base_model, mean_of_tokens
from fsdp2x.base.failures import reworded
from fsdp2x.rl import causal_lm_loss, score
from fsdp2x.rl.tiled_loss import require_tiled_loss
from fsdp2x.sequence import (
    PackedBatch,
    apply_context_parallel,
    apply_ulysses,
    count_label_tokens,
    init_sequence_mesh,
    micro_batches,
    token_mean_loss,
    use_varlen_attention,
)
from fsdp2x.train.config import ConfigError, DataConfig, SequenceRanks
from fsdp2x.train.data import BlockStream, Samples, held_out_batches
from fsdp2x.train.distributed import mean_over_ranks
from fsdp2x.train.strategy import Batching

Share = Callable[[], torch.Tensor]


@dataclass
class BlockFeed:
    """Blocks of equal length, different on each rank."""

    model: torch.nn.Module
    stream: BlockStream
    batching: Batching
    device: torch.device
    tiled_loss: bool

    def step(self) -> tuple[list[Share], int]:
        """Returns the micro-batches of this rank's next step, and the step's tokens over all ranks."""
        batches = [self.stream.next_batch() for _ in range(self.batching.accumulation)]
        num_tokens = sum(batch.numel() for batch in batches) * self.stream.world_size
        return [partial(self._share, batch, len(batches)) for batch in batches], num_tokens

    def _share(self, tokens: torch.Tensor, num_batches: int) -> torch.Tensor:
        # Every block has the same number of tokens, so the mean of means is the mean over all tokens.
        return self._loss(tokens) / num_batches

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(self.device, non_blocking=True)
        inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        return causal_lm_loss(self.model, inputs) if self.tiled_loss else self.model(**inputs).loss

    def evaluate(self, blocks: torch.Tensor | Samples) -> float:
        """Returns the mean loss per predicted token, the same on every rank. Collective."""
        loss_sum = weight_sum = 0.0
        for tokens, weight in self._held_out(blocks):
            loss_sum += float(self._loss(tokens)) * weight
            weight_sum += weight
        return mean_over_ranks(loss_sum, weight_sum, self.device)

    def _held_out(self, blocks: torch.Tensor | Samples) -> list[tuple[torch.Tensor, float]]:
        assert isinstance(blocks, torch.Tensor), "samples differ in length"
        rank, world_size = self.stream.rank, self.stream.world_size
        return held_out_batches(blocks, batch_size=self.batching.eval_batch_size, rank=rank, world_size=world_size)


@dataclass
class SequenceFeed(BlockFeed):
    """Packed samples, parts of sequences, or both. Every label has the same weight.

    `context` cuts sequences over the ranks that share them. None: every rank has full ones. A step takes `batch_size`
    x `accumulation` blocks or samples per rank. Samples form as many micro-batches as the fullest rank needs.
    """

    data: DataConfig
    context: Any = None

    def step(self) -> tuple[list[Share], int]:
        if self.data.packing:
            batches = [self.stream.next_samples() for _ in range(self.batching.accumulation)]
            return self._shares(self._pack(sample for batch in batches for sample in batch))
        blocks = (self.stream.next_batch() for _ in range(self.batching.accumulation))
        return self._shares({"input_ids": block, "labels": block} for block in blocks)

    def evaluate(self, blocks: torch.Tensor | Samples) -> float:
        if isinstance(blocks, torch.Tensor):
            shares, _ = self._shares(
                {"input_ids": tokens, "labels": tokens if weight else torch.full_like(tokens, IGNORE)}
                for tokens, weight in self._held_out(blocks)
            )
        else:
            shares, _ = self._shares(self._pack(self._held_out_samples(blocks)))
        return mean_over_ranks(sum(float(share()) for share in shares), 1.0, self.device)

    def _held_out_samples(self, samples: Samples) -> Iterator[dict[str, torch.Tensor]]:
        rank, size, readers = self.stream.rank, self.batching.eval_batch_size, self.stream.world_size
        for start in range(rank * size, len(samples), readers * size):
            yield from (samples.sample(i) for i in range(start, min(start + size, len(samples))))

    def _pack(self, samples: Iterable[dict[str, torch.Tensor]]) -> Iterator[PackedBatch]:
        return micro_batches(list(samples), self.data.max_tokens or self.data.block_size)

    def _shares(self, batches: Iterable[Any]) -> tuple[list[Share], int]:
        inputs, labels = [], []
        for batch in batches:
            if isinstance(batch, dict):
                batch = {name: value.to(self.device) for name, value in batch.items()}
            else:
                batch = batch.to(self.device)
            if self.context is not None:
                batch = self.context.shard_inputs(batch)
            inputs.append(batch.inputs)
            labels.append(batch.next_labels)
        num_tokens = count_label_tokens(labels)
        shares: list[Share] = [partial(self._share_of, *pair, num_tokens) for pair in zip(inputs, labels, strict=True)]
        return shares, int(num_tokens)

    def _share_of(self, inputs: dict[str, Any], labels: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        if self.tiled_loss:
            return mean_of_tokens(score(self.model, inputs, labels).log_probs, num_tokens)
        return token_mean_loss(self.model(**inputs).logits, labels, num_tokens)


def _require_token_loss(model: torch.nn.Module, data: DataConfig, sequence_ranks: SequenceRanks) -> None:
    """Checks that the loss of tokens is all of the model's loss where only the former is computed."""
    config = base_model(model).config
    if not getattr(config.get_text_config(), "output_router_logits", False):
        return
    reasons = {
        f"parallel.sequence_parallel={sequence_ranks.total}": sequence_ranks.total > 1,
        "data.packing=true": data.packing,
    }
    if reason := next((name for name, applies in reasons.items() if applies), None):
        raise ConfigError(
            "model.config.output_router_logits: got true, but the router's auxiliary loss of a batch is not that of "
            f"its parts or samples, so {reason} cannot include it. Set output_router_logits to false, in model.config "
            "or in the config.json of model.path, or train without packing and sequence_parallel."
        )


def resolve_tiled_loss(wanted: bool | None, model: torch.nn.Module, device: torch.device) -> bool:
    """Returns whether the loss is computed without logits. None: on a device, if the model's head and loss are known.

    On a CPU, memory for logits is rarely short, and backward would compute them a second time.

    Raises:
        ConfigError: it is wanted, but the model has another head or loss.
    """
    if wanted is False or wanted is None and device.type == "cpu":
        return False
    try:
        require_tiled_loss(model)
    except NotImplementedError as error:
        if wanted:
            raise ConfigError(f"train.tiled_loss: {error}") from None
        return False
    return True


def make_feed(
    model: torch.nn.Module,
    stream: BlockStream,
    batching: Batching,
    data: DataConfig,
    *,
    sequence_ranks: SequenceRanks,
    device: torch.device,
    tiled_loss: bool | None,
) -> BlockFeed:
    """Makes the feed of a config. Changes the sharded model's attention if necessary. Collective.

    Raises:
        ConfigError: the model rejects a setting, or its own loss has a part that this feed would leave out.
    """
    _require_token_loss(model, data, sequence_ranks)
    common: dict[str, Any] = {"model": model, "stream": stream, "batching": batching, "device": device}
    common["tiled_loss"] = resolve_tiled_loss(tiled_loss, model, device)
    if sequence_ranks.total > 1:
        with reworded(ConfigError, "parallel.sequence_parallel"):
            ulysses, size = sequence_ranks.ulysses, sequence_ranks.total
            if sequence_ranks.context == 1:
                context = apply_ulysses(model, init_sequence_mesh(size, device.type).sequence)
            else:
                mesh = init_sequence_mesh(size, device.type, ulysses=ulysses if ulysses > 1 else None)
                context = apply_context_parallel(model, mesh.sequence)
        return SequenceFeed(**common, data=data, context=context)
    if data.packing:
        with reworded(ConfigError, "data.packing"):
            use_varlen_attention(model)
        return SequenceFeed(**common, data=data)
    return BlockFeed(**common)
