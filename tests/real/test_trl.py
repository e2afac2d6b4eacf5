"""TRL: supervised fine-tuning by SFTTrainer through accelerate's FSDP version 2."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("what", ["all", "lora"])
def test_sft(tmp_path, what):
    same_as_stock("trl", "trl_sft", tmp_path, what)
