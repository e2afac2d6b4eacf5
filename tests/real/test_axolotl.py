"""axolotl: its own training with its configuration of FSDP version 2 and its patches of accelerate's."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("what", ["full", "meta", "lora"])
def test_sft(tmp_path, what):
    same_as_stock("axolotl", "axolotl_sft", tmp_path, what)
