"""torchtitan: its Trainer with llama3's debug model in the default setting (spmd_types)."""

from environments import same_as_stock


def test_llama3(tmp_path):
    same_as_stock("torchtitan", "torchtitan_llama3", tmp_path)
