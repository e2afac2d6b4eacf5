"""Every private name of torch that the package leans on exists in the installed torch and means what we think."""

from datetime import timedelta

import pytest
import torch
from torch import nn

from fsdp2x.base import torch_private


@pytest.mark.parametrize("name", torch_private.__all__)
def test_exported_names_exist(name):
    assert callable(getattr(torch_private, name))


def test_states_are_registered_once_and_can_be_forgotten():
    from torch.distributed._composable import contract

    @contract()
    def fully_shard(module):
        return module

    module, state = nn.Linear(2, 2), torch_private.State()
    torch_private.register_state([module], "fully_shard", state)
    assert torch_private.state_of(module, torch_private.State) is state
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        torch_private.register_state([nn.Linear(2, 2), module], "fully_shard", torch_private.State())
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        fully_shard(module)
    torch_private.forget_state([module], "fully_shard")
    assert torch_private.state_of(module, torch_private.State) is None
    assert fully_shard(module) is module
    assert not torch_private.is_replicated(module)


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


def test_hooks_stay_outside_of_graphs():
    """Neither a hook nor what it calls is compiled. The code around it is."""
    graphs = []

    def record(graph, example_inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def called(x):
        return torch.sin(x)

    hook = torch_private.outside_graphs(lambda module, x, more: called(x))

    @torch.compile(backend=record)
    def run(x):
        return torch.exp(hook(None, torch.cos(x), None))

    x = torch.ones(2)
    assert torch.equal(run(x), torch.exp(torch.sin(torch.cos(x))))
    assert [name for graph in graphs for name in ("cos", "sin", "exp") if name in str(graph)] == ["cos", "exp"], graphs
