"""transformers, accelerate and peft, and torch's state-dict helpers on a model of theirs."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("how", ["plain", "cpu_ram_efficient", "no_reshard_checkpointing"])
def test_accelerate(tmp_path, how):
    same_as_stock("huggingface", "accelerate_fsdp2", tmp_path, how)


@pytest.mark.parametrize("what", ["all", "lora", "dora"])
def test_trainer_with_fsdp_version_2(tmp_path, what):
    same_as_stock("huggingface", "trainer_fsdp2", tmp_path, what)


@pytest.mark.parametrize(
    ("how", "embedding", "ranks"), [("loop", "untied", 2), ("loop", "tied", 4), ("trainer", "tied", 2)]
)
def test_transformers_shards_while_it_loads(tmp_path, how, embedding, ranks):
    same_as_stock("huggingface", "transformers_native", tmp_path, how, embedding, ranks=ranks)


@pytest.mark.parametrize("how", ["full", "dcp"])
def test_state_dict_helpers_of_torch(tmp_path, how):
    same_as_stock("huggingface", "state_dict_helpers", tmp_path, how)
