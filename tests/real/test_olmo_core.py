"""OLMo-core: its Trainer and transformer with its FSDP."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize(("how", "ranks"), [("fp32", 2), ("bf16", 2), ("hsdp", 4)])
def test_trainer(tmp_path, how, ranks):
    same_as_stock("olmo_core", "olmo_core_trainer", tmp_path, how, ranks=ranks)
