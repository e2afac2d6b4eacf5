"""Every private name of torch that the package leans on exists in the installed torch and means what we think."""

import ast
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp2x.runtime import torch_private

PACKAGE = Path(torch_private.__file__).resolve().parents[1]
# Underscored names that users of nn.Module and DTensor are expected to know, or that are ours.
COMMON = {"_parameters", "_buffers", "_modules", "_local_tensor", "_spec"}


def private_imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
        else:
            continue
        found += [part for part in parts if part.startswith("_")]
    return found


def test_only_one_file_imports_private_names():
    culprits = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if path.name != "torch_private.py" and (names := private_imports(path))
    }
    assert culprits == {}


@pytest.mark.parametrize("name", torch_private.__all__)
def test_exported_names_exist(name):
    assert callable(getattr(torch_private, name))


def test_contract_gives_states_and_can_be_undone():
    class State(torch_private.State):
        pass

    @torch_private.contract(state_cls=State)
    def mark(module):
        return module

    module = nn.Linear(2, 2)
    mark(module)
    assert isinstance(mark.state(module), State)
    with pytest.raises(AssertionError):
        mark(module)
    torch_private.forget_contract([module], mark.__wrapped__)
    assert mark.state(module) is None
    mark(module)
    assert not torch_private.is_replicated(module)


def test_root_modules_drops_those_below_others():
    outer, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    assert torch_private.root_modules([outer, outer[0], other]) == [outer, other]


def test_accelerator_type_is_a_device_type():
    assert torch.device(torch_private.accelerator_type()).type == torch_private.accelerator_type()


def test_group_timeout_falls_back():
    assert torch_private.group_timeout(object()) == timedelta(minutes=30)
