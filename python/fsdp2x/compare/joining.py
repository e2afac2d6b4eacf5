"""Trains a run with fewer ranks on the rows of a run with more, so that losses, gradients, and weights can be compared.

- ``Source``: run a. It saves the batches that each rank's loaders give.
- ``Joined``: run b. Each process has the rows of several ranks of run a: its loaders give their batches joined in the
  order of ranks. Tensors are cut into the rows of each rank by the shapes that run a recorded.

Both draw the random numbers of dropout separately for the rows of each rank. The seed is drawn from torch's global
generator, which activation checkpointing restores. So both runs have the same masks, also when they recompute.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fsdp2x.compare.containers import leaves, mapped
from fsdp2x.compare.engines import Patches
from fsdp2x.compare.trace import INPUT, LOADER, OUTPUT_GRADIENT, PER_RANK, Key, RankTrace, Rows

_RANDOM = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_RANDOM += ("scaled_dot_product_attention",)
Batch = dict[str, Tensor]  # by path


class Source(Patches):
    """Saves the batches of a rank of run a. ``rank``: the first rank whose rows the process has, of ``num_parts``."""

    def __init__(self, rank: int, num_parts: int = 1) -> None:
        super().__init__()
        self._first, self._num_parts = rank, num_parts
        self._loaders: list[DataLoader] = []
        self._passes: Counter[str] = Counter()
        self._saved: dict[str, list[Batch | None]] = {}
        self.step: Callable[[], int] = lambda: 0
        self.rows: list[Rows] = []

    def __enter__(self) -> Source:
        self.wrap(DataLoader, "__iter__", self._wrap_loader)
        for name in _RANDOM:
            self.wrap(F, name, self._wrap_random)
        return self

    def save(self, folder: Path) -> None:
        torch.save(self._saved, _file(folder, self._first))

    def cut(self, key: Key, tensor: Tensor) -> list[Tensor]:
        """Returns the rows of each rank, or nothing if all ranks share the tensor."""
        return []

    def _wrap_loader(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def iterate(loader: DataLoader) -> Iterator[Any]:
            if not any(one is loader for one in self._loaders):
                self._loaders.append(loader)
            name = f"{LOADER}{1 + next(i for i, one in enumerate(self._loaders) if one is loader)}"
            self._passes[name] += 1
            return self._give(f"{name}, pass {self._passes[name]}", original(loader))

        return iterate

    def _give(self, name: str, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of a pass over a loader. In the file, None is its end."""
        saved = self._saved.setdefault(name, [])
        for batch in batches:
            saved.append({path: leaf.detach().cpu().clone() for path, leaf in leaves(batch)})
            yield batch
        saved.append(None)

    def _wrap_random(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **options)
            base = int(torch.randint(1 << 31, (), device="cpu"))
            first = next(one for one in (*args, *options.values()) if isinstance(one, Tensor))
            num_rows = len(first) if first.dim() else 0
            num_parts = self._num_parts if num_rows and num_rows % self._num_parts == 0 else 1
            outputs = []
            for part in range(num_parts):
                rows = slice(part * num_rows // num_parts, (part + 1) * num_rows // num_parts)
                cut = functools.partial(_rows_of, rows if num_parts > 1 else slice(None), first)
                with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
                    torch.manual_seed(zlib.crc32(f"{base} {self._first + part}".encode()))
                    outputs.append(original(*map(cut, args), **{name: cut(one) for name, one in options.items()}))
            return outputs[0] if num_parts == 1 else torch.cat(outputs)

        return call


class Joined(Source):
    """Trains a rank of run b on the rows of ``num_parts`` ranks of run a, whose files are in ``folder``."""

    def __init__(self, rank: int, num_parts: int, folder: Path) -> None:
        super().__init__(rank * num_parts, num_parts)
        self._ranks = range(self._first, self._first + num_parts)
        self._given: list[dict[str, list[Batch | None]]] = [torch.load(_file(folder, one)) for one in self._ranks]
        traces = [RankTrace.load(folder / f"trace-{one}.pt") for one in self._ranks]
        self._shapes = [{e.key: e.shape for e in one.events if e.key.phase in PER_RANK} for one in traces]

    def cut(self, key: Key, tensor: Tensor) -> list[Tensor]:
        found = [one.get(key, ()) for one in self._shapes]
        shapes = [list(shape) for shape in found if len(shape) == tensor.dim()]
        for dim, size in enumerate(tensor.shape):
            full = list(tensor.shape)
            sizes = [one[dim] for one in shapes if [*one[:dim], size, *one[dim + 1 :]] == full]
            if len(sizes) == len(found) and sum(sizes) == size and size not in sizes:
                # A loss that is a mean divides by the rows of all ranks here, and by those of one in run a.
                scale = len(found) if key.phase == OUTPUT_GRADIENT else 1
                return [part * scale if scale > 1 else part for part in tensor.split(sizes, dim)]
        return []

    def _give(self, name: str, batches: Iterable[Any]) -> Iterator[Any]:
        given, own, template = [one.get(name, []) for one in self._given], iter(batches), None
        for index in itertools.count():
            if any(len(one) <= index for one in given):
                raise RuntimeError(f"fsdp2x compare: run b reads more {name} than run a, which read {index}.")
            parts = [batch for one in given if (batch := one[index]) is not None]
            if not parts:
                return
            joined = {path: self._join(f"number {index + 1} of the {name}", path, parts) for path in parts[0]}
            read: list[Batch] = []
            while sum(map(_num_rows, read)) < _num_rows(joined) and (batch := next(own, None)) is not None:
                template = batch
                read.append(dict(leaves(batch)))
            if not joined or template is None or read and list(read[-1]) != list(joined):
                raise RuntimeError(f"fsdp2x compare: the {name} have no tensors, or other ones than in run a.")
            own_rows = [row for one in read for row in _hashes(one)]
            self.rows.append((Key(self.step(), INPUT, name, index), _hashes(joined), own_rows))
            tensors = iter(joined.values())
            yield mapped(template, lambda old, new=tensors: next(new).to(old.device))

    def _join(self, where: str, path: str, parts: list[Batch]) -> Tensor:
        tensors = [part[path] for part in parts if path in part]
        shapes = [list(one.shape) for one in tensors]
        if len(tensors) != self._num_parts or len({tuple(one[1:]) for one in shapes}) > 1:
            raise RuntimeError(
                f"fsdp2x compare: {where} cannot be joined. Run a has {path or 'tensors'} of the shapes {shapes} on "
                f"{self._num_parts} ranks. Give all ranks as many batches, and pad all rows to one length."
            )
        return torch.cat(tensors) if all(shapes) else tensors[0]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"batches-{rank}.pt"


def _rows_of(rows: slice, first: Tensor, value: Any) -> Any:
    """Returns some rows of a tensor that has as many dims and rows as ``first``, and other values as they are."""
    has_rows = isinstance(value, Tensor) and value.dim() == first.dim() > 0 and len(value) == len(first)
    return value[rows] if has_rows and rows != slice(None) else value


def _num_rows(batch: Batch) -> int:
    return next((len(one) for one in batch.values() if one.dim()), 1)


def _hashes(batch: Batch) -> list[int]:
    """Returns a hash of each row."""
    tensors = [one.detach().cpu().contiguous() for one in batch.values() if one.dim()]
    texts = [
        b"|".join(one[i : i + 1].flatten().view(torch.uint8).numpy().tobytes() for one in tensors if len(one) > i)
        for i in range(_num_rows(batch) if tensors else 0)
    ]
    return [int.from_bytes(hashlib.blake2b(one, digest_size=7).digest()) for one in texts]
