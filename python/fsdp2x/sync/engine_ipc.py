"""The engine's side of memory of a GPU that trainers hand out: for a ``Receiver`` whose trainer says memory="device".

Needs torch. A handle is JSON, of the arguments that torch rebuilds a CUDA tensor from, with
the GPU's UUID in place of its number, which may be another one here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing import reductions

_DEVICE = 6  # among the arguments of rebuild_cuda_tensor
_SIZE, _STORAGE, _BYTES, _COUNTER, _COUNTER_OFFSET, _EVENT, _EVENT_SYNC = 1, 7, 8, 11, 12, 13, 14


def describe_handle(arguments: tuple) -> dict[str, Any]:
    """JSON of the arguments for a flat tensor of bytes, with the UUID among them."""
    return {
        "uuid": arguments[_DEVICE],
        "bytes": arguments[_SIZE][0],
        "offset": arguments[3],
        "storage": arguments[_STORAGE].hex(),
        "storage_bytes": [arguments[_BYTES], arguments[_BYTES + 1]],
        "counter": [arguments[_COUNTER].hex(), arguments[_COUNTER_OFFSET]],
        "event": [arguments[_EVENT].hex(), bool(arguments[_EVENT_SYNC])],
    }


def device_of(uuid: str) -> int:
    """The number of a GPU here.

    Raises:
        ValueError: this process does not see it.
    """
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise ValueError(
            f"the trainers hand out memory of GPU {uuid}, and this engine sees {seen}: start it where it sees that, "
            'or leave memory at "host"'
        )
    return seen.index(uuid)


def opened_memory(handle: Mapping[str, Any]) -> torch.Tensor:
    """The flat bytes that a handle names, whose readers and writers see the same memory."""
    head = (torch.Tensor, torch.Size([handle["bytes"]]), (1,), handle["offset"], torch.UntypedStorage, torch.uint8)
    tail = (bytes.fromhex(handle["storage"]), *handle["storage_bytes"], False)
    counter, event = handle["counter"], handle["event"]
    tail += (bytes.fromhex(counter[0]), counter[1], bytes.fromhex(event[0]), event[1])
    return reductions.rebuild_cuda_tensor(*head, device_of(handle["uuid"]), *tail)
