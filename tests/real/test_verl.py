"""verl: its SFTTrainer with its FSDP engine, strategy fsdp2."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize(("how", "ranks"), [("fsdp", 2), ("lora", 2), ("no_reshard", 2), ("hsdp", 4)])
def test_sft_trainer(tmp_path, how, ranks):
    same_as_stock("verl", "verl_sft", tmp_path, how, ranks=ranks)
