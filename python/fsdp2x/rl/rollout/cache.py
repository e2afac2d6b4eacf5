"""``RowCache``: keys and values of rows of different lengths, which join and leave between two tokens.

Rows are aligned on the right: the last column has the last token of every row. The attention mask hides the columns on
the left of a shorter row:

    columns   start            end
    row 0     p0  p1  p2  a0  a1
    row 1             p0  p1  a0

Each layer has one buffer for keys and one for values, [rows, heads, columns, size]. A token fills the next column, so
buffers are copied only when they are full. All values are finite, because attention multiplies hidden columns by zero.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_SPARE_COLUMNS = 32  # minimum, in a new buffer


class RowCache:
    """A transformers cache for one model (``for_model``), whose rows are those of a batch."""

    def __init__(self, model: nn.Module) -> None:
        """Makes an empty cache.

        Raises:
            NotImplementedError: a layer of the model keeps other state than keys and values.
        """
        from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        layers: list[Any] = []
        for layer in DynamicCache(config=model.config).layers:  # type: ignore[arg-type]
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                layers.append(_layer_class()(isinstance(layer, DynamicSlidingWindowLayer)))
            elif type(layer).__name__ == "DummyLayer":
                layers.append(layer)  # it keeps no state
            else:
                raise NotImplementedError(
                    f"fsdp2x.rollout.sample: {type(model).__name__} has layers with a {type(layer).__name__}, but only "
                    "attention with keys and values is supported. Sample with vLLM or SGLang."
                )
        #: The cache argument of the model.
        self.for_model = Cache(layers=layers)
        self._layers = [layer for layer in layers if isinstance(layer, _layer_class())]

    def join(self, other: RowCache, index: torch.Tensor) -> None:
        """Appends rows ``index`` of ``other``, which may repeat."""
        for layer, joined in zip(self._layers, other._layers, strict=True):
            layer.join(joined, index)

    def keep(self, holes: Sequence[int], movers: Sequence[int], num_rows: int, num_columns: int) -> None:
        """Moves the rows ``movers`` to the places ``holes``, and keeps the first rows and the last columns."""
        for layer in self._layers:
            layer.keep(list(holes), list(movers), num_rows, num_columns)


@functools.cache
def _layer_class() -> Any:
    from transformers.cache_utils import DynamicLayer

    class ColumnLayer(DynamicLayer):
        """A layer's keys and values. ``keys`` and ``values`` are views of the columns in use.

        A layer with a sliding window also keeps all columns, because the model's mask hides those outside of it.
        """

        def __init__(self, is_sliding: bool) -> None:
            super().__init__()
            self.is_sliding = is_sliding
            self._buffers: list[torch.Tensor] = []
            self._num_rows = self._start = self._end = 0

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            """Appends a column for each new token. The attention reads the result."""
            num_new = key_states.shape[2]
            if not self._buffers:
                self._buffers, self._num_rows = [key_states, value_states], key_states.shape[0]
            else:
                if self._end + num_new > self._buffers[0].shape[2]:
                    self._resize(self._num_rows, self._end - self._start, num_new)
                for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
                    buffer[: self._num_rows, :, self._end : self._end + num_new] = states
            self._end += num_new
            self._show()
            return self.keys, self.values

        def join(self, other: ColumnLayer, index: torch.Tensor) -> None:
            num_columns = max(self._end - self._start, other._end - other._start)
            first, num_rows = self._num_rows, self._num_rows + len(index)
            if not self._buffers:
                shapes = [buffer.shape for buffer in other._buffers]
                self._buffers = [b.new_empty(0, s[1], 0, s[3]) for b, s in zip(other._buffers, shapes, strict=True)]
            if num_rows > self._buffers[0].shape[0] or self._end < num_columns:
                self._resize(num_rows, num_columns, 0)
            place = slice(self._end - (other._end - other._start), self._end)
            for mine, states in zip(self._buffers, other._buffers, strict=True):
                mine[first:num_rows, :, place] = states[index, :, other._start : other._end]
            self._num_rows, self._start = num_rows, self._end - num_columns
            self._show()

        def keep(self, holes: list[int], movers: list[int], num_rows: int, num_columns: int) -> None:
            for buffer in self._buffers if holes else ():
                buffer[holes, :, self._start : self._end] = buffer[movers, :, self._start : self._end]
            self._num_rows, self._start = num_rows, self._end - num_columns
            self._show()

        def _resize(self, num_rows: int, num_columns: int, num_new: int) -> None:
            """Copies to buffers of this size, with the last column at ``num_columns`` and spare columns after it."""
            length = self._end - self._start
            capacity = num_columns + num_new + max(_SPARE_COLUMNS, num_columns // 4)
            for place, old in enumerate(self._buffers):
                new = old.new_zeros(num_rows, old.shape[1], capacity, old.shape[3])
                kept = old[: self._num_rows, :, self._start : self._end]
                new[: self._num_rows, :, num_columns - length : num_columns] = kept
                self._buffers[place] = new
            self._start, self._end = num_columns - length, num_columns

        def _show(self) -> None:
            self.is_initialized, self.device = True, self._buffers[0].device
            self.keys, self.values = (b[: self._num_rows, :, self._start : self._end] for b in self._buffers)

    return ColumnLayer
