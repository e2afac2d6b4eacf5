"""verl: its SFTTrainer with its FSDP engine, strategy fsdp2; PPO's actor and critic in its Ray workers."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("how", ["fsdp", "lora", "no_reshard", "ulysses"])
def test_sft_trainer(tmp_path, how):
    same_as_stock("verl", "verl_sft", tmp_path, how)


def test_ppo_in_ray_workers(tmp_path):
    same_as_stock("verl", "verl_ppo", tmp_path, torchrun=False)
