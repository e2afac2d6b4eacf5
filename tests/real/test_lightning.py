"""Lightning: ModelParallelStrategy of Trainer and Fabric."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("how", ["trainer", "bf16", "meta", "resume", "fabric"])
def test_model_parallel_strategy(tmp_path, how):
    same_as_stock("lightning", "lightning_run", tmp_path, how)
