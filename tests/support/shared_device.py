"""Collectives of ranks that share one GPU: through memory that all of them map, ordered by events, randomly late.

NCCL before 2.30 refuses such ranks, and gloo's collectives block the host, which hides missing waits. These only
enqueue work on the current stream, as NCCL's do. A rank copies its input to its buffer, which the others map by CUDA
IPC. They read it once an event of the rank has passed. The host waits only until the other hosts have recorded their
events, because nothing can wait for one earlier. Random delays come before and after the copies, and where modules
compute.

On the CPU, the system's shared memory replaces CUDA's, and the same counters check the protocol.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.modules import module as torch_module

import alike

BUFFER_BYTES = 16 << 20
TIMEOUT_S = 60
MOST_CYCLES, MOST_S = 1_000_000, 2e-3  # of one delay, on a GPU and on the CPU


class Event:
    """An event that one rank records and the others wait for. All see how often it was recorded."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(interprocess=True) if device.type == "cuda" else None
        self._num_records = torch.zeros(1, dtype=torch.int64).share_memory_()

    def record(self) -> None:
        if self._event is not None:
            self._event.record()
        self._num_records += 1

    def wait(self, num_records: int) -> None:
        """Lets the current stream wait for the record of this number. The host waits until there is one."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._num_records.item() < num_records:
            if time.monotonic() > deadline:
                raise RuntimeError(f"another rank has not come to its collective number {num_records} in time")
            time.sleep(2e-5)
        if (recorded := self._num_records.item()) != num_records:
            raise RuntimeError(f"another rank is ahead: it has recorded {recorded} times instead of {num_records}")
        if self._event is not None:
            self._event.wait()


class Channel:
    """The buffers of a group's ranks. Making it is collective. ``delay`` makes the current stream late."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, delay: Callable[[], None]) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._delay, self._num_exchanges = delay, 0
        memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        own = memory if memory.is_cuda else memory.share_memory_(), Event(device), Event(device)
        # A handle can be opened once.
        sent = [None if rank == self.rank else bytes(ForkingPickler.dumps(own)) for rank in range(self.world)]
        received: list[list] = [[] for _ in sent]
        dist.all_gather_object(received, sent, group)
        handles = [one[self.rank] for one in received]
        self._parts = [own if handle is None else ForkingPickler.loads(handle) for handle in handles]

    @contextlib.contextmanager
    def inputs(self, source: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yields the ranks' inputs, of which ``source`` is this rank's. They may be read inside the block."""
        if source.nbytes > BUFFER_BYTES:
            raise ValueError(f"an input of {source.nbytes} bytes does not fit in {BUFFER_BYTES}: use a smaller model")
        memory, written, read = self._parts[self.rank]
        self._delay()
        for _, _, was_read in self._parts:
            was_read.wait(self._num_exchanges)
        memory[: source.nbytes].view(source.dtype).copy_(source.reshape(-1))
        self._delay()
        written.record()
        self._num_exchanges += 1
        for _, was_written, _ in self._parts:
            was_written.wait(self._num_exchanges)
        yield [part[: source.nbytes].view(source.dtype) for part, _, _ in self._parts]
        read.record()
        self._delay()


class Collectives:
    """The collectives of this process, one channel for each group."""

    def __init__(self, device: torch.device, seed: int | None) -> None:
        """``seed``: of the delays. None: there are none."""
        self._device = device
        self._random = random.Random(f"{seed}, rank {dist.get_rank()}") if seed is not None else None
        self._channels: dict[dist.ProcessGroup, Channel] = {}
        self.num_calls = 0

    def delay(self, *_) -> None:
        if self._random is None:
            return
        share = self._random.random() ** 4  # mostly short
        if self._device.type == "cuda":
            torch.cuda._sleep(int(share * MOST_CYCLES))
        else:
            time.sleep(share * MOST_S)

    def delay_backward(self, module, args, output) -> None:
        """A forward hook."""
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self.delay)

    def _inputs(self, group, source: torch.Tensor):
        self.num_calls += 1
        group = group or dist.group.WORLD
        if group not in self._channels:
            self._channels[group] = Channel(group, self._device, self.delay)
        return self._channels[group].inputs(source)

    def gather(self, output: torch.Tensor, input: torch.Tensor, group=None, async_op: bool = False) -> None:
        with self._inputs(group, input) as parts:
            for place, part in zip(output.view(len(parts), input.numel()), parts, strict=True):
                place.copy_(part)

    def gather_many(self, group, outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """In one exchange, as NCCL in one launch."""
        sizes = [source.nbytes for source in sources]
        with self._inputs(group, torch.cat([source.reshape(-1).view(torch.uint8) for source in sources])) as parts:
            for rank, part in enumerate(parts):
                for output, sent in zip(outputs, part.split(sizes), strict=True):
                    output.view(-1).view(torch.uint8).view(len(parts), -1)[rank].copy_(sent)

    def reduce(self, output, input, op=dist.ReduceOp.SUM, group=None, async_op: bool = False) -> None:
        rank = dist.get_rank(group)
        with self._inputs(group, input) as parts:
            self._combine(output, [part.view(len(parts), output.numel())[rank] for part in parts], op)

    def all_reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM, group=None, async_op: bool = False) -> None:
        with self._inputs(group, tensor) as parts:
            self._combine(tensor, parts, op)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, group=None, async_op: bool = False) -> None:
        rank = dist.get_rank(group)
        with self._inputs(group, input) as parts:
            rows = len(parts), input.numel() // len(parts)
            for place, part in zip(output.view(rows), parts, strict=True):
                place.copy_(part.view(rows)[rank])

    @staticmethod
    def _combine(output: torch.Tensor, parts: list[torch.Tensor], op) -> None:
        """Adds in the order of ranks, so all ranks get the same bits."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            raise NotImplementedError(f"ranks that share a device have no reduction {op}")
        result = parts[0].clone()
        for part in parts[1:]:
            result = torch.maximum(result, part) if op == dist.ReduceOp.MAX else result + part
        output.copy_((result / len(parts) if op == dist.ReduceOp.AVG else result).view_as(output))

    def allocator(self, kind, group, device) -> None:
        """No group's own memory."""


@contextlib.contextmanager
def ranks(device: torch.device, seed: int | None) -> Iterator[Collectives]:
    """Puts such collectives in the place of torch.distributed's, on all ranks at the same time."""
    collectives = Collectives(device, seed)
    hooks = [
        torch_module.register_module_forward_pre_hook(collectives.delay),
        torch_module.register_module_forward_hook(collectives.delay_backward),
    ]
    try:
        with alike.instead(collectives):
            yield collectives
            if device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()  # nothing is unmapped while another rank reads it
    finally:
        for hook in hooks:
            hook.remove()
