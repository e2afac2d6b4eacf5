"""spmd_types: annotated plain parameters are sharded, annotated again where modules see them, and reduced."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize(("mesh", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_annotated_parameters(tmp_path, mesh, ranks):
    same_as_stock("spmd_types", "spmd_types_units", tmp_path, mesh, ranks=ranks)
