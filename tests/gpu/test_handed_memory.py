"""One GPU: another process reads a bucket through CUDA IPC, under each setting of torch's allocator."""

import multiprocessing

import pytest
import torch

import one_gpu
from fsdp2x.base.memory_file import collect_handed
from fsdp2x.rl.sync.targets.transports import HandedMemory
from fsdp2x.sync import engine

pytestmark = [one_gpu.needs_gpu, pytest.mark.shows("broadcasts")]


def read(handle, queue) -> None:
    memory = engine.opened_memory(handle)
    queue.put(memory.sum(dtype=torch.int64).item())
    del memory
    torch.cuda.ipc_collect()


@pytest.mark.parametrize("expandable", [False, True])
def test_a_bucket_is_handed_to_another_process(expandable):
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    try:
        before = torch.cuda.memory_allocated()
        memory = HandedMemory(torch.device("cuda", 0), 32 * 2**20)
        memory.bytes.fill_(3)
        memory.synchronize()
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=read, args=(engine.describe_handle(memory.device_handle()), queue))
        process.start()
        assert queue.get(timeout=120) == 3 * 32 * 2**20
        process.join(60)
        del memory
        collect_handed()
        assert torch.cuda.memory_allocated() == before
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
