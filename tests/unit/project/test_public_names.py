"""What `fsdp2x` exports, and that torch's own names are torch's own objects in every version."""

import inspect

import pytest
import torch.distributed.fsdp as stock

import fsdp2x


@pytest.mark.parametrize("name", ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"])
def test_policies_are_those_of_torch(name):
    """DataParallelMeshDims came with torch 2.12: where torch has none, we have none."""
    assert (name in fsdp2x.__all__) == hasattr(stock, name)
    assert getattr(fsdp2x, name, None) is getattr(stock, name, None)


OURS = [name for name, member in vars(fsdp2x.FSDPModule).items() if inspect.isfunction(member) and name[0] != "_"]


@pytest.mark.parametrize("name", [name for name in OURS if hasattr(stock.FSDPModule, name)])
def test_arguments_of_methods_are_named_as_upstream(name):
    """Ours may take more behind them."""
    ours, theirs = (
        list(inspect.signature(getattr(cls, name)).parameters) for cls in (fsdp2x.FSDPModule, stock.FSDPModule)
    )
    assert ours[: len(theirs)] == theirs
