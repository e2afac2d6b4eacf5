"""Tiles of logits from hidden states and a head's weight, and the products that take their gradients back.

A tile is a few rows of hidden states times a block of the weight, in fp32 (fp64 for fp64 operands), in memory that the
next tile uses again. bf16 and fp16 operands: a CPU multiplies them as fp32; a device multiplies them as they are into
fp32, so that gradients of tiles are rounded to their dtype before the product, and no sum ever is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its head's output: ``z -> scale * z``, then ``z -> soft_cap * tanh(z / soft_cap)``."""

    scale: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True)
class Block:
    """Rows ``first`` and on of a head's weight, in the dtype of the products, and their bias."""

    first: int
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.weight.shape[0])


class TiledProducts:
    """Scores (logits over temperatures) of ``hidden`` [rows, width] tile by tile; owns the memory of the tiles.

    ::

        for block in products.blocks():          # of the vocabulary
            for part in products.parts:          # of the rows
                tile = products.scores(block, part)
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transform: LogitTransform,
        temperature: float | torch.Tensor,
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
        # A factor that is the same everywhere costs nothing inside the product, but a soft cap lies in between.
        after = outer / temperature
        self._alpha = inner if self._is_capped or isinstance(after, torch.Tensor) else inner * after
        self._after = after.to(self.dtype).unsqueeze(1) if isinstance(after, torch.Tensor) else after

    def blocks(self) -> Iterator[Block]:
        num_rows = self._weight.shape[0]
        for first in range(0, num_rows, self._width):
            rows = slice(first, min(first + self._width, num_rows))
            bias = None if self._bias is None else self._bias[rows].to(self.dtype)
            yield Block(first, self._weight[rows].to(self._rounded).to(self._operand), bias)

    def scores(self, block: Block, part: slice, *, tanh_into: torch.Tensor | None = None) -> torch.Tensor:
        """The tile, valid until the next call. ``tanh_into``: where the soft cap's tanh is copied for backward."""
        tile = self.spare(-1, block, part)
        if block.bias is not None:
            tile.copy_(block.bias)
        beta = self._alpha if block.bias is not None else 0.0
        _add_product(tile, self.hidden[part], block.weight.t(), alpha=self._alpha, beta=beta)
        if self._is_capped:
            tile.tanh_()
            if tanh_into is not None:
                tanh_into.copy_(tile)
        if self._is_capped or isinstance(self._after, torch.Tensor):
            tile.mul_(self._after[part] if isinstance(self._after, torch.Tensor) else self._after)
        return tile

    def spare(self, index: int, block: Block, part: slice) -> torch.Tensor:
        """A further tile of the same shape, not initialised: ``index`` from 0."""
        shape = part.stop - part.start, block.weight.shape[0]
        return self._memory[1 + index][: shape[0] * shape[1]].view(shape)

    def add_to_hidden(self, grad_hidden: torch.Tensor, gradient: torch.Tensor, block: Block, part: slice) -> None:
        """``grad_hidden[part] += gradient @ block.weight``, for the gradient of a tile."""
        _add_product(grad_hidden[part], gradient.to(self._operand), block.weight)

    def add_to_weight(self, grad_weight: torch.Tensor, gradient: torch.Tensor, part: slice) -> None:
        """``grad_weight += gradient.T @ hidden[part]``, for the gradient of a tile of that block."""
        _add_product(grad_weight, gradient.to(self._operand).t(), self.hidden[part])


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, alpha: float = 1.0, beta: float = 1.0
) -> None:
    """``total = beta * total + alpha * left @ right`` in the dtype of ``total``, which may be the wider one."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=beta, alpha=alpha, out=total)
    else:
        torch.addmm(total, left, right, total.dtype, beta=beta, alpha=alpha, out=total)
