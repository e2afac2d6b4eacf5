"""Computes log-probabilities and entropies from hidden states and the head's weight, without all logits at once.

Forward keeps three numbers per row. Backward computes each tile again and adds its products to both gradients:

    forward     for each block of the vocabulary, for each part of the rows:  z = h W^T  ->  max, sum e^z, sum e^z z
    backward    z = h W^T  ->  G = dloss/dz (models/sequence/loss.py)  ->  dh += G W,  dW += G^T h, both summed in fp32

Rows without a label are dropped before all products, and rows whose gradients are zero before those of backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from fsdp2x.api import IGNORE, RowGradients, RowSums, check_labels, check_temperature


@dataclass(frozen=True)
class LogitTransform:
    """The model's change of its head's output: ``z -> scale * z``, then ``z -> soft_cap * tanh(z / soft_cap)``."""

    scale: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True)
class Block:
    """A tile of a head's weight, whose first row is ``first``, in the dtype of the products, and its bias."""

    first: int
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.weight.shape[0])


class TiledProducts:
    """Computes scores (logits over temperatures) of ``hidden`` [rows, width] tile by tile, and owns the tiles' memory.

    ::

        for block in products.blocks():          # of the vocabulary
            for part in products.parts:          # of the rows
                tile = products.scores(block, part)

    A tile is a few rows of hidden states times a block of the weight, in fp32 (fp64 for fp64 operands). The next tile
    reuses its memory. A CPU multiplies bf16 and fp16 operands as fp32. A device multiplies them unchanged into fp32,
    so gradients of tiles are rounded to their dtype before the product, but sums never are.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transform: LogitTransform,
        temperature: float,
        tile: tuple[int, int],
        num_spares: int,
    ) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._rounded = hidden.dtype
        self._operand = self.dtype if hidden.device.type == "cpu" else hidden.dtype
        self.hidden = hidden.to(self._operand)
        self._weight, self._bias = weight, bias
        height, self._width = min(tile[0], hidden.shape[0]), min(tile[1], weight.shape[0])
        self.parts = [slice(s, min(s + height, hidden.shape[0])) for s in range(0, hidden.shape[0], height or 1)]
        shape = (1 + num_spares, height * self._width)
        self._memory = torch.empty(shape, dtype=self.dtype, device=hidden.device)
        cap = transform.soft_cap
        self._is_capped = cap is not None
        inner, outer = (transform.scale, 1.0) if cap is None else (transform.scale / cap, cap)
        # A constant factor costs nothing inside the product, but a soft cap lies in between.
        self._after = outer / temperature
        self._alpha = inner if self._is_capped else inner * self._after

    def blocks(self) -> Iterator[Block]:
        num_rows = self._weight.shape[0]
        for first in range(0, num_rows, self._width):
            rows = slice(first, min(first + self._width, num_rows))
            bias = None if self._bias is None else self._bias[rows].to(self.dtype)
            yield Block(first, self._weight[rows].to(self._rounded).to(self._operand), bias)

    def scores(self, block: Block, part: slice, *, tanh_into: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the tile, valid until the next call. Copies the soft cap's tanh to ``tanh_into`` for backward."""
        tile = self.spare(-1, block, part)
        if block.bias is not None:
            tile.copy_(block.bias)
        beta = self._alpha if block.bias is not None else 0.0
        _add_product(tile, self.hidden[part], block.weight.t(), alpha=self._alpha, beta=beta)
        if self._is_capped:
            tile.tanh_()
            if tanh_into is not None:
                tanh_into.copy_(tile)
            tile.mul_(self._after)
        return tile

    def spare(self, index: int, block: Block, part: slice) -> torch.Tensor:
        """Returns another uninitialized tile of the same shape. ``index`` starts at 0."""
        shape = part.stop - part.start, block.weight.shape[0]
        return self._memory[1 + index][: shape[0] * shape[1]].view(shape)

    def add_to_hidden(self, grad_hidden: torch.Tensor, gradient: torch.Tensor, block: Block, part: slice) -> None:
        """Adds ``gradient @ block.weight`` to ``grad_hidden[part]``, for the gradient of a tile."""
        _add_product(grad_hidden[part], gradient.to(self._operand), block.weight)

    def add_to_weight(self, grad_weight: torch.Tensor, gradient: torch.Tensor, part: slice) -> None:
        """Adds ``gradient.T @ hidden[part]`` to ``grad_weight``, for the gradient of a tile of that block."""
        _add_product(grad_weight, gradient.to(self._operand).t(), self.hidden[part])


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, alpha: float = 1.0, beta: float = 1.0
) -> None:
    """Sets ``total = beta * total + alpha * left @ right`` in the dtype of ``total``, which may be the wider one."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=beta, alpha=alpha, out=total)
    else:
        torch.addmm(total, left, right, total.dtype, beta=beta, alpha=alpha, out=total)


# Tokens and vocabulary rows of a tile. Products of this size are as fast as the full one.
CPU_TILE, DEVICE_TILE = (1024, 4096), (2048, 8192)


class HeadScores(NamedTuple):
    """Result of :func:`head_scores`: tensors of the labels' shape, zero where the label is -100."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


def head_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    next_labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
    temperature: float = 1.0,
    entropy: bool = False,
    tile: tuple[int, int] | None = None,
) -> HeadScores:
    """Computes ``log_softmax(logits / temperature)`` at the labels, and its entropy, for the logits of a linear head.

    Use it if you have hidden states; :func:`score` runs a model. It never stores all of ``logits = transform(hidden @
    weight.T + bias)``, only one tile at a time. Tiles and results are in fp32 (fp64 for fp64 operands). Both gradients
    are summed in that dtype over all tiles and rounded once. Without gradients nothing is kept.

    Args:
        hidden: hidden states, [..., width]. All three operands have one floating dtype, or autocast rounds them.
        weight: weight of the head, [vocabulary, width].
        next_labels: [...], int64, already shifted. A position has the token that it predicts, or -100. Positions with
            -100 cost nothing.
        bias: [vocabulary], or None.
        transform: the model's change of its head's output before the softmax.
        temperature: a positive number.
        entropy: whether to return entropies in nats. They have gradients as well.
        tile: tokens and vocabulary rows of a tile. None: chosen for the device.

    Returns:
        Log-probabilities and entropies.

    Raises:
        ValueError: shapes do not match, a label is outside of the vocabulary, or the temperature is not positive.
        TypeError: operands have different dtypes.
    """
    _check_shapes(hidden, weight, bias, next_labels)
    check_temperature(temperature)
    hidden = _as_operand(hidden, weight)
    labels = next_labels.reshape(-1)
    kept = _labelled(labels, weight.shape[0])
    if tile is None:
        tile = CPU_TILE if hidden.device.type == "cpu" else DEVICE_TILE
    settings = _Settings(transform, temperature, entropy, tile)
    log_probs, entropies = _HeadScores.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels, kept, settings)
    return HeadScores(log_probs.view(next_labels.shape), entropies.view(next_labels.shape) if entropy else None)


def _check_shapes(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor) -> None:
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"fsdp2x.rl.head_scores: expected shapes [..., width], [vocabulary, width] and [...] of hidden states, "
            f"head and labels, got {list(hidden.shape)}, {list(weight.shape)} and {list(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"fsdp2x.rl.head_scores: the head of shape {list(weight.shape)} has a bias of shape {list(bias.shape)}"
        )


def _as_operand(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the hidden states in the dtype of the products: autocast's, else their own."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return hidden.to(torch.get_autocast_dtype(kind))
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"fsdp2x.rl.head_scores: hidden states are {hidden.dtype}, but the head's weight is {weight.dtype}. Cast "
            "one of them, or compute under autocast."
        )
    return hidden


def _labelled(labels: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
    """Returns indices of the labeled rows, or None if all are."""
    if check_labels(labels, num_tokens) == labels.numel():
        return None
    return (labels != IGNORE).nonzero().squeeze(1)


def _select(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return values if rows is None else values[rows]


def _spread(values: torch.Tensor, rows: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """Returns ``values`` at their ``rows`` of ``num_rows``, with zeros elsewhere."""
    if rows is None:
        return values
    return values.new_zeros(num_rows, *values.shape[1:]).index_copy_(0, rows, values)


@dataclass(frozen=True)
class _Settings:
    transform: LogitTransform
    temperature: float
    entropy: bool
    tile: tuple[int, int]

    def products(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_spares: int):
        return TiledProducts(hidden, weight, bias, self.transform, self.temperature, self.tile, num_spares)


class _HeadScores(torch.autograd.Function):
    """The two loops of this module's docstring over the labeled rows ``kept`` (None: all)."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, kept, settings: _Settings):
        ctx.set_materialize_grads(False)
        rows, targets = _select(hidden, kept), _select(labels, kept)
        with torch.autocast(rows.device.type, enabled=False):
            sums = _sums(settings, (rows, weight, bias), targets)
        entropies = sums.entropies if settings.entropy else None
        ctx.save_for_backward(rows, weight, bias, targets, kept, sums.highest, sums.total, entropies)
        ctx.settings, ctx.num_positions = settings, labels.shape[0]
        log_probs = _spread(sums.log_probs, kept, labels.shape[0])
        return log_probs, None if entropies is None else _spread(entropies, kept, labels.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropies):
        rows, weight, bias, targets, kept, highest, total, entropies = ctx.saved_tensors
        settings: _Settings = ctx.settings
        of_labels, of_entropies = (
            None if one is None else _select(one, kept) for one in (grad_log_probs, grad_entropies)
        )
        live = _live([of_labels, of_entropies], rows)
        if live is not None:
            rows, targets, highest, total = rows[live], targets[live], highest[live], total[live]
            entropies = None if entropies is None else entropies[live]
            of_labels, of_entropies = (None if one is None else one[live] for one in (of_labels, of_entropies))
            kept = live if kept is None else kept[live]
        scale = settings.transform.scale / settings.temperature
        gradients = RowGradients.of(highest, total, of_labels, of_entropies, entropies, scale)
        with torch.autocast(rows.device.type, enabled=False):
            grad_rows, grad_weight, grad_bias = _add_up(
                settings, gradients, (rows, weight, bias), targets, ctx.needs_input_grad
            )
        grad_hidden = None if grad_rows is None else _spread(grad_rows.to(rows.dtype), kept, ctx.num_positions)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _sums(settings: _Settings, operands: tuple[torch.Tensor, ...], targets: torch.Tensor) -> RowSums:
    """Returns the statistics of all rows over the full vocabulary."""
    products = settings.products(*operands, num_spares=int(settings.entropy))
    sums = RowSums.start(targets.shape[0], targets, products.dtype, entropy=settings.entropy)
    for block in products.blocks():
        for part in products.parts:
            spare = products.spare(0, block, part) if settings.entropy else None
            sums.rows(part).add(products.scores(block, part), targets[part], block.first, spare)
    return sums


def _live(gradients: list[torch.Tensor | None], rows: torch.Tensor) -> torch.Tensor | None:
    """Returns rows with a nonzero gradient, or None if all have one. Clipped tokens have none."""
    has_gradient = torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)
    for gradient in gradients:
        if gradient is not None:
            has_gradient |= gradient != 0
    live = has_gradient.nonzero().squeeze(1)
    return None if live.numel() == rows.shape[0] else live


def _add_up(
    settings: _Settings,
    gradients: RowGradients,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    targets: torch.Tensor,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns gradients of the rows (in the dtype of the sums), the weight and the bias. None for unwanted ones."""
    rows, weight, bias = operands
    is_capped = settings.transform.soft_cap is not None
    products = settings.products(rows, weight, bias, num_spares=2 if is_capped else 1)
    grad_rows = torch.zeros(rows.shape, dtype=products.dtype, device=rows.device) if wanted[0] else None
    grad_weight = torch.empty_like(weight) if wanted[1] else None
    grad_bias = torch.empty_like(bias) if bias is not None and wanted[2] else None
    for block in products.blocks():
        of_block = _Total(grad_weight, block.rows, products.dtype)
        of_bias = _Total(grad_bias, block.rows, products.dtype)
        for part in products.parts:
            tanh = products.spare(1, block, part) if is_capped else None
            scores = products.scores(block, part, tanh_into=tanh)
            gradients.rows(part).apply_(scores, targets[part], block.first, products.spare(0, block, part))
            if tanh is not None:
                scores.mul_(tanh.square_().neg_().add_(1.0))
            if grad_rows is not None:
                products.add_to_hidden(grad_rows, scores, block, part)
            if of_block.sum is not None:
                products.add_to_weight(of_block.sum, scores, part)
            if of_bias.sum is not None:
                of_bias.sum.add_(scores.sum(0))
        of_block.store()
        of_bias.store()
    return grad_rows, grad_weight, grad_bias


class _Total:
    """A sum in the wide dtype over all tiles of a block, for some rows of a gradient, if there is one."""

    def __init__(self, gradient: torch.Tensor | None, rows: slice, dtype: torch.dtype) -> None:
        self._place = None if gradient is None else gradient[rows]
        self.sum = None
        if self._place is not None:
            self.sum = self._place.zero_() if self._place.dtype == dtype else self._place.to(dtype).zero_()

    def store(self) -> None:
        if self.sum is not self._place and self._place is not None and self.sum is not None:
            self._place.copy_(self.sum)
