"""LLaMA-Factory: its v1, whose own engine calls fully_shard."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("how", ["meta", "lora"])
def test_v1_sft(tmp_path, how):
    same_as_stock("llamafactory", "llamafactory_v1_sft", tmp_path, how)
