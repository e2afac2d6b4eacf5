"""OLMo-core: its Trainer and transformer with its FSDP."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_trainer(tmp_path, dtype):
    same_as_stock("olmo_core", "olmo_core_trainer", tmp_path, dtype)
