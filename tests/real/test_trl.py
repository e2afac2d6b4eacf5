"""TRL: SFTTrainer and RewardTrainer through accelerate's FSDP version 2."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("what", ["all", "lora", "qlora"])
def test_sft(tmp_path, what):
    same_as_stock("trl", "trl_sft", tmp_path, what, "kept")


@pytest.mark.parametrize("what", ["all", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_sft_that_recomputes(tmp_path, what, recompute):
    same_as_stock("trl", "trl_sft", tmp_path, what, recompute)


def test_reward(tmp_path):
    same_as_stock("trl", "trl_reward", tmp_path)
