"""Handles of a GPU's memory on the wire: what arrives, where it is read, and what is refused."""

import json

import pytest
import torch

import device_handles
from fsdp2x.sync import Peer, Vllm
from fsdp2x.sync.engine_ipc import DeviceMemory, describe_handle, device_of
from fsdp2x.sync.targets.handed_memory import HandedMemory


def test_what_is_written_is_read():
    """Through JSON, and only inside of what was handed out."""
    memory = HandedMemory(torch.device("cpu"), 1000)
    with device_handles.installed():
        read = DeviceMemory(json.loads(json.dumps(describe_handle(memory.device_handle()))))
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


def test_what_targets_refuse():
    for make in (lambda: Peer("@x", memory="gpu"), lambda: Vllm("http://x", memory="gpu")):
        with pytest.raises(ValueError, match='memory must be "host" or "device", got \'gpu\''):
            make()
    with pytest.raises(ValueError, match="not for addresses of TCP"):
        Peer("tcp://127.0.0.1:7000", secret="of sixteen letters", memory="device")
