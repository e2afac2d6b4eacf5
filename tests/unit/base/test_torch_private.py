"""Every private name of torch that the package leans on exists in the installed torch and means what we think."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdp2x.base import torch_private


@pytest.mark.parametrize("name", torch_private.__all__)
def test_exported_names_exist(name):
    assert callable(getattr(torch_private, name))


@pytest.mark.parametrize(
    ("name", "gathers"),
    [
        ("ProcessGroupNCCL", "grouped"),
        ("ProcessGroupNCCL2", "in turn"),
        ("ProcessGroupNCCLLazy", "in turn"),
        ("ProcessGroupGloo", "unknown"),
        ("FakeProcessGroup", "unknown"),
    ],
)
def test_how_a_backend_gathers_is_told_by_its_class(name, gathers):
    """Its name does not tell: "nccl" makes another class from torch 2.15 on."""

    class Group:
        def _get_backend(self, device):
            return type(name, (), {})()

    assert torch_private.gathers_of(Group(), torch.device("cuda", 0)) == gathers


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="torch was built without NCCL")
def test_options_of_nccl_are_taken_over():
    def options_like(options):
        group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
        return torch_private.nccl_options_like(group, torch.device("cuda", 0))

    given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    given.config.max_ctas = 8
    given._timeout = timedelta(seconds=7)
    found = options_like(given)
    assert found is not given and found.is_high_priority_stream and found.config.max_ctas == 8
    assert found._timeout == given._timeout
    assert options_like(None) is None  # as gloo's


def test_how_nccl_gathers_is_known_without_a_group(monkeypatch):
    class Group:
        def _get_backend(self, device):
            raise RuntimeError("no backend for device type cuda")

    assert torch_private.gathers_of(Group(), torch.device("cuda")) == "unknown"
    assert torch_private.gathers_of(None, torch.device("cuda")) == "unknown"
    create = "_create_nccl2_process_group"
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    monkeypatch.setattr(torch.distributed.distributed_c10d, create, None, raising=False)
    assert torch_private.gathers_of_nccl() == "in turn"
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    assert torch_private.gathers_of_nccl() == "grouped"
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2")
    monkeypatch.delattr(torch.distributed.distributed_c10d, create)
    assert torch_private.gathers_of_nccl() == "grouped"


def test_group_timeout_is_that_of_the_devices_backend():
    """A group of "cpu:gloo,cuda:nccl" has two."""

    class Backend:
        def __init__(self, minutes):
            self.options = type("Options", (), {"_timeout": timedelta(minutes=minutes)})

    class Group:
        def _get_backend(self, device):
            return {"cpu": Backend(30), "cuda": Backend(10)}[device.type]

    assert torch_private.group_timeout(Group(), torch.device("cuda", 1)) == timedelta(minutes=10)
    assert torch_private.group_timeout(Group(), torch.device("cpu")) == timedelta(minutes=30)
