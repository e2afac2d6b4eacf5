"""Rank 0 reads, every rank gets its rows: one scatter for a bucket of parameters.

What rank r is sent for a bucket; the same length for every rank, all starts aligned:

    | flag |pad| rows of r of p0 |pad| rows of r of p1 |pad| ...        flag 1: rank 0 failed, nothing follows

Rank 0 holds one bucket (or one larger parameter) at a time, the others their part of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x.hf.layout import in_runs
from fsdp2x.hf.targets import Target
from fsdp2x.reading.tensors import Source
from fsdp2x.runtime.failures import exchange, rank_and_size, run_on_all_ranks
from fsdp2x.runtime.memory_file import aligned_starts
from fsdp2x.runtime.native import _C

BUCKET_BYTES = 16 << 20

Box = tuple[list[int], list[int]]


@torch.no_grad()
def send_from_rank_0(steps: list[tuple[Target, list[Source]]], bar: Any, what: str) -> None:
    """Fills the targets of all ranks from the sources of rank 0. Collective over the default process group.

    Raises:
        CheckpointError: on every rank, when reading failed on rank 0.
    """
    rank, world = rank_and_size()
    mine = [target.box() or ([0] * len(target.shape), list(target.shape)) for target, _ in steps]
    boxes: list[list[Box]] = exchange(mine)
    error: Exception | None = None
    for bucket in in_runs(range(len(steps)), lambda index: steps[index][0].num_bytes, BUCKET_BYTES):
        sizes = [_place(bucket, steps, boxes[other])[1] for other in range(world)]
        sent = None
        if rank == 0:
            sent = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(world)]
            try:
                _read(bucket, steps, boxes, sent)
            except Exception as failed:
                error = failed
                for part in sent:
                    part[0] = 1
        received = _scatter(sent, max(sizes))
        if received[0]:
            break
        for index, start in zip(bucket, _place(bucket, steps, mine)[0], strict=True):
            target = steps[index][0]
            part = _view(received, start, target, mine[index])
            if target.box() is None:
                target.fill_from_whole(part)
            else:
                target.local.copy_(part)
            bar.add(target.num_bytes)

    def tell() -> None:
        if error is not None:
            raise error

    run_on_all_ranks(tell, what=what)


def _scatter(sent: list[torch.Tensor] | None, num_bytes: int) -> torch.Tensor:
    if rank_and_size()[1] == 1:
        return sent[0]
    # Without a CPU backend the bytes travel through the accelerator.
    device = torch.device("cpu")
    if "cpu" not in dist.get_backend_config():
        device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
        sent = None if sent is None else [part.to(device) for part in sent]
    received = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    dist.scatter(received, sent, src=0)
    return received.cpu()


def _place(bucket: list[int], steps: list, boxes: list[Box]) -> tuple[list[int], int]:
    sizes = (math.prod(boxes[index][1]) * steps[index][0].dtype.itemsize for index in bucket)
    return aligned_starts(sizes, begin=_C.ALIGN_BYTES)


def _view(buffer: torch.Tensor, start: int, target: Target, box: Box) -> torch.Tensor:
    num_bytes = math.prod(box[1]) * target.dtype.itemsize
    return buffer[start : start + num_bytes].view(target.dtype).view(box[1])


def _read(bucket: list[int], steps: list, boxes: list[list[Box]], sent: list[torch.Tensor]) -> None:
    places = [_place(bucket, steps, boxes[rank])[0] for rank in range(len(sent))]
    for position, index in enumerate(bucket):
        target, sources = steps[index]
        done: dict[tuple, torch.Tensor] = {}
        for rank, part in enumerate(sent):
            box = boxes[rank][index]
            view = _view(part, places[rank][position], target, box)
            key = (tuple(box[0]), tuple(box[1]))
            if key in done:
                view.copy_(done[key])  # a replica
            else:
                sources[0].read(box[0], view)
                done[key] = view
