"""Handles of a GPU's memory on the wire: what arrives, where it is read, and what is refused."""

import json

import pytest
import torch

import device_handles
from fsdp2x.base import torch_private
from fsdp2x.lifecycle.sleep import _give_to_driver as give_to_driver
from fsdp2x.rl.sync.receiver.engine import ReceiveBuffer, describe_handle, device_of, opened_memory
from fsdp2x.rl.sync.targets.transports import HandedMemory, IpcTransport
from fsdp2x.sync import Peer, Sglang, Vllm


def test_what_is_written_is_read():
    """Through JSON, and only inside of what was handed out."""
    memory = HandedMemory(torch.device("cpu"), 1000)
    with device_handles.installed():
        read = ReceiveBuffer(opened_memory(json.loads(json.dumps(describe_handle(memory.device_handle())))))
    memory.bytes[8:16].view(torch.float32).copy_(torch.tensor([1.5, -2.0]))
    assert read.view(8, torch.float32, [2]).tolist() == [1.5, -2.0]
    for offset, shape in ((996, [2]), (-4, [1]), (2, [1])):
        with pytest.raises(ValueError, match="are not in a memory of 1000 bytes"):
            read.view(offset, torch.float32, shape)


def test_a_gpu_that_is_not_seen():
    with pytest.raises(ValueError, match="hand out memory of GPU of-nobody, and this engine sees"):
        device_of("of-nobody")


def test_memory_of_the_host_is_no_gpus():
    with pytest.raises(ValueError, match="this rank gathers weights on the CPU"):
        HandedMemory(torch.device("cpu"), 8).device_handle()
    with pytest.raises(NotImplementedError, match="memory of meta cannot be handed"):
        HandedMemory(torch.device("meta"), 8)


SETTINGS = "max_split_size_mb:64,expandable_segments:{},roundup_power2_divisions:[256:1,512:2]"


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no allocator for CUDA")
@pytest.mark.parametrize("on", ["True", "False"])
@pytest.mark.parametrize("tells", [True, False])
def test_memory_for_others_is_in_no_expandable_segment(monkeypatch, on, tells):
    """Other processes may be unable to map one; the user's settings are as they were behind it."""
    allocator = {"now": SETTINGS.format(on)}
    private = torch_private.torch._C
    monkeypatch.setattr(private, "_accelerator_setAllocatorSettings", lambda text: allocator.update(now=text))
    if tells:
        monkeypatch.setattr(private, "_accelerator_getAllocatorSettings", lambda: allocator["now"], raising=False)
    else:
        monkeypatch.delattr(private, "_accelerator_getAllocatorSettings", raising=False)
        told = {"PYTORCH_CUDA_ALLOC_CONF": allocator["now"]}
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": told})
    during = []
    monkeypatch.setattr(torch, "empty", lambda *_, **__: during.append(allocator["now"]))
    HandedMemory(torch.device("cuda", 0), 8)
    assert len(during) == 1 and "expandable_segments:True" not in during[0]
    assert "max_split_size_mb:64" in during[0] and "[256:1,512:2]" in during[0]
    assert allocator["now"] == SETTINGS.format(on)


def test_dropped_buckets_go_back_to_the_allocator(monkeypatch):
    """At the end of a push, however it ends, and before a model that sleeps gives memory to the driver."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    target = Sglang("http://127.0.0.1:1")
    target._servers = []
    for end in (lambda: target.commit(1), lambda: target.abort("no reason"), target.close):
        target._handed = [object()]
        end()
        assert not target._handed and calls == ["ipc_collect"]
        calls.clear()
    transport = IpcTransport()
    transport._handed = object()
    transport.close()
    assert transport._handed is None and calls == ["ipc_collect"]
    calls.clear()
    give_to_driver(torch.device("cuda", 0))
    assert calls == ["ipc_collect", "empty_cache"]


def test_what_targets_refuse():
    for make in (lambda: Peer("@x", memory="gpu"), lambda: Vllm("http://x", memory="gpu")):
        with pytest.raises(ValueError, match="memory must be 'host' or 'device', got 'gpu'"):
            make()
