"""A bucket as SGLang's ``load_format="flattened_bucket"`` takes it: one tensor of bytes, and what lies where in it.

    | t0 |gap| t1 |gap| t2 ...       a tensor begins at a multiple of 64 bytes, as views of its dtype must

SGLang unpickles it by an exact list of globals; what is written here needs nothing of SGLang's own. The bytes are in
the payload, where nothing has to outlive the request; or in memory of a GPU, of which each worker is sent a handle: its
number is the GPU's UUID, as SGLang writes it itself and reads it in place of torch's.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from fsdp2x.hf.names import TensorSpec
from fsdp2x.runtime.native import _C
from fsdp2x.sync.targets.handed_memory import HandedMemory


def flattened_bucket(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> str:
    """The payload of one rank, in base64."""
    places, num_bytes = _places(specs)
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    _fill(flat, places, tensors)
    return _written(flat, places)


def handed_bucket(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], num_workers: int
) -> tuple[HandedMemory, list[str]]:
    """The bucket in memory of the tensors' GPU, and a payload for each worker, which must outlive its last read.

    Raises:
        ValueError: the tensors are not on a GPU.
    """
    places, num_bytes = _places(specs)
    memory = HandedMemory(tensors[0].device, num_bytes)
    _fill(memory.bytes, places, tensors)
    memory.synchronize()
    return memory, [_written(_Handle(memory.device_handle()), places) for _ in range(num_workers)]


class _Handle:
    """Unpickles as the tensor."""

    def __init__(self, arguments: tuple) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple:
        return reductions.rebuild_cuda_tensor, self._arguments


def _places(specs: Sequence[TensorSpec]) -> tuple[list[SimpleNamespace], int]:
    places, end = [], 0
    for spec in specs:
        places.append(SimpleNamespace(name=spec.name, shape=spec.shape, dtype=spec.dtype, numel=spec.num_bytes))
        places[-1].start_idx, places[-1].end_idx = end, end + spec.num_bytes
        end = _C.align_up(end + spec.num_bytes)
    return places, end


def _fill(flat: torch.Tensor, places: Sequence[SimpleNamespace], tensors: Sequence[torch.Tensor]) -> None:
    for place, tensor in zip(places, tensors, strict=True):
        flat[place.start_idx : place.end_idx].view(place.dtype).view(place.shape).copy_(tensor)


def _written(flat: Any, places: Sequence[SimpleNamespace]) -> str:
    return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": places}, protocol=4)).decode()
