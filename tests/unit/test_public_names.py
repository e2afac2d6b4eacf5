"""What `fsdp2x` exports, and that torch's own names are torch's own objects in every version."""

import pytest
import torch.distributed.fsdp as stock

import fsdp2x


@pytest.mark.parametrize("name", fsdp2x.__all__)
def test_exported_names_exist(name):
    assert getattr(fsdp2x, name) is not None


@pytest.mark.parametrize("name", ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"])
def test_policies_are_those_of_torch(name):
    """DataParallelMeshDims came with torch 2.12: where torch has none, we have none."""
    assert (name in fsdp2x.__all__) == hasattr(stock, name)
    assert getattr(fsdp2x, name, None) is getattr(stock, name, None)
