"""torchao: float8 training whose weights are gathered in float8."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("scales", ["dynamic", "precomputed"])
def test_float8_all_gather(tmp_path, scales):
    found = same_as_stock("torchao", "torchao_float8", tmp_path, scales)
    assert len(set(found["shm"][0]["values"])) > 20  # it trains
