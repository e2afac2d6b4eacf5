"""Estimates what a training step of a decoder keeps between forward and backward, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp2x.models.sequence.attention import base_model, head_counts, head_dims

# model_type of HuggingFace models whose blocks are as estimate_activations says.
KNOWN = ("llama", "mistral", "qwen2", "qwen3")

_WIDE = 4  # bytes of a number in float32, in which norms and losses compute


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank.

    Attributes:
        tokens: positions of the micro-batch on this rank.
        kept_bytes: what all blocks keep from forward to backward.
        block_bytes: what the backward of one block adds at most.
        loss_bytes: what the last norm, the head, and the loss add.
    """

    tokens: int
    kept_bytes: int
    block_bytes: int
    loss_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The loss is freed when backward reaches the last block."""
        return self.kept_bytes + max(self.block_bytes, self.loss_bytes)


def estimate_activations(
    model: nn.Module, tokens: int, itemsize: int, *, recomputes: bool = False, tile: tuple[int, int] | None = None
) -> Activations | None:
    """Estimates the activations of a forward and backward of a HuggingFace model with blocks as in Llama.

    Autograd keeps the inputs of every operation that needs them in backward. For a block of transformers' Llama, these
    are, for each token, with ``e`` bytes a number, width ``h``, MLP width ``f``, and attention widths ``a`` (queries)
    and ``k`` (keys and values):

    - two norms: the input in float32, the normalized input if the norm is trained, and the output: ``4h + e(h + h)``
    - attention by a fused kernel: queries, keys, values, and output: ``e(2a + 2k)``, a float32 per head, and norms of
      queries and keys, if the model has them
    - the gated MLP: both projections, the activated one, and the product: ``4ef``

    Backward adds the gradients of the MLP's product and of both its factors. With recomputation, each block keeps its
    input (``eh``), and backward adds one block. Logits over ``V`` words take ``12V`` in backward: log-probabilities,
    their gradient, and that of the logits, all in float32. The source is transformers 5.24, and
    ``tests/parity/plan/test_activations.py`` compares the sum with real steps.

    Args:
        model: a HuggingFace model, plain or in PEFT. It may be on the meta device.
        tokens: positions of a micro-batch on this rank.
        itemsize: bytes of a number in the compute dtype.
        recomputes: whether backward recomputes each block (activation checkpointing).
        tile: tokens and vocabulary rows of a tile, if the loss is computed from tiles of logits.

    Returns:
        The estimate, or None for other models, and for eager attention.
    """
    config: Any = getattr(base_model(model), "config", None)
    if getattr(config, "model_type", None) not in KNOWN or config._attn_implementation == "eager":
        return None
    heads, key_heads = head_counts(config)
    head_dim, _ = head_dims(config)
    hidden, mlp, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = heads * head_dim, key_heads * head_dim
    trains_norms = any(param.requires_grad for name, param in model.named_parameters() if "norm" in name)
    norm = max(itemsize, _WIDE) + (itemsize if trains_norms else 0)  # for each number, without the output
    normed = 2 * hidden + (queries + keys if config.model_type == "qwen3" else 0)
    block = norm * normed + itemsize * 2 * (hidden + queries + keys + 2 * mlp) + _WIDE * heads
    backward = itemsize * 2 * (mlp + hidden)
    if tile is None:
        loss = 3 * _WIDE * vocabulary * tokens
    else:
        height, width = min(tile[0], tokens), min(tile[1], vocabulary)
        loss = _WIDE * (2 * height * width + hidden * (tokens + vocabulary))
    return Activations(
        tokens=tokens,
        kept_bytes=tokens * config.num_hidden_layers * (itemsize * hidden if recomputes else block),
        block_bytes=tokens * (backward + (block if recomputes else 0)),
        loss_bytes=tokens * hidden * (norm + itemsize) + loss,
    )
